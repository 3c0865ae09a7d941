"""The exercises: solved, every check is content; each common mistake hears what it is."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from regard.lab import exercise, notebook
from regard.lab.notebook import Cell

# What is checked here is said by the notebooks' own checks, thousands of small calls.
pytestmark = pytest.mark.usefixtures("unchecked")

MULTIHEAD, VIT = "multihead", "vit"

# What to write instead of a solution's line, and what a check has to say about it.
MISTAKES = [
    # attention
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "", "attention", "not scaled; divide them by √K"),
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "/ key.shape[-1]", "attention", "divided by K"),
    (MULTIHEAD, "/ key.shape[-1] ** 0.5", "* key.shape[-1] ** 0.5", "attention", "multiplied by"),
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


def carried_out(made: list[Cell]) -> str:
    """What the cells print; each is a file of its own, as in a notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for number, cell in enumerate(made):
            if cell.kind == "code":
                exec(compile(cell.text, f"<cell {number}>", "exec"), names)
    return said.getvalue()


def until_checks(made: list[Cell]) -> list[Cell]:
    """Without what comes after the last check, which trains."""
    last = max(n for n, cell in enumerate(made) if cell.text.startswith("check."))
    return made[: last + 1]


@pytest.mark.parametrize("name", exercise.EXERCISES)
def test_solved_all_checks_are_content(name: str) -> None:
    made = exercise.cells(name, solved=True)
    short = [Cell(c.kind, c.text.replace("STEPS = 300", "STEPS = 2")) for c in made]
    assert short != made or name != VIT
    said = carried_out(short)
    assert "✗" not in said
    assert "…" not in said
    assert said.count("✓") == 4


@pytest.mark.slow
def test_the_solved_vision_transformer_learns() -> None:
    said = carried_out(exercise.cells(VIT, solved=True))
    assert float(re.findall(r"([\d.]+)% right", said)[-1]) > 90


@pytest.mark.parametrize("name", exercise.EXERCISES)
def test_blank_every_check_says_so(name: str) -> None:
    made = exercise.cells(name)
    assert sum(cell.text.count("raise NotImplementedError") for cell in made) >= 4
    assert sum("<summary>" in cell.text for cell in made) >= 3
    said = carried_out(until_checks(made))
    assert said.count("still blank") == 4
    assert "✓" not in said


@pytest.mark.parametrize("name", exercise.EXERCISES)
def test_solved_and_blank_differ_in_the_blanks_alone(name: str) -> None:
    for blank, solved in zip(exercise.cells(name), exercise.cells(name, solved=True), strict=True):
        given = [line for line in blank.text.split("\n") if "Your turn" not in line]
        given = [line for line in given if "NotImplementedError" not in line]
        assert set(given) <= set(solved.text.split("\n"))
        assert "# blank" not in blank.text + solved.text
        assert "# end" not in blank.text + solved.text


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
        carried_out([Cell(cell.kind, re.sub(others, "", cell.text)) for cell in spoilt]),
    )


def test_every_mistake_has_a_message_of_its_own() -> None:
    told = {(part, message) for _, _, _, part, message in MISTAKES}
    assert len(told) == len(MISTAKES) >= 60


def test_what_nobody_thought_of_is_located() -> None:
    made = until_checks(exercise.cells(MULTIHEAD, solved=True))
    spoilt = [Cell(cell.kind, cell.text.replace("@ value", "@ value * 1.5")) for cell in made]
    assert re.search(
        r"✗ attention, without a mask: \d+ of \d+ numbers are wrong, the first at "
        r"\[0, 0, 0, 0\]: \S+ instead of \S+\n",
        carried_out(spoilt),
    )


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
    with pytest.raises(ValueError, match=r"'lstm'\) is unknown; choose from multihead, vit"):
        exercise.write("lstm", Path("nowhere"))
