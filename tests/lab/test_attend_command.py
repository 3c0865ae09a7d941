"""`regard attend`: numbers that are right, exact where they can be, on any kind of page."""

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import attend, attention_weights, causal, padding, window
from regard.cli import main as cli
from regard.lab.byhand import by_hand
from regard.lab.commands.attend import read_mask
from regard.lab.matrix import Matrix, Root, decimal, inverse_root, latex, plain, read
from regard.lab.stages import arithmetic, stages
from regard.lab.steps import NOT_COUNTED, operations, steps

Q, K, V = "1 2; 3 1", "2 1; 1 1; 0 1", "1 2 -2; 1 1 2; 0 1 -1"
GIVEN = ["--query", Q, "--key", K, "--value", V]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["attend", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *words, "--json"))
    return found


# Numbers


def test_the_worked_exercise(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, *GIVEN)
    for line in (
        r"q1 +4 +3 +2$",
        r"q1 +2√2 +3√2/2 +√2 +q1 +2\.828 +2\.121 +1\.414$",
        r"q1 +1\.000 +0\.493 +0\.243$",
        r"q2 +0\.882 ▇ +0\.106 ▁ +0\.013 ▁$",
        r"c1 +0\.860 +1\.576 +-0\.724$",
        r"c2 +0\.987 +1\.882 +-1\.565$",
        r"total +30 +12 +22 +64 +6$",
    ):
        assert re.search(line, page, re.MULTILINE), line
    names = re.findall(r"^\d  (\w+)", page, re.MULTILINE)
    assert names == ["Scores", "Scaled", "Exponentials", "Weights", "Output"]
    assert all(line == line.rstrip() and len(line) <= 80 for line in page.splitlines())


def test_without_values_keys_are_values_and_without_keys_queries_are_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = as_json(capsys, "--query", "1 2 1", "--key", "1 2 3; 1 2 1; 0 1 -1", "--no-scale")
    assert found["scores"] == [[8, 6, 1]]
    np.testing.assert_allclose(found["weights"], [[0.8801, 0.1191, 0.0008]], atol=5e-5)
    np.testing.assert_allclose(found["output"], [[0.9992, 1.9992, 2.7586]], atol=5e-5)
    own = as_json(capsys, "--query", Q)
    assert own["key"] == own["value"] == [[1, 2], [3, 1]]


@pytest.mark.parametrize("beta", [None, "0", "1/2", "0.3", "2", "inf"])
@pytest.mark.parametrize("mask", [None, "causal", "window:1", "padding:2", "window:0,1 & prefix:3"])
def test_it_is_what_attend_gives(
    beta: str | None, mask: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*(["--beta", beta] if beta else []), *(["--mask", mask] if mask else [])]
    found = as_json(capsys, *GIVEN, *words)
    q, k, v = (read(text, "").tensor() for text in (Q, K, V))
    rule = None if mask is None else read_mask(mask, 2, 3)
    sharpness = None if beta is None else float(Fraction(beta)) if beta != "inf" else math.inf
    np.testing.assert_allclose(
        found["weights"], attention_weights(q, k, mask=rule, beta=sharpness), atol=1e-14
    )
    np.testing.assert_allclose(
        found["output"], attend(q, k, v, mask=rule, beta=sharpness), atol=1e-14
    )
    assert found["mask"] == (None if rule is None else str(rule))


def test_columns_are_the_transpose(capsys: pytest.CaptureFixture[str]) -> None:
    turned = ["--query", "1 3; 2 1", "--key", "2 1 0; 1 1 1", "--value", "1 1 0; 2 1 1; -2 2 -1"]
    rows = as_json(capsys, *GIVEN, "--mask", "0 1 1; 1 1 0")
    columns = as_json(capsys, *turned, "--convention", "columns", "--mask", "0 1; 1 1; 1 0")
    for name in ("query", "key", "value", "scores", "scaled", "masked", "weights", "output"):
        assert columns[name] == [list(row) for row in zip(*rows[name])]
    assert rows["masked"][0][0] == "-inf"
    np.testing.assert_allclose(np.sum(columns["weights"], 0), 1)
    page = said(capsys, *turned, "--convention", "columns", "--explain", "H[3,1]")
    assert "S = Kᵀ Q" in page
    assert "Down each column" in page
    assert "H[3,1] = 0.576·(-2) + 0.284·2 + 0.140·(-1) = -0.724" in page


def test_what_is_exact_is_kept_so(capsys: pytest.CaptureFixture[str]) -> None:
    exact = as_json(capsys, "--query", "1/2 2", "--key", "1 1; 1 1; 3 0", "--beta", "0")["exact"]
    assert exact["query"] == [["1/2", "2"]]
    assert exact["scores"] == [["5/2", "5/2", "3/2"]]
    assert exact["weights"] == [["1/3", "1/3", "1/3"]]
    assert exact["output"] == [["5/3", "2/3"]]
    rounded = as_json(capsys, "--query", "0.5 2", "--key", "1 1; 1 1; 3 0")
    assert rounded["exact"]["scores"] == [[None, None, None]]
    assert rounded["exact"]["exponentials"] == [["1", "1", None]]


def test_exact_and_rounded_agree() -> None:
    for text in (Q, "1/2 -3; 0 7/3; 2 2", "4 0 1 -1; 2 2 2 2"):
        found = steps(read(text, ""), mask=causal())
        for stage in stages(found):
            np.testing.assert_allclose(stage.figures.tensor(), stage.matrix, atol=1e-14)
            turned = next(s for s in stages(found, "columns") if s.name == stage.name)
            assert torch.equal(turned.matrix, stage.matrix.T)


@pytest.mark.parametrize(
    ("number", "said", "set_"),
    [
        (inverse_root(2), "√2/2", r"\frac{\sqrt{2}}{2}"),
        (inverse_root(12), "√3/6", r"\frac{\sqrt{3}}{6}"),
        (inverse_root(9), "1/3", r"\frac{1}{3}"),
        (inverse_root(1), "1", "1"),
        (Root(Fraction(-5, 2), 3), "-5√3/2", r"-\frac{5\sqrt{3}}{2}"),
        (Fraction(-1, 2), "-1/2", r"-\frac{1}{2}"),
        (-math.inf, "-∞", r"-\infty"),
        (-0.0001, "0.000", "0.000"),
        (1e12, "1.000e+12", "1.000e+12"),
    ],
)
def test_numbers_as_one_writes_them(number: Any, said: str, set_: str) -> None:
    assert plain(number) == said
    assert latex(number) == set_
    assert decimal(float(number), 12) == plain(float(number), 12)


def test_digits(capsys: pytest.CaptureFixture[str]) -> None:
    share = 1 / (1 + math.exp(-(0.5**0.5)) + math.exp(-(2**0.5)))
    assert f"{share:.8f} ▅" in said(capsys, *GIVEN, "--digits", "8")
    assert re.search(r"c1 +1 +2 +-1$", said(capsys, *GIVEN, "--digits", "0"), re.MULTILINE)


# Costs


def test_operations_are_those_of_somebody_who_counts() -> None:
    for L, S, d, v in ((2, 3, 2, 3), (5, 7, 3, 2), (1, 1, 1, 1)):
        counted = {"mul": 0, "div": 0, "add": 0}

        class Number:
            """A number that is not there, and notes what is done with it."""

            def __mul__(self, other: object, counted: dict[str, int] = counted) -> "Number":
                counted["mul"] += 1
                return self

            def __truediv__(self, other: object, counted: dict[str, int] = counted) -> "Number":
                counted["div"] += 1
                return self

            def __add__(self, other: object, counted: dict[str, int] = counted) -> "Number":
                counted["add"] += 1
                return self

        def total(terms: list[Any]) -> Any:
            first, *rest = terms
            for term in rest:
                first = first + term
            return first

        x = Number()
        for _ in range(L):
            scores = [total([x * x for _ in range(d)]) / x for _ in range(S)]
            whole = total(scores)
            shares = [score / whole for score in scores]
            for _ in range(v):
                total([share * x for share in shares])
        found = operations(steps(torch.ones(L, d), torch.ones(S, d), torch.ones(S, v)))["total"]
        if d > 1:  # 1/√1 asks for no division
            assert {name: found.figures[name] for name in counted} == counted


# Explanations


def test_every_entry_is_explained_rightly() -> None:
    q, k, v = torch.randn(2, 3), torch.randn(5, 3), torch.randn(5, 2)
    for beta in (None, 0.7):
        found = steps(q, k, v, window(1), beta)
        for stage in stages(found, digits=9):
            for row in range(stage.matrix.shape[0]):
                for column in range(stage.matrix.shape[1]):
                    one = arithmetic(found, stage, row, column, digits=9)
                    said = one.equals[-1].replace("∞", "inf")
                    assert float(said) == pytest.approx(float(stage.matrix[row, column]), abs=1e-8)
                    if stage.name in ("Scores", "Weights", "Output"):
                        left = one.equals[-2].replace("·", "*")
                        assert eval(left) == pytest.approx(float(said), abs=1e-7)


def test_explain_one_some_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    one = said(capsys, *GIVEN, "--explain", "A[1,2]")
    assert one.count("   A[") == 1
    assert "A[1,2] = 0.493 / (1 + 0.493 + 0.243) = 0.284" in one
    whole = said(capsys, *GIVEN, "--explain", "weights", "S[2,1]")
    assert whole.count("   A[") == 6
    assert "S[2,1] = q2·k1 = 3·2 + 1·1 = 7" in whole
    everything = said(capsys, *GIVEN, "--mask", "causal", "--explain")
    assert len(re.findall(r"^   [SZMYEAC]\[", everything, re.MULTILINE)) == 7 * 6
    assert "M[1,3] = -∞   (q1 may not attend to k3)" in everything
    assert "Y[1,3] = √2 + (-∞) = -∞" in everything
    hard = said(capsys, *GIVEN, "--beta", "inf", "--explain", "Z[1,1]", "Z[1,2]")
    assert "Z[1,1] = 0   (4 is the largest that q1 may attend to)" in hard
    assert "Z[1,2] = -∞   (3 is not the largest" in hard


# Pages


def balanced(text: str) -> bool:
    text = re.sub(r"\\[{}]", "", text)
    opened = re.findall(r"\\begin\{([a-z*]+)\}", text)
    return text.count("{") == text.count("}") and sorted(opened) == sorted(
        re.findall(r"\\end\{([a-z*]+)\}", text)
    )


@pytest.mark.parametrize("beta", [None, "0", "1/3", "0.3", "inf"])
@pytest.mark.parametrize("convention", ["rows", "columns"])
def test_latex_is_whole(
    beta: str | None, convention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--query", "1 2; -3 1/2", "--mask", "causal", "--convention", convention, "--latex"]
    page = said(capsys, *words, "--explain", *(["--beta", beta] if beta else []))
    assert balanced(page)
    assert page.count(r"\begin{bmatrix}") >= 9
    assert page.isascii()
    for line in page.splitlines():
        assert line.count("&=") + line.count(r"&\approx") <= 1
        assert line.count("$") % 2 == 0
    # The last line of an align has no line after it.
    assert r"\\" + "\n" + r"\end{align*}" not in page


def test_latex_matrices(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, *GIVEN, "--latex", "--explain", "Z[1,2]")
    assert r"S &= Q K^\top = \begin{bmatrix} 4 & 3 & 2 \\ 7 & 4 & 1 \end{bmatrix} \\" in page
    assert r"\frac{3\sqrt{2}}{2}" in page
    assert r"C &= A V \approx \begin{bmatrix} 0.860 & 1.576 & -0.724 \\" in page
    assert r"Z_{1,2} &= 3 / \sqrt{2} = 3\sqrt{2}/2 \approx 2.121" in page
    assert "MaxMatrixCols" not in page
    wide = said(capsys, "--query", " ".join("1" * 12), "--latex")
    assert r"\setcounter{MaxMatrixCols}{12}" in wide


def test_markdown_tables_are_tables(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, *GIVEN, "--mask", "causal", "--markdown", "--explain", "A")
    blocks = re.findall(r"(?:^\|.*\|\n?)+", page, re.MULTILINE)
    # Given, stages, two of them exact and rounded, and the counts.
    assert len(blocks) == 3 + 7 + 2 + 1
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1
        assert re.fullmatch(r"\|---\|(--:\|)+", block.splitlines()[1])
    assert "| **c2** | 0.987 | 1.882 | -1.565 |" in page
    assert page.count("- `A[") == 6


def test_in_a_notebook_it_is_a_page_without_colours_of_its_own() -> None:
    page = by_hand(*(read(text, "") for text in (Q, K, V)), causal())._repr_html_()
    assert page.count("<table") == page.count("</table>") == 3 + 7 + 2
    assert ">3√2/2<" in page
    assert "causal()" in page
    assert not re.search(r"(?<!background:)\bcolor:", page)


# Files and words


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = as_json(capsys, *GIVEN)
    (tmp_path / "q.csv").write_text("\ufeff1,2\n3,1\n")
    (tmp_path / "k.tsv").write_text("# keys\n2\t1\n1\t1\n\n0\t1\n")
    np.save(tmp_path / "v.npy", np.array([[1, 2, -2], [1, 1, 2], [0, 1, -1]], np.float32))
    names = [str(tmp_path / name) for name in ("q.csv", "k.tsv", "v.npy")]
    words = [word for pair in zip(("--query", "--key", "--value"), names) for word in pair]
    assert as_json(capsys, *words) == expected
    (tmp_path / "mask.csv").write_text("1,0,0\n1,1,0\n")
    masked = as_json(capsys, *GIVEN, "--mask", str(tmp_path / "mask.csv"))
    assert masked["weights"][0] == [1, 0, 0]


@pytest.mark.parametrize(
    "text", ["1 2; 3 1", "1,2;3,1", "1, 2\n3, 1", "[[1, 2], [3, 1]]", "1 2;3 1;", "[1 2; 3 1]"]
)
def test_ways_of_writing_a_matrix(text: str) -> None:
    assert read(text, "query") == Matrix(((Fraction(1), Fraction(2)), (Fraction(3), Fraction(1))))


@pytest.mark.parametrize("text", ["-1/2", "-1 2", "−1/2 3", "-.5"])
def test_a_matrix_may_begin_with_a_minus(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--query", text)
    assert found["query"][0][0] < 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--query|1 2; 3", "query: row 2 has 1 number but row 1 has 2; give every row as many"),
        ("--query|1 a; 3 4", "query: 'a' in row 1 is not a finite number; write rows as"),
        ("--query|1 nan", "'nan' in row 1 is not a finite number"),
        ("--query|", "--query is empty, perhaps from a variable"),
        ("--query|1,,2", r"query: row 1 \(1,,2\) lacks a number"),
        ("--query|1/0", "query: 1/0 in row 1 divides by 0"),
        ("--query|nothere.npy", "query: there is no file nothere.npy; write rows as"),
        ("--query|1 2|--key|1 2 3", "query has 2 columns but key has 3; .*--convention columns"),
        ("--query|1 2;3 4|--key|1|--convention|columns", "query has 2 rows but key has 1"),
        ("--query|1|--key|1;2|--value|1", "key has 2 rows but value has 1; every key"),
        ("--query|1|--mask|casual", r"mask \('casual'\) is unknown; choose from causal, window"),
        ("--query|1|--mask|window", r"mask \('window'\) needs whole numbers after window"),
        ("--query|1|--mask|window:1,2,3", r"mask \('window:1,2,3'\) has 3 numbers"),
        ("--query|1|--mask|padding:2", r"mask \('padding:2'\) leaves 2 keys, but there are 1"),
        ("--query|1|--mask|1 0", "mask is 1 × 2 but must be 1 × 1, queries × keys"),
        ("--query|1|--mask|2", "mask has 2; write 0 and -inf, as they are added"),
        ("--query|1|--mask|causal & casual", r"mask \('casual'\) is unknown"),
        ("--query|1|--beta|warm", r"beta \('warm'\) is not a number; write 0.5, 1/2 or inf"),
        ("--query|1|--beta|-1", r"beta \(-1.0\) must not be negative"),
        ("--query|1|--beta|2|--no-scale", "--no-scale means --beta 1, but beta is 2"),
        ("--query|1|--explain|A[2,1]", r"explain \('A\[2,1\]'\): A is 1 × 1, .* try A\[1,1\]"),
        ("--query|1|--explain|B", r"there is no B; write \"A\[1,2\]\" or A, with one of S \(sc"),
        ("--query|1|--explain|A1,2", r"explain \('A1,2'\) names no entry; write"),
        ("--query|1|--digits|99", r"digits \(99\) must be 0 to 15"),
        ("--query|1|--json|--latex", "not allowed with"),
        ("--key|1", "required: --query/-q; see regard attend --help"),
        ("--query|1|--convention|diagonal", r"--convention \('diagonal'\) is unknown"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["attend", *words.split("|")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"regard: [^\n]+\n", err)
    assert re.search(message, err), err


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    np.save(tmp_path / "cube.npy", np.zeros((2, 3, 5)))
    np.save(tmp_path / "words.npy", np.array([["a", "b"]]))
    np.save(tmp_path / "holes.npy", np.array([[1.0, np.nan]]))
    (tmp_path / "junk.npy").write_bytes(b"junk")
    (tmp_path / "head.csv").write_text("x,y\n1,2\n")
    for name, message in (
        ("cube.npy", r"of shape \(2, 3, 5\); save one matrix"),
        ("words.npy", "save one matrix of numbers"),
        ("holes.npy", "infinite or NaN"),
        ("junk.npy", "no array of numbers; save it with numpy.save"),
        ("head.csv", r"query \(.*head.csv\): 'x' in row 1 is not a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            read(str(tmp_path / name), "query")


def test_masks_in_words() -> None:
    assert str(read_mask("causal & padding:2", 3, 3)) == str(causal() & padding([2]))
    assert str(read_mask("window:2,0", 3, 3)) == str(window(2, 0))
    assert read_mask("documents:0,0,1", 3, 3).tensor(3, 3)[0, 0, 2].tolist() == [0, 0, 1]


def test_help_shows_examples_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    from regard.lab.commands.attend import EXAMPLE

    with pytest.raises(SystemExit) as stop:
        cli.main(["attend", "--help"])
    assert stop.value.code == 0
    assert EXAMPLE in capsys.readouterr().out
    lines = [line.strip() for line in EXAMPLE.splitlines() if "x.csv" not in line]
    shown = [shlex.split(line)[2:] for line in lines if line.startswith("regard attend")]
    assert len(shown) == 5
    for words in shown:
        assert "Output" in said(capsys, *words)


@pytest.mark.parametrize("form", [(), ("--latex",), ("--markdown",)])
def test_what_is_not_counted_is_said(
    form: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The exponentials subtract a maximum, which the course's count leaves out."""
    assert cli.main(["attend", "-q", "1 2", "-k", "1 0; 0 1", *form]) == 0
    assert NOT_COUNTED in " ".join(capsys.readouterr().out.split())
