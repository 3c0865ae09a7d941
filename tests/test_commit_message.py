"""The check of commit messages accepts imperative subjects and refuses others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import HANG

SCRIPT = Path(__file__).parent.parent / ".ci" / "commit_message.py"


def check(word: str | Path, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, word], cwd=folder, capture_output=True, text=True, timeout=HANG
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "message",
    [
        "Remove the second beam search\n",
        "Cache `WeightNorm._norm`\n\nEqual modules compared as different.\n",
        "Pass lengths to the encoder",
        "Seed the sampler with its index",
        "Re-export attend",
        "Address rounding in int8",
        "Position tokens on the device",
        'Revert "The tests know it."\n\nThis reverts commit 1234.',
        "Merge branch 'main' into masks",
        "fixup! Remove the second beam search",
        f"Add {68 * 'x'}",
        "Add a mask\n# A comment of git is no second line.\n\nBody.\n",
        "Add a mask\n# ------------------------ >8 ------------------------\ndiff --git a b\n",
    ],
)
def test_an_imperative_subject_is_accepted(message: str, tmp_path: Path) -> None:
    (tmp_path / "message").write_text(message)
    assert check("message", tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("Added a mask", '"Added" is no imperative'),
        ("Adds a mask", '"Adds" is no imperative'),
        ("Adding a mask", '"Adding" is no imperative'),
        ("A test knows what dates are learned by", '"A" is no imperative'),
        ("The number of threads does not show", '"The" is no imperative'),
        ("Attention of short sequences calls tiles", '"Attention" is no imperative'),
        ("README: shorter", '"README:" is no imperative'),
        ("fix: masks", '"fix:" is no imperative'),
        ("add a mask", '"add" is no imperative'),
        ("", '"" is no imperative'),
        (f"Add {69 * 'x'}", "the subject has 73 characters; write at most 72"),
        ("Add a mask.", "ends with a full stop"),
        ("Add a mask\nof a window", "line 2 is not empty"),
    ],
)
def test_other_messages_are_refused(message: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "message").write_text(message)
    status, error = check("message", tmp_path)
    assert status == 1
    assert fault in error
    assert error.count("\n") == 1


def test_each_commit_of_a_range_is_checked(tmp_path: Path) -> None:
    author = {"NAME": "A", "EMAIL": "a@regard.example"}
    people = {f"GIT_{who}_{k}": v for who in ("AUTHOR", "COMMITTER") for k, v in author.items()}

    def git(*words: str) -> None:
        environment = {**os.environ, **people}
        subprocess.run(["git", *words], cwd=tmp_path, env=environment, check=True, timeout=HANG)

    git("init", "--quiet")
    for message in ("Begin", "Added a mask", "Add a window\n\nBody.", "Names a score"):
        git("commit", "--quiet", "--allow-empty", "-m", message)
    status, error = check("HEAD~3..HEAD", tmp_path)
    assert status == 1
    assert [line.split(":")[0] for line in error.splitlines()] == [
        "commit message 'Names a score'",
        "commit message 'Added a mask'",
    ]
    assert check("HEAD~2..HEAD~1", tmp_path) == (0, "")
