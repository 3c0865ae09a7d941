"""Files that are replaced whole."""

from pathlib import Path

import pytest
from torch import nn

from regard import save
from regard.machine import atomic


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("wanted", [0o600, 0o664, 0o444])
def test_a_replaced_file_keeps_its_mode(wanted: int, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    atomic.write(page, "old")
    page.chmod(wanted)
    link = tmp_path / "link"
    link.symlink_to(page)
    atomic.write(link, "new")
    assert page.read_text() == "new"
    assert mode(page) == wanted


def test_a_replaced_model_keeps_the_modes_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, nn.Linear(2, 3), files={"tokenizer.json": b"{}"})
    for path in folder.iterdir():
        path.chmod(0o600)
    save(folder, nn.Linear(2, 3), files={"tokenizer.json": b"{}"})
    assert {mode(path) for path in folder.iterdir()} == {0o600}
