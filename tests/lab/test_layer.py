"""`regard attend` with projections, heads, other scores and masks that are added."""

import json
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from regard import Mask, MultiHeadAttention, attend, causal
from regard.attention import score
from regard.cli import main as cli
from regard.lab.commands.attend import read_mask
from regard.lab.layer import layer, layer_operations
from regard.lab.matrix import Matrix, read
from regard.lab.scoring import Additive, Dot, General
from regard.lab.stages import arithmetic, stages
from regard.lab.steps import operations, steps

X = "1 0 2 -1 1; 0 1 1 2 0; 3 1 -1 0 1"
W = {
    "W_Q": "1 2 0 1; 0 1 1 0; 2 0 1 -1; 1 1 0 0; 0 0 1 1",
    "W_K": "0 1 1 0; 1 0 0 1; 1 1 0 0; 0 0 2 1; 1 0 1 0",
}
W_V = "1 0 1 0 0 1; 0 1 0 1 0 0; 1 1 0 0 1 0; 0 0 1 1 0 1; 2 0 0 1 1 0"
W_O = "1 0; 0 1; 1 1; 2 0; 0 -1; 1 0"
WEIGHTS = [
    *("--w-query", W["W_Q"], "--w-key", W["W_K"]),
    *("--w-value", W_V, "--w-output", W_O),
]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["attend", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *words, "--json"))
    return found


def module(heads: int = 2) -> MultiHeadAttention:
    """The same layer as a module, whose matrices are transposed."""
    made = MultiHeadAttention(
        5, heads, key_width=4 // heads, value_width=6 // heads, output_width=2, bias=False
    ).double()
    parts = (made.query, made.key, made.value, made.output)
    with torch.no_grad():
        for part, text in zip(parts, (W["W_Q"], W["W_K"], W_V, W_O), strict=True):
            part.weight.copy_(read(text, "").tensor().T)
    return made.requires_grad_(False)


# Projections and heads


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_a_layer_by_hand_is_the_module(
    heads: int, mask: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--query", X, *WEIGHTS, "--heads", str(heads), *(["--mask", mask] if mask else [])]
    found = as_json(capsys, *words)
    expected = module(heads)(read(X, "").tensor(), mask=None if mask is None else causal())
    np.testing.assert_allclose(found["output"], expected, atol=1e-12)
    assert len(found["heads"]) == heads
    np.testing.assert_allclose(found["Q"], read(X, "").tensor() @ read(W["W_Q"], "").tensor())
    assert found["exact"]["Q"][0] == ["4", "1", "3", "0"]


def test_columns_are_the_transpose(capsys: pytest.CaptureFixture[str]) -> None:
    def turned(text: str) -> str:
        return "; ".join(" ".join(map(str, row)) for row in read(text, "").transposed.rows)

    words = [word if n % 2 == 0 else turned(word) for n, word in enumerate(WEIGHTS)]
    rows = as_json(capsys, "--query", X, *WEIGHTS, "--heads", "2")
    columns = as_json(
        capsys, "--query", turned(X), *words, "--heads", "2", "--convention", "columns"
    )
    np.testing.assert_allclose(np.transpose(columns["output"]), rows["output"])
    np.testing.assert_allclose(np.transpose(columns["H"]), rows["H"])
    page = said(capsys, "--query", turned(X), *words, "--heads", "2", "--convention", "columns")
    assert "Q = W_Q X" in page
    assert "H = [H1; H2]" in page
    assert "O = W_O H" in page


def test_other_inputs_have_letters_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--query", "1 2", "--key", "1 0 1; 0 1 1", "--w-query", "1 0 0; 0 1 1"]
    page = said(capsys, *words, "--w-value", "1 1; 0 1; 2 0")
    assert "Q = X W_Q" in page
    assert "V = Y W_V" in page
    assert "K = " not in page.replace("K = Y", "")


def test_a_page_of_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--query", X, *WEIGHTS, "--heads", "2", "--explain", "A[1,2]"]
    page = said(capsys, *words)
    assert page.count("Head ") == 2
    assert page.count("   A[1,2] = ") == 2
    assert "H = [C1 C2]" in page
    assert "O = H W_O" in page
    assert all(line == line.rstrip() and len(line) <= 80 for line in page.splitlines())
    latex = said(capsys, *words, "--latex")
    assert latex.count(r"\begin{align*}") == latex.count(r"\end{align*}") >= 4
    assert latex.count("usepackage") == 3
    assert latex.isascii()
    markdown = said(capsys, *words, "--markdown")
    assert "## Head 2" in markdown
    assert "## Output projection: $O = H W_O$" in markdown


def test_operations_of_a_layer() -> None:
    x = read(X, "")
    weights = {"W_Q": read(W["W_Q"], ""), "W_V": read(W_V, ""), "W_O": read(W_O, "")}
    key = read("1 0 0 1; 0 1 1 0", "")
    inputs = {"query": x, "key": key, "value": read("1 0 1 1 2; 0 1 1 0 1", "")}
    counted = layer_operations(layer(inputs, weights, 2))
    assert counted["Q"].figures["mul"] == 3 * 5 * 4
    assert counted["Q"].figures["add"] == 3 * 4 * 4
    assert counted["O"].figures["mul"] == 3 * 6 * 2
    assert "K" not in counted
    assert counted["total"].multiplications == sum(
        count.multiplications for name, count in counted.items() if name != "total"
    )


# Scores


def test_general_and_additive_scores_are_those_of_the_library() -> None:
    q, k, v = torch.randn(3, 4).double(), torch.randn(5, 2).double(), torch.randn(5, 3).double()
    general, additive = score.BilinearScore(4, 2).double(), score.AdditiveScore(4, 2, 6).double()
    by_hand = {
        general: General(Matrix.of(general.weight)),
        additive: Additive(
            *(Matrix.of(m) for m in (additive.query_weight, additive.key_weight)),
            Matrix.of(additive.vector[None]),
        ),
    }
    for theirs, ours in by_hand.items():
        found = steps(q, k, v, causal(), None, ours)
        assert found.beta == 1
        torch.testing.assert_close(found.scores, theirs(q, k).detach())
        expected = theirs.attend(q, k, v, mask=causal()).detach()
        torch.testing.assert_close(found.output, expected)


def test_a_general_score_stays_exact(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--query", "1/2 2", "--key", "1 1 0; 3 0 1", "--score", "general"]
    found = as_json(capsys, *words, "--w-score", "1 0 1; 1/3 2 0")
    assert found["exact"]["scores"] == [["31/6", "4"]]
    page = said(capsys, *words, "--w-score", "1 0 1; 1/3 2 0", "--explain", "S[1,2]")
    assert "S[1,2] = (q1 W)·k2 = 7/6·3 + 4·0 + 1/2·1 = 4" in page
    assert "S = Q W Kᵀ" in page
    assert "β = 1" in page


def test_every_entry_of_an_additive_score_is_explained_rightly() -> None:
    matrices = (read(text, "") for text in ("1 0 2; -1 1 0", "0 1 1; 2 0 1", "1 -2 1/2"))
    found = steps(read("1 2; 0 -1", ""), read("1 0; 2 1; 1 1", ""), scoring=Additive(*matrices))
    (first, *_) = stages(found, digits=9)
    for row in range(2):
        for column in range(3):
            formula, terms, result = arithmetic(found, first, row, column, digits=9).equals
            assert formula == f"v·tanh(q{row + 1} W + k{column + 1} U)"
            value = eval(terms.replace("·", "*"), {"tanh": math.tanh})
            assert value == pytest.approx(float(result), abs=1e-8)


def test_operations_of_other_scores() -> None:
    general, dot = General(read("1 0; 0 1; 1 1", "")), Dot()
    assert general.operations(2, 5, 3, 2).figures["mul"] == 2 * 3 * 2 + 2 * 2 * 5
    assert dot.operations(2, 5, 3, 3).figures == {
        "mul": 30, "div": 0, "add": 20, "total": 50, "exp": 0,
    }  # fmt: skip
    additive = Additive(read("1 0; 0 1; 1 1", ""), read("1 0; 0 1", ""), read("1 1", ""))
    count = additive.operations(2, 5, 3, 2).figures
    assert count["mul"] == 2 * 3 * 2 + 5 * 2 * 2 + 10 * 2
    assert count["exp"] == 10 * 2


# Masks that are added


def test_a_mask_of_zeros_and_minus_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    x = "1 2; 3 1; 0 1"
    given = "0 -inf -inf; 0 0 -∞; 0 0 0"
    found = as_json(capsys, "--query", x, "--mask", given)
    named = as_json(capsys, "--query", x, "--mask", "causal")
    assert found["weights"] == named["weights"]
    assert found["mask"] == "as given"
    assert found["mask_matrix"][0] == named["mask_matrix"][0] == [0, "-inf", "-inf"]
    page = said(capsys, "--query", x, "--mask", given)
    assert "from_tensor" not in page
    assert "Y = Z + M" in page
    assert "q2   0   0  -∞" in page
    assert read_mask("-inf 0", 1, 2).tensor(1, 2).tolist() == [[[[False, True]]]]


def test_a_row_that_may_attend_to_nothing_is_not_said_to_add_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--query", "1 2; 3 1", "--mask"]
    page = " ".join(said(capsys, *words, "0 0; 1 1").split())
    assert "add up to 1; q1 may attend to nothing, and gets zeros." in page
    assert "attend to nothing" not in said(capsys, *words, "1 0; 1 1")


def test_the_additions_of_a_mask_are_counted() -> None:
    q, k = torch.ones(3, 2), torch.ones(5, 2)
    free, masked = (
        operations(steps(q, k)),
        operations(steps(q, k, mask=Mask.from_tensor(torch.ones(3, 5) > 0))),
    )
    assert masked["masked"].figures["add"] == 15
    assert masked["total"].additions == free["total"].additions + 15
    assert "masked" not in free


# What cannot be


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "2"], r"heads \(2\) must divide the width of Q \(5\); try 1 or 5"),
        (["--heads", "0"], r"heads \(0\) must divide"),
        (["--w-query", "1 2; 3 4"], r"W_Q takes vectors of 2 numbers, but query has 5"),
        (["--w-output", "1; 2"], r"W_O takes vectors of 2 numbers, but what the heads give"),
        (["--score", "general"], r"--score general needs --w-score"),
        (["--score", "additive", "--w-score", "1"], r"--score additive needs --u-score"),
        (["--w-score", "1"], r"--w-score makes no difference to --score dot"),
        (["--score", "general", "--w-score", "1 2"], r"W of a general score is 1 × 2 but must be"),
        (["--mask", "0 -inf 1; 0 0 0; 0 0 0"], r"mask has 1; write 0 and -inf"),
        (["--mask", "0 inf; 0 0"], r"mask"),
    ],
)
def test_what_does_not_fit_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["attend", "--query", X, *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert re.search(message, printed.err), printed.err


def test_products_are_exact() -> None:
    product = read("1/2 1; 0 3", "").times(read("2 1/3; 1 1", ""))
    assert product.rows[0] == (Fraction(2), Fraction(7, 6))
    assert attend(torch.eye(2), torch.eye(2), torch.eye(2)).shape == (2, 2)
