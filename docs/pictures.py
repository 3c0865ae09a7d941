"""Takes the pictures of docs/ and writes the demo's output into docs/start.md: `make pictures`.

The models are trained by `regard demo`, into runs/, unless that was done before. Each picture
contains a hash of the files and training settings that determine it, and so does the page with the
output; a test compares them, so that a stale picture is noticed. Needs Chromium.
"""

import dataclasses
import hashlib
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image, PngImagePlugin

DOCS = Path(__file__).parent
ROOT = DOCS.parent
KEY = "sources-sha256"
DEMO_BLOCK = re.compile(r"<!-- demo output (\w+) -->\n```text\n(.*?)```", re.S)
HIDE_UNUSUAL_SCRIPTS = """() => document.querySelectorAll("main button").forEach((button) => {
  if (/[\\u0e00-\\u0e7f\\u2e80-\\uffef]/.test(button.textContent)) button.remove();
})"""
"""Removes examples that a machine without Thai and Japanese fonts shows as boxes."""
RUNS = {"dates": ROOT / "runs/demo-dates", "read": ROOT / "runs/demo-read"}


@dataclass(frozen=True)
class Picture:
    """A page of the studio."""

    address: str
    height: int
    demo: Literal["dates", "read"] | None = None
    """The demo that trains the model, if one is shown."""
    dark: bool = False

    def digest(self) -> str:
        return digest("regard/studio/static/*", self.demo)


PICTURES = {
    "studio-byhand": Picture("byhand", 1280),
    "studio-translate": Picture("translate?text=4.+M%C3%A4rz+1983", 1180, "dates", dark=True),
    "studio-read": Picture("read", 1120, "read"),
}


def demo_digest() -> str:
    """The hash of all that determines the output in docs/start.md."""
    return digest("regard/cli/demo.py", "dates")


def digest(pattern: str, demo: str | None) -> str:
    """The SHA-256 of the files that match, and of the settings of a demo's training.

    A module may move: lines that import from it do not count.
    """
    state = hashlib.sha256()
    for path in sorted(path for path in ROOT.glob(pattern) if path.is_file()):
        state.update(path.relative_to(ROOT).as_posix().encode())
        lines = path.read_bytes().splitlines(keepends=True)
        imports = (b"from ", b"import ") if path.suffix == ".py" else ()
        state.update(b"".join(line for line in lines if not line.startswith(imports)))
    if demo is not None:
        task = importlib.import_module(f"regard.task.{demo}")
        state.update(json.dumps(chosen_settings(task.preset("tiny")), sort_keys=True).encode())
    return state.hexdigest()[:16]


def chosen_settings(config: Any) -> dict[str, Any]:
    """The settings that differ from their defaults: a new one makes no picture stale."""
    chosen = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            chosen[field.name] = chosen_settings(value)
        elif value != field.default:
            chosen[field.name] = value
    return chosen


def train(name: str) -> str:
    """The output of `regard demo NAME` once its model is trained."""
    command = [sys.executable, "-m", "regard", "demo", name, "--run", str(RUNS[name])]
    for _ in range(2):  # the second time it only shows the results
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def write_demo_output(output: str) -> None:
    """Replaces the block in docs/start.md by the demo's results and its first heat map."""
    page = DOCS / "start.md"
    results, heat_map, *_ = output[output.index("Exact match") :].split("\nWhere head")
    lines = f"{results}\nWhere head{heat_map}".strip()
    block = f"<!-- demo output {demo_digest()} -->\n```text\n{lines}\n```"
    text = page.read_text(encoding="utf-8")
    assert DEMO_BLOCK.search(text)
    page.write_text(DEMO_BLOCK.sub(lambda _: block, text), encoding="utf-8")


def take(browser: Any, address: str, picture: Picture) -> bytes:
    """The page as PNG, once nothing on it is busy."""
    context = browser.new_context(
        viewport={"width": 1280, "height": picture.height},
        color_scheme="dark" if picture.dark else "light",
    )
    page = context.new_page()
    page.goto(f"{address}#{picture.address}")
    page.wait_for_selector(f"body[data-ready={picture.address.partition('?')[0]}]")
    page.wait_for_selector("[aria-busy=true]", state="detached")
    if (effects := page.locator("[data-key=effects]")).count():
        effects.first.click()
        effects.first.wait_for(state="detached")
    page.evaluate(HIDE_UNUSUAL_SCRIPTS)
    png: bytes = page.screenshot()
    context.close()
    return png


def main() -> None:
    from playwright.sync_api import sync_playwright

    from regard.studio.ask import questions
    from regard.studio.runs import Runs
    from regard.studio.server import Server

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("pictures need Chromium on the PATH")
    outputs = {name: train(name) for name in RUNS}
    write_demo_output(outputs["dates"])
    flags = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
    with (
        Server("127.0.0.1", 0, questions(Runs(list(RUNS.values())))) as server,
        sync_playwright() as playwright,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for name, picture in PICTURES.items():
            png = take(browser, server.address, picture)
            note = PngImagePlugin.PngInfo()
            note.add_text(KEY, picture.digest())
            image = Image.open(io.BytesIO(png)).convert("RGB").quantize(128)
            image.save(DOCS / f"{name}.png", pnginfo=note, optimize=True)
        server.shutdown()


if __name__ == "__main__":
    main()
