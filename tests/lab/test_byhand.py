"""Attention by hand is what `attend` computes, and the demonstration shows it on any terminal."""

import io
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jaxtyping
import pytest
import torch
from rich.console import Console
from torch import Tensor

from regard.attention.attend import attend
from regard.attention.mask import Mask, causal, packed, padding, window
from regard.attention.weights import attention_weights
from regard.lab.byhand import DRAWN, TRY, demo, exercise, show
from regard.lab.stages import stages, worked
from regard.lab.steps import Steps, steps
from tests.processes import HANG

ROOT = Path(__file__).parent.parent.parent

MASKS: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "causal": causal,
    "one's own": lambda: Mask(lambda at: (at.query + at.key) % 3 > 0, "thirds"),
    "some see nothing": lambda: ~causal() & padding([6]),
    "packed": lambda: packed([2, 3], [3, 4]) & causal(),
}


def matrices(L: int = 5, S: int = 7, K: int = 3, V: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(L, K), torch.randn(S, K), torch.randn(S, V)
    return q.double(), k.double(), v.double()


def page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **env: str) -> str:
    """What `demo` prints, with these variables in the environment; words need no checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    demo()
    return capsys.readouterr().out


def printed(found: Steps, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(found, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


# Steps


@pytest.mark.parametrize("beta", [None, 0.0, 0.3, 1.0, 50.0, math.inf])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_the_last_step_is_attend(mask: Callable[[], Mask | None], beta: float | None) -> None:
    q, k, v = matrices()
    found = steps(q, k, v, mask(), beta)
    torch.testing.assert_close(
        found.weights, attention_weights(q, k, mask(), beta=beta), atol=1e-14, rtol=1e-13
    )
    torch.testing.assert_close(
        found.output, attend(q, k, v, mask(), beta=beta), atol=1e-14, rtol=1e-13
    )


def test_each_step_follows_from_the_one_before() -> None:
    q, k, v = matrices()
    found = steps(q, k, v, window(2, 0))
    allowed = window(2, 0).tensor(5, 7)[0, 0]
    assert torch.equal(found.scores, q @ k.T)
    torch.testing.assert_close(found.scaled, found.scores / 3**0.5)
    assert torch.equal(found.masked[allowed], found.scaled[allowed])
    assert torch.equal(found.masked == -math.inf, ~allowed)
    assert torch.equal(found.exponentials.amax(-1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(found.exponentials > 0, allowed)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(found.output, found.weights @ v)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = matrices()
    found = steps(1e3 * q, 1e3 * k, v)
    assert found.scores.abs().max() > 1e6
    assert found.output.isfinite().all()


def test_who_sees_nothing_gets_zeros() -> None:
    q, k, v = matrices(5, 5)
    found = steps(q, k, v, ~causal())
    assert not found.weights[-1].any()
    assert not found.output[-1].any()
    assert found.output.isfinite().all()
    assert "nan" not in "\n".join(printed(found))


def test_whole_numbers_and_single_precision_are_computed_in_float64() -> None:
    given = exercise()
    expected = steps(*given)
    for dtype in (torch.int64, torch.float32):
        found = steps(*(matrix.to(dtype) for matrix in given))
        assert torch.equal(found.output, expected.output)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: steps(q[None], k, v), r"query of shape \(1, 5, 3\) has 3 axes, .* pick"),
        (lambda q, k, v: steps(q, k[:, :2], v), r"query width \(3\) and key width \(2\)"),
        (lambda q, k, v: steps(q, k, v[:4]), "7 keys but 4 values"),
        (lambda q, k, v: steps(q, k, v, beta=-1.0), r"beta \(-1.0\) must not be negative"),
        (lambda q, k, v: steps(q, k, v, padding([3, 4])), "2 lengths for a batch of 1"),
        (lambda q, k, v: steps(q, k, v, beta=torch.ones(1)), "must be a number; .* one head"),
    ],
)
def test_what_cannot_be_done_by_hand(
    change: Callable[[Tensor, Tensor, Tensor], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        change(*matrices())


# Words


def test_stages_hold_the_steps_in_order() -> None:
    found = steps(*matrices(), mask=causal())
    expected = (
        found.scores,
        found.scaled,
        found.mask_matrix,
        found.masked,
        found.exponentials,
        found.weights,
        found.output,
    )
    for stage, matrix in zip(stages(found), expected, strict=True):
        assert torch.equal(stage.matrix, matrix)
    assert torch.equal(found.scaled + found.mask_matrix, found.masked)
    assert "Masked" not in [stage.name for stage in stages(steps(*matrices()))]


def test_a_worked_entry_is_true() -> None:
    """The figures after the last equals sign are an entry of the stage's matrix."""
    found = steps(*matrices(), mask=causal())
    examples = worked(found)
    for stage in stages(found):
        if stage.name in ("Mask matrix", "Masked"):
            continue
        said = examples[stage.name].split(" = ")[-1]
        assert said in {f"{x:.3f}" for x in stage.matrix.flatten().tolist()}


def test_figures_add_up() -> None:
    """Python agrees with what the worked entries of the exercise say, to their last digit."""
    for said in worked(steps(*exercise())).values():
        *_, left, right = said.replace("first entry: ", "= ").split(" = ")
        left = re.sub(r"(?<=\d)√", "*√", left).replace("√2", "math.sqrt(2)")
        left = left.replace("·", "*").replace("exp", "math.exp")
        left = re.sub(r"^c\d+, = ", "", left)
        assert eval(left, {"math": math}) == pytest.approx(float(right), abs=2e-3)


@pytest.mark.parametrize("beta", [None, 0.25, math.inf])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_wide_matrices_are_cut_not_broken(width: int, beta: float | None) -> None:
    lines = printed(steps(*matrices(11, 29, 13, 31), mask=window(3), beta=beta), width)
    assert max(len(line.rstrip()) for line in lines) <= width
    rows = [line for line in lines if re.match(r" +q\d+ ", line) and "=" not in line]
    assert len(rows) == 11 * 7  # Q and six stages, each row on one line
    assert all(line.rstrip().endswith("…") for line in rows[11:])


def test_numbers_stand_below_their_names() -> None:
    lines = printed(steps(*exercise()))
    for index, line in enumerate(lines):
        if line.split() == ["k1", "k2", "k3"]:
            ends = [match.end() for match in re.finditer(r"k\d", line)]
            for row in lines[index + 1 : index + 3]:
                assert [m.end() for m in re.finditer(r"-?\b\d+(\.\d+)?", row)][-3:] == ends


# The demonstration


def test_the_exercise_is_worked_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = page(monkeypatch, capsys)
    found = steps(*exercise())
    unscaled = steps(*exercise(), beta=1.0)
    columns = found.scaled.softmax(0)
    for row in (*found.output, unscaled.output[0], columns[0] @ found.value):
        assert re.search(" +".join(f"{x:.3f}" for x in row.tolist()), said)
    for share in found.weights.flatten().tolist():
        assert f"{share:.3f} " in said
    assert re.search(r"attend\(Q, K, V\)\? +the same", said)
    (difference,) = re.findall(r"largest difference +(\S+)", said)
    assert float(difference) < 1e-15
    assert "nothing is masked" in said


def test_every_kind_of_mask_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = page(monkeypatch, capsys)
    kinds = ("causal", "padding", "window", "documents", "prefix", "packed", " & ", " | ", "~")
    names = [str(mask) for *_, masks in DRAWN for mask in masks]
    assert all(any(kind in name for name in names) for kind in kinds)
    assert any(L < S for L, S, *_ in DRAWN)
    lines = said.splitlines()
    for L, S, _, masks in DRAWN:
        for mask in masks:
            places = [
                (number, match.start())
                for number, line in enumerate(lines)
                for match in re.finditer(re.escape(str(mask)) + r"(?=   |$)", line)
            ]
            drawings = [
                "\n".join(line[left : left + S] for line in lines[top + 1 : top + 1 + L])
                for top, left in places
            ]
            assert mask.draw(L, S) in drawings


@pytest.mark.parametrize("columns", [60, 80, 132])
def test_piped_it_is_plain_text_that_fits(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = page(monkeypatch, capsys, COLUMNS=str(columns))
    assert "\x1b" not in said
    for line in said.splitlines():
        assert len(line) <= columns
        assert line == line.rstrip()


def test_in_a_terminal_it_has_colours_and_the_same_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = page(monkeypatch, capsys)
    coloured = page(monkeypatch, capsys, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in coloured
    words = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in words.splitlines()] == plain.splitlines()
    # Only the sixteen colours that a terminal's own theme decides on.
    assert not re.search(r"\x1b\[(?:[0-9]+;)*[34]8;", coloured)


def test_what_it_proposes_works(capsys: pytest.CaptureFixture[str]) -> None:
    exec(TRY, {})
    said = capsys.readouterr().out
    assert (packed([3, 5]) & causal()).draw(8, 8) in said
    assert "causal" in said


def test_the_commands_it_names_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = page(monkeypatch, capsys)
    named = set(re.findall(r"\bmake ([a-z-]+)", said))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= known


def test_the_command_line_shows_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regard", "demo", "byhand"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=HANG,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "Attention by hand" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_page_of_the_course_shows_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    demo()
    output = capsys.readouterr().out
    page = ROOT / "docs" / "course.md"
    pictures = re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert pictures
    assert all(picture in output for picture in pictures)
