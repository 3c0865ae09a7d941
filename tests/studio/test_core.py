"""The pages' arithmetic is Python's, in Node; test_pages.py compares it in the page."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from regard.studio.server import file_table
from tests.studio.golden import golden

RUN = """
import { readFileSync } from "node:fs";
const [core, view, byhand, { compare }] = await Promise.all(
  ["core.js", "view.js", "byhand.js", "compare.js"].map((name) => import(`./${name}`)));
const found = compare(core, view, JSON.parse(readFileSync("golden.json")), byhand.PRESETS);
console.log(JSON.stringify(found));
"""


def test_numbers_in_node_equal_pythons(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node 20 or newer: https://nodejs.org")
    for name, (content, _) in file_table().items():
        if name.endswith(".js"):
            # A browser looks modules up on the server, Node in the folder.
            text = content.decode().replace('from "/', 'from "./')
            (tmp_path / name[1:]).write_text(text, encoding="utf-8")
    compare = Path(__file__).parent / "compare.js"
    (tmp_path / "compare.js").write_text(compare.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "golden.json").write_text(json.dumps(golden()), encoding="utf-8")
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (tmp_path / "run.js").write_text(RUN, encoding="utf-8")
    done = subprocess.run(
        [node, "run.js"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["checked"] > 3000
