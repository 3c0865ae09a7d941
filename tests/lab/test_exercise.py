"""The exercises: solved, every check is content; each common mistake hears what it is."""

import json
import re
from pathlib import Path

import pytest
import torch

from regard import attend
from regard.lab import exercise, notebook
from regard.lab.exercise import carry_out, until_checks
from regard.lab.exercises import words
from regard.lab.exercises.expression import LONGEST, evaluate
from regard.lab.notebook import Cell

# What is checked here is said by the notebooks' own checks, thousands of small calls.
pytestmark = pytest.mark.usefixtures("unchecked")

MULTIHEAD, VIT, WORDS = exercise.EXERCISES
CHECKS = {MULTIHEAD: 4, VIT: 4, WORDS: 14}
"""How many checks each notebook has."""

# What to write instead of a solution's line, and what a check has to say about it.
MISTAKES = [
    # attention
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "", "attention", "not scaled; divide them by √d_k"),
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "/ key.shape[-1]", "attention", "divided by d_k"),
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "* key.shape[-1] ** 0.5", "attention", "multiplied by"),
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "/ value.shape[-1] ** 0.5", "attention", "by √d_v"),
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "/ key.shape[-2] ** 0.5", "attention", "how many keys"),
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "/ query.shape[-2] ** 0.5", "attention", "many queries"),
    (MULTIHEAD, ".softmax(-1)", ".softmax(-2)", "attention", "down the queries"),
    (MULTIHEAD, ".softmax(-1)", ".softmax(1)", "attention", "over the heads"),
    (MULTIHEAD, ".softmax(-1)", ".softmax(0)", "attention", "over the batch"),
    (MULTIHEAD, ".softmax(-1)", "", "attention", "there is no softmax"),
    (MULTIHEAD, ".nan_to_num(0.0) @ value", "", "attention", "these are the weights"),
    (MULTIHEAD, "query @ key.mT", "query @ key", "attention", r"stops in line \d+.*RuntimeError"),
    (MULTIHEAD, "if mask is not None", "if False", "attention", "the mask is ignored"),
    (MULTIHEAD, "~mask", "mask", "attention", "the mask is inverted"),
    (
        MULTIHEAD,
        "scores.masked_fill(~mask, -torch.inf)",
        "scores * mask",
        "attention",
        "scores become 0",
    ),
    (
        MULTIHEAD,
        "scores.masked_fill(~mask, -torch.inf)",
        "scores + mask",
        "attention",
        "added as 0 and 1",
    ),
    (
        MULTIHEAD,
        "scores = scores.masked_fill(~mask, -torch.inf)",
        "return (scores.softmax(-1) * mask) @ value",
        "attention",
        "after the softmax",
    ),
    (MULTIHEAD, ".nan_to_num(0.0)", "", "attention", "NaN"),
    (MULTIHEAD, "-torch.inf", "-1e9", "attention", "large negative number"),
    (MULTIHEAD, "return scores.softmax", "scores.softmax", "attention", "returns nothing"),
    # heads
    (
        MULTIHEAD,
        "x.view(B, L, heads, D // heads).transpose(1, 2)",
        "x.view(B, heads, L, D // heads)",
        "split_heads",
        "straight to",
    ),
    (
        MULTIHEAD,
        "x.view(B, L, heads, D // heads).transpose(1, 2)",
        "x.view(B, L, D // heads, heads).permute(0, 3, 1, 2)",
        "split_heads",
        "interleaved",
    ),
    (
        MULTIHEAD,
        "x.view(B, L, heads, D // heads).transpose(1, 2)",
        "x.view(B, L, heads, D // heads)",
        "split_heads",
        "behind the positions",
    ),
    (
        MULTIHEAD,
        "x.transpose(1, 2).flatten(2)",
        "x.reshape(len(x), x.shape[2], -1)",
        "join_heads",
        "without transposing",
    ),
    (
        MULTIHEAD,
        "x.transpose(1, 2).flatten(2)",
        "x.permute(0, 2, 3, 1).flatten(2)",
        "join_heads",
        "interleaved",
    ),
    (
        MULTIHEAD,
        "x.transpose(1, 2).flatten(2)",
        "x.transpose(1, 2)",
        "join_heads",
        "still apart",
    ),
    (MULTIHEAD, "x.transpose(1, 2).flatten(2)", "x.sum(1)", "join_heads", "are summed"),
    (MULTIHEAD, "x.transpose(1, 2).flatten(2)", "x.mean(1)", "join_heads", "are averaged"),
    # multi-head
    (MULTIHEAD, "return self.output(join_", "return (join_", "MultiHead", "W_O is missing"),
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "/ 12 ** 0.5", "MultiHead", "√D of the whole width"),
    (MULTIHEAD, ", self.heads)", ", 1)", "MultiHead", "one head as wide as all"),
    (MULTIHEAD, "attention(query, key,", "attention(key, query,", "MultiHead", "are exchanged"),
    (MULTIHEAD, "self.value(source)", "self.key(source)", "MultiHead", "the values are the keys"),
    (MULTIHEAD, "self.value(source)", "source", "MultiHead", "not projected by self.value"),
    (MULTIHEAD, "source = x if source is None else source", "source = x", "MultiHead", "ignored"),
    (MULTIHEAD, "self.query(x)", "self.query(source)", "MultiHead", "from the source too"),
    (MULTIHEAD, "value, mask)))", "value)))", "MultiHead", "not passed on"),
    (
        MULTIHEAD,
        "value, mask)))",
        "value, None if mask is None else ~mask)))",
        "MultiHead",
        "the mask is inverted",
    ),
    (MULTIHEAD, "self.output = nn.Linear(width, width)", "pass", "MultiHead", "leave __init__"),
    # patches
    (VIT, "permute(0, 2, 4, 1, 3, 5)", "permute(0, 4, 2, 1, 3, 5)", "patches", "column by column"),
    (
        VIT,
        "permute(0, 2, 4, 1, 3, 5)",
        "permute(0, 2, 4, 3, 5, 1)",
        "patches",
        "channel comes last",
    ),
    (VIT, "permute(0, 2, 4, 1, 3, 5)", "permute(0, 2, 4, 1, 5, 3)", "patches", "transposed"),
    (VIT, "permute(0, 2, 4, 1, 3, 5)", "permute(0, 1, 2, 4, 3, 5)", "patches", "one colour only"),
    (
        VIT,
        "cut.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * patch * patch)",
        "images.reshape(B, -1, C * patch * patch)",
        "patches",
        "as it lies in memory",
    ),
    (
        VIT,
        "cut.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * patch * patch)",
        "F.unfold(images, patch, stride=patch)",
        "patches",
        "as unfold gives it",
    ),
    # tokens
    (VIT, "torch.cat((front, x), 1)", "torch.cat((x, front), 1)", "Tokens", "is at the end"),
    (VIT, "1) + self.position", "1)", "Tokens", "the positions are missing"),
    (
        VIT,
        "torch.cat((front, x), 1) + self.position",
        "x + self.position[1:]",
        "Tokens",
        "class token is missing",
    ),
    (
        VIT,
        "torch.cat((front, x), 1) + self.position",
        "torch.cat((front, x + self.position[1:]), 1)",
        "Tokens",
        "has no position",
    ),
    (VIT, "1) + self.position", "1) * self.position", "Tokens", "are multiplied"),
    # block
    (VIT, "x = x + self.attention(", "x = self.attention(", "Block", "skip around attention"),
    (VIT, "return x + self.reduce(", "return self.reduce(", "Block", "skip around the feed"),
    (VIT, "self.attention(self.norm1(x))", "self.attention(x)", "Block", "norm1 is missing"),
    (VIT, "self.expand(self.norm2(x))", "self.expand(x)", "Block", "norm2 is missing"),
    (VIT, "self.norm2(x)", "self.norm1(x)", "Block", "norm1 serves twice"),
    (VIT, "F.gelu", "F.relu", "Block", "ReLU"),
    (VIT, "F.gelu(", "(", "Block", "activation function is missing"),
    (
        VIT,
        "x = x + self.attention(self.norm1(x))",
        "x = self.norm1(x)\n        x = x + self.attention(x)",
        "Block",
        r"the skip carries norm1",
    ),
    (
        VIT,
        "x = x + self.attention(self.norm1(x))\n"
        "        return x + self.reduce(F.gelu(self.expand(self.norm2(x))))",
        "x = self.norm1(x + self.attention(x))\n"
        "        return self.norm2(x + self.reduce(F.gelu(self.expand(x))))",
        "Block",
        "this is post-norm",
    ),
    # all of it
    (VIT, "self.norm(x)[:, 0]", "self.norm(x)[:, -1]", "ViT", "last patch is read"),
    (VIT, "self.norm(x)[:, 0]", "self.norm(x).mean(1)", "ViT", "mean of all tokens"),
    (VIT, "self.norm(x)[:, 0]", "self.norm(x)[:, 1:].mean(1)", "ViT", "mean of all patches"),
    (VIT, "self.norm(x)[:, 0]", "x[:, 0]", "ViT", "self.norm, is missing"),
    (VIT, "self.norm(x)[:, 0]", "self.norm(x)", "ViT", "every token has logits"),
    (VIT, "self.norm(x)[:, 0])", "self.norm(x)[:, 0]).softmax(-1)", "ViT", "softmax is in the"),
    (VIT, "for block in self.blocks:", "for block in self.blocks[:-1]:", "ViT", "last block"),
]


@pytest.mark.parametrize("name", exercise.EXERCISES)
def test_solved_all_checks_are_content(name: str) -> None:
    made = exercise.cells(name, solved=True)
    short = [Cell(c.kind, c.text.replace("STEPS = 300", "STEPS = 2")) for c in made]
    assert short != made or name != VIT
    said = carry_out(short)
    assert "✗" not in said
    assert "…" not in said
    assert said.count("✓") == CHECKS[name]


@pytest.mark.slow
def test_the_solved_vision_transformer_learns() -> None:
    said = carry_out(exercise.cells(VIT, solved=True))
    assert float(re.findall(r"([\d.]+)% right", said)[-1]) > 90


@pytest.mark.parametrize("name", exercise.EXERCISES)
def test_blank_every_check_says_so(name: str) -> None:
    made = exercise.cells(name)
    blanks = [r"raise NotImplementedError", r'^\w+ = "\?"  # ']
    text = "\n".join(cell.text for cell in made)
    assert len(re.findall("|".join(blanks), text, re.MULTILINE)) >= CHECKS[name]
    assert text.count("<summary>") >= 3 or name == WORDS
    said = carry_out(until_checks(made))
    assert said.count("still blank") == CHECKS[name]
    assert "✓" not in said


@pytest.mark.parametrize("name", exercise.EXERCISES)
def test_solved_and_blank_differ_in_the_blanks_alone(name: str) -> None:
    for blank, solved in zip(exercise.cells(name), exercise.cells(name, solved=True), strict=True):
        given = [line for line in blank.text.split("\n") if "Your turn" not in line]
        given = [line for line in given if "NotImplementedError" not in line and '"?"' not in line]
        assert set(given) <= set(solved.text.split("\n"))
        assert "# blank" not in blank.text + solved.text
        assert "# end" not in blank.text + solved.text
        assert "# fill" not in blank.text + solved.text


@pytest.mark.parametrize(
    ("name", "right", "wrong", "part", "message"),
    MISTAKES,
    ids=[f"{part}: {message}" for _, _, _, part, message in MISTAKES],
)
def test_a_mistake_hears_what_it_is(
    name: str, right: str, wrong: str, part: str, message: str
) -> None:
    made = until_checks(exercise.cells(name, solved=True))
    spoilt = [Cell(cell.kind, cell.text.replace(right, wrong)) for cell in made]
    assert spoilt != made
    # The one check that is about it: the others take their time.
    others = rf"check\.\w+\((?!{part}\)).*"
    assert re.match(
        rf"✗ {part}[,:] .*{message}[^\n]*\n$",
        carry_out([Cell(cell.kind, re.sub(others, "", cell.text)) for cell in spoilt]),
    )


def test_every_mistake_has_a_message_of_its_own() -> None:
    told = {(part, message) for _, _, _, part, message in MISTAKES}
    assert len(told) == len(MISTAKES) >= 60


def test_what_nobody_thought_of_is_located() -> None:
    made = until_checks(exercise.cells(MULTIHEAD, solved=True))
    spoilt = [Cell(cell.kind, cell.text.replace("@ value", "@ value * 1.5")) for cell in made]
    assert re.search(
        r"✗ attention, without a mask: \d+ of \d+ numbers are wrong, the first at \[0, 0, 0, 0\]: "
        r"\S+ instead of \S+\n",
        carry_out(spoilt),
    )


# Short formulas

RIGHT = [
    ("cold", ("inf", "∞", "1/0")),
    ("hot", ("0", "0.0")),
    ("even", ("1/m", "m**-1", "1 / m")),
    ("convenient", ("1/√d", "d**-0.5", "1/sqrt(d)", "d^(-1/2)")),
    ("output", ("V @ softargmax(β K.T @ Q)", "V @ softargmax(K.T @ (beta Q))")),
    ("identity", ("I", "I @ I", "I**1")),
    ("permuting", ("beta K @ P", "2 beta * K @ P")),
    ("running", ("W @ X", "(X.T @ W.T).T")),
    ("moved", ("a β δ (v - h)", "beta a delta v - beta a delta h")),
    ("masked", ("-inf", "-∞", "−∞")),
    ("multiplications", ("n_q n_k (d_k + d_v)", "n_q*n_k*d_k + n_q*n_k*d_v")),
    ("additions", ("n_q n_k (d_k - 1)", "n_q n_k d_k - n_q n_k")),
    ("parameters", ("4d²", "3 d^2 + d^2", "4 d*d")),
    ("convolution", ("k n d²", "n d k d")),
]
WRONG = [
    ("cold", "0", "cold is a large β"),
    ("cold", "-∞", "the worst key"),
    ("hot", "inf", "hot is a small β"),
    ("even", "1/t", "t is the width of a value"),
    ("even", "1/n", "n counts the queries"),
    ("convenient", "1/d", "its root is the scale"),
    ("convenient", "1/√t", "values have no part in the scores"),
    ("convenient", "√d", "divide by √d"),
    ("output", "V @ softargmax(K.T @ Q)", "beta is missing"),
    ("output", "V @ softmax(beta * K.T @ Q)", "softmax acts on rows"),
    ("output", "V @ softargmax(beta * Q.T @ K)", "shapes in .* do not fit"),
    ("output", "softargmax(beta * K.T @ Q)", r"shape is \(7, 3\), but should be \(2, 3\)"),
    ("identity", "ones/n", "the mean of all values"),
    ("identity", "softargmax(I)", "has no zeros"),
    ("permuting", "0 K", "scores of zero give every column the mean"),
    ("permuting", "K @ P", "not sharp"),
    ("permuting", "beta K", "that is the identity"),
    ("permuting", "beta P @ K", "stands on the right"),
    ("permuting", "beta", r"its shape is \(\), but Q is as K"),
    ("running", "X @ W", "do not fit"),
    ("moved", "beta a delta v", "the other weights shrink"),
    ("moved", "beta delta (v - h)", "a is missing"),
    ("moved", "beta a delta (h - v)", "the wrong way"),
    ("masked", "0", "where a query may attend"),
    ("masked", "1", "more weight"),
    ("multiplications", "n_q n_k d_k", "the product with V is missing"),
    ("multiplications", "n_q n_k d_k d_v", "add their counts"),
    ("additions", "n_q n_k d_k", "d_k - 1 additions"),
    ("parameters", "3 d²", "W_O is forgotten"),
    ("parameters", "4 h d²", "divided among the heads"),
    ("convolution", "k n d", "depthwise"),
    ("convolution", "5", "3 of 3 numbers are wrong"),
    ("parameters", "4 w²", "w is unknown here; use d, h"),
    ("parameters", "4 *", "is not a formula"),
    ("parameters", "abs(d)", r"abs\(…\) is unknown here"),
    ("parameters", "[4]", "more than a short formula"),
    ("parameters", " ", "still blank"),
]


@pytest.mark.parametrize(("question", "written"), RIGHT, ids=[name for name, _ in RIGHT])
def test_a_formula_is_right_however_it_is_written(
    question: str, written: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for one in written:
        getattr(words, question)(one)
        assert capsys.readouterr().out.startswith("✓ "), one


@pytest.mark.parametrize(("question", "written", "message"), WRONG)
def test_a_wrong_formula_hears_why(
    question: str, written: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    getattr(words, question)(written)
    assert re.fullmatch(rf"[✗…] .*{message}.*\n", capsys.readouterr().out)


def test_the_formula_of_the_output_is_the_librarys() -> None:
    names = words._columns()
    ours = attend(names["Q"].mT, names["K"].mT, names["V"].mT, beta=float(names["beta"])).mT
    assert torch.allclose(ours, evaluate("V @ softargmax(beta * K.T @ Q)", names))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "(lambda: 1)()",
        "d.__class__",
        "'a' * 9",
        "d if d else 1",
        "True",
        "d[0]",
        "softmax(d, d)",
        "9 ** 9 ** 9 ** 9 ** 'd'",
        "d" * (LONGEST + 1),
    ],
)
def test_a_formula_is_a_formula(text: str) -> None:
    with pytest.raises(ValueError, match=r"formula|unknown here"):
        evaluate(text, {"d": torch.tensor(3.0)})


# Files


def test_a_notebook_is_written_and_never_over_another(tmp_path: Path) -> None:
    path = exercise.write("vit", tmp_path / "new")
    assert path == tmp_path / "new" / "vit.ipynb"
    said = json.loads(path.read_text())
    assert (said["nbformat"], said["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in said["cells"]}) == len(said["cells"])
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"]) for cell in said["cells"])
    for cell in said["cells"]:
        assert set(cell) == (
            {"cell_type", "id", "metadata", "source"}
            | ({"outputs", "execution_count"} if cell["cell_type"] == "code" else set())
        )
    assert notebook.read(path) == exercise.cells("vit")
    with pytest.raises(ValueError, match=r"vit\.ipynb exists"):
        exercise.write("vit", tmp_path / "new")


def test_an_unknown_exercise() -> None:
    with pytest.raises(ValueError, match=r"'lstm'\) is unknown; choose from multihead, vit, words"):
        exercise.write("lstm", Path("nowhere"))
