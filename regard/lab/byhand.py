"""Attention by hand: every matrix between the question and the answer, as one would write it down.

    S = Q Kᵀ    scores, then β S    E = exp(S - max)    A = E / Σ E    C = A V

`steps` computes them in float64, `stages` puts each into words, `show` prints them, and `demo`
does so for a worked exercise, with the wrong answers that are easily made, and draws the masks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Num
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.attention.arguments import arguments
from regard.attention.attend import attend, explain
from regard.attention.mask import Mask, causal, documents, packed, padding, prefix, window


@dataclass(frozen=True)
class Steps:
    """What lies between queries, keys and values and the output, in float64."""

    query: Float[Tensor, "L K"]
    key: Float[Tensor, "S K"]
    value: Float[Tensor, "S V"]
    mask: Mask | None
    beta: float
    scores: Float[Tensor, "L S"]
    """Q Kᵀ"""
    scaled: Float[Tensor, "L S"]
    """β Q Kᵀ; at β = ∞, 0 at the best allowed keys and -∞ elsewhere"""
    masked: Float[Tensor, "L S"]
    """The same with -∞ where the mask forbids"""
    exponentials: Float[Tensor, "L S"]
    """Of `masked` less the largest of its row"""
    weights: Float[Tensor, "L S"]
    """A: every row of exponentials over its sum"""
    output: Float[Tensor, "L V"]
    """C = A V"""


def steps(
    query: Num[Tensor, "L K"],
    key: Num[Tensor, "S K"],
    value: Num[Tensor, "S V"],
    mask: Mask | None = None,
    beta: float | None = None,
) -> Steps:
    """softmax(β Q Kᵀ) V with everything on the way kept; the arguments mean what `attend`'s do."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 2:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has {tensor.ndim} axes; attention by hand "
                "takes one matrix each: pick one sentence and one head"
            )
    query, key, value = query.double(), key.double(), value.double()
    sharpness = arguments(query, key, value, mask, beta, None).beta
    if isinstance(sharpness, Tensor):
        raise ValueError(f"beta ({sharpness.tolist()}) must be a number; by hand there is one head")
    scores = query @ key.T
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        L, S = scores.shape
        allowed = mask.tensor(L, S, scores.device)[0, 0]
    if sharpness == math.inf:
        seen = scores.masked_fill(~allowed, -math.inf)
        best = seen.amax(-1, keepdim=True) if seen.numel() else seen
        scaled = torch.zeros_like(scores).masked_fill(scores != best, -math.inf)
    else:
        scaled = sharpness * scores
    masked = scaled.masked_fill(~allowed, -math.inf)
    # A row that may attend to nothing has no largest score: its exponentials are 0, not NaN.
    largest = masked.amax(-1, keepdim=True) if masked.numel() else masked
    exponentials = torch.exp(masked - largest.nan_to_num(neginf=0.0))
    # Where there is a largest its exponential is 1, so no sum but that of an empty row is less.
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1.0)
    return Steps(
        query,
        key,
        value,
        mask,
        sharpness,
        scores,
        scaled,
        masked,
        exponentials,
        weights,
        weights @ value,
    )


class Stage(NamedTuple):
    """One matrix of `Steps`, and what there is to say about it."""

    name: str
    equation: str
    sentence: str
    matrix: Tensor
    rows: str = "q"
    """Letter that names the rows"""
    columns: str = "k"
    """Letter that names the columns, where they have a name"""
    shares: bool = False
    """Whether the entries are parts of 1, to be drawn as such"""


def stages(steps: Steps) -> list[Stage]:
    """The steps in words, in the order in which one takes them."""
    K, beta = steps.key.shape[1], _number(steps.beta)
    if steps.beta == math.inf:
        scaling = (
            "β = ∞",
            "Only the best key of each query stays in the race; equals stay together.",
        )
    elif _natural(steps):
        reason = "scores of random vectors keep variance 1 at any width d."
        scaling = f"S / √{K}", f"Divided by √d = √{K}, {reason}"
    else:
        scaling = f"{beta} S", f"β = {beta} sets how sharp the choice is: 0 not at all, ∞ hard."
    masked = Stage(
        "Masked",
        str(steps.mask),
        "What the mask forbids becomes -∞, which no score of another can make up for.",
        steps.masked,
    )
    return [
        Stage(
            "Scores",
            "S = Q Kᵀ",
            "Every query meets every key in a dot product: how well does the key fit?",
            steps.scores,
        ),
        Stage("Scaled", *scaling, steps.scaled),
        *([masked] if steps.mask is not None else []),
        Stage(
            "Exponentials",
            "E = exp(S - max)",
            "All become positive. Less the largest of its row, none can overflow.",
            steps.exponentials,
        ),
        Stage(
            "Weights",
            "A = E / Σ E",
            "Along each row, divided by its sum: a query's weights add up to 1.",
            steps.weights,
            shares=True,
        ),
        Stage(
            "Output",
            "C = A V",
            "Each query takes the mean of the values, by these weights.",
            steps.output,
            rows="c",
            columns="",
        ),
    ]


def worked(steps: Steps) -> dict[str, str]:
    """One entry of a stage's matrix in figures, by the stage's name.

    It follows the second largest weight of the first row that has any, which shows most.
    """
    rows = steps.weights.any(-1).nonzero()
    if not len(rows) or not steps.value.shape[1]:
        return {}
    row = int(rows[0])
    order = steps.weights[row].argsort(descending=True, stable=True)
    column = int(order[min(1, len(order) - 1)])
    score, scaled, masked, exponential, weight = (
        _number(float(matrix[row, column]))
        for matrix in (
            steps.scores,
            steps.scaled,
            steps.masked,
            steps.exponentials,
            steps.weights,
        )
    )
    some = steps.weights[row] > 0
    dot = _products(steps.query[row], steps.key[column])
    largest = _number(float(steps.masked[row].max()))
    total = _sum(_number(e) for e in steps.exponentials[row, some].tolist())
    mean = _products(steps.weights[row, some], steps.value[some, 0])
    examples = {
        "Scores": f"q{row + 1}·k{column + 1} = {dot} = {score}",
        "Exponentials": f"exp({masked} - {largest}) = {exponential}",
        "Weights": f"{exponential} / ({total}) = {weight}",
        "Output": f"c{row + 1}, first entry: {mean} = {_number(float(steps.output[row, 0]))}",
    }
    if _natural(steps):
        examples["Scaled"] = f"{score} / √{steps.key.shape[1]} = {scaled}"
    elif steps.beta != math.inf:
        examples["Scaled"] = f"{_number(steps.beta)} · {_signed(score)} = {scaled}"
    return examples


def show(steps: Steps, console: Console) -> None:
    """Prints queries, keys and values, and then every stage as a small table."""
    room = console.width - _INDENT
    given = [
        Group(
            Text.assemble((name, "bold"), (f"  {matrix.shape[0]} × {matrix.shape[1]}", "dim")),
            _table(matrix, name.lower(), "", room),
        )
        for name, matrix in (("Q", steps.query), ("K", steps.key), ("V", steps.value))
    ]
    console.print(_indented(Columns(given, padding=(0, 4))), "")
    examples = worked(steps)
    for number, stage in enumerate(stages(steps), 1):
        _heading(console, f"{number}  {stage.name}", stage.equation)
        console.print(_indented(Text(stage.sentence)))
        if stage.name in examples:
            console.print(_indented(Text(examples[stage.name], "dim")))
        table = _table(stage.matrix, stage.rows, stage.columns, room, stage.shares)
        console.print(_indented(table), "")


def exercise() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the course's worked exercise on attention."""
    return (
        torch.tensor([[1, 2], [3, 1]], dtype=torch.float64),
        torch.tensor([[2, 1], [1, 1], [0, 1]], dtype=torch.float64),
        torch.tensor([[1, 2, -2], [1, 1, 2], [0, 1, -1]], dtype=torch.float64),
    )


DRAWN: Sequence[tuple[int, int, str, Sequence[Mask]]] = (
    (
        6,
        6,
        "■ may attend, · may not. Each line is a query, each column a key. "
        "A query that may attend to nothing receives zeros.",
        (
            causal(),
            padding([4]),
            causal() & padding([4]),
            window(1),
            documents([0, 0, 0, 1, 1, 2]),
            causal() | prefix(3),
            packed([2, 4]),
            ~causal(),
            packed([2, 4]) & causal(),
        ),
    ),
    (
        3,
        6,
        "With fewer queries than keys, the last query stands at the last key.",
        (causal(), window(1), packed([1, 2], [2, 4]) & causal()),
    ),
)
"""The masks that `demo` draws: how many queries and keys, what to say, and which."""

TRY = """\
import torch
from regard import attend, causal, explain, packed
print((packed([3, 5]) & causal()).draw(8, 8))
x = torch.randn(8, 4)
print(attend(x, x, x, mask=causal()))
print(explain(x, x, x, mask=causal()))
"""
"""What `demo` proposes to type."""


def demo() -> None:
    """Steps through the exercise, shows what goes wrong easily, and draws the masks."""
    console = Console(highlight=False)
    query, key, value = exercise()
    right = steps(query, key, value)
    with console.capture() as page:
        _heading(console, "Attention by hand", "C = softmax(Q Kᵀ / √d) V")
        console.print()
        show(right, console)
        _compare(console, right)
        _check(console, right)
        _draw(console)
        _propose(console)
    # Rich fills lines up with spaces, which would be in the way of whoever copies or compares them.
    print("\n".join(line.rstrip() for line in page.get().splitlines()))


def _compare(console: Console, right: Steps) -> None:
    """The output's first row beside two that a slip of the pen gives."""
    unscaled = steps(right.query, right.key, right.value, beta=1.0)
    down = right.scaled.softmax(0)
    first, sharper = (_number(float(found.weights[0].max())) for found in (right, unscaled))
    _heading(console, "Easily got wrong", "c1")
    sentence = (
        f"Without √{right.key.shape[1]} the largest weight of q1 grows from {first} to {sharper}. "
        f"With a softmax down the columns, q1's weights add up to {_number(float(down[0].sum()))}."
    )
    console.print(_indented(Text(sentence)))
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    for _ in range(right.output.shape[1]):
        table.add_column(justify="right")
    for sign, name, output in (
        (Text("✓", "green"), "as above", right.output),
        (Text("✗", "red"), "not scaled", unscaled.output),
        (Text("✗", "red"), "softmax down columns", down @ right.value),
    ):
        table.add_row(sign, name, *(_number(x) for x in output[0].tolist()))
    console.print(_indented(table), "")


def _check(console: Console, right: Steps) -> None:
    """What `attend` makes of it, measured here and now."""
    given = right.query, right.key, right.value
    difference = float((attend(*given) - right.output).abs().max())
    rounding = torch.finfo(torch.float64).eps * float(right.output.abs().max())
    verdict = "the same" if difference <= 8 * rounding else "something else"
    _heading(console, "And attend(Q, K, V)?", verdict)
    said = Table.grid(padding=(0, 2))
    said.add_row("largest difference", f"{difference:.1e}")
    said.add_row("rounding in float64", f"{rounding:.1e}")
    said.add_row("explain(Q, K, V)", Text(explain(*given)))
    console.print(_indented(said), "")


def _draw(console: Console) -> None:
    _heading(console, "Masks", "who may attend to what")
    for L, S, sentence, masks in DRAWN:
        console.print(_indented(Text(sentence)), "")
        drawings = []
        for mask in masks:
            drawn = Text(mask.draw(L, S), "dim")
            drawn.highlight_regex("■", "not dim magenta")
            drawings.append(Group(Text(str(mask), "bold"), drawn, ""))
        console.print(_indented(Columns(drawings, padding=(0, 4))))


def _propose(console: Console) -> None:
    _heading(console, "What to try next", "")
    words = Table.grid(padding=(0, 2))
    words.add_row(Text("make test", "bold"), "every number above, and many more, checked")
    words.add_row(Text("make bench", "bold"), "how fast attend is, beside its alternatives")
    words.add_row(Text(".venv/bin/python", "bold"), "and then, for example:")
    console.print(_indented(words), "")
    for line in TRY.splitlines():
        console.print(_indented(Text(f"  {line}", no_wrap=True)))


_INDENT = 3


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, _INDENT), expand=False)


def _heading(console: Console, name: str, equation: str) -> None:
    """The name at the left and the equation at the right, within one line."""
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True)
    line.add_column(justify="right")
    line.add_row(Text(name, "bold"), Text(equation, "magenta"))
    # A line of text and not of a page: no wider than one likes to read.
    console.print(line, width=min(console.width, 80))


def _table(matrix: Tensor, rows: str, columns: str, room: int, shares: bool = False) -> Table:
    """A matrix with the names of its rows and columns; what exceeds the room is left out."""
    whole = bool((matrix == matrix.round()).all())
    lines = [
        [_number(x, whole) + (f" {_bar(x)}" if shares else "") for x in row]
        for row in matrix.tolist()
    ]
    # Set by hand: a name stands above its numbers, not above the bars beside them.
    beside = "  " if shares else ""
    names = [f"{columns}{n + 1}{beside}" if columns else "" for n in range(matrix.shape[1])]
    cell = max((len(x) for line in [names, *lines] for x in line), default=1)
    fits = max(1, (room - len(f"{rows}{len(lines)}") - 2) // (cell + 2))
    kept = len(names) if len(names) <= fits else max(1, fits - 1)
    more = ["…"] * (len(names) > kept)
    table = Table(box=None, show_header=bool(columns), padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(style="dim", no_wrap=True)
    for name in names[:kept]:
        table.add_column(Text(name.rjust(cell)), no_wrap=True)
    for name in more:
        table.add_column(name)
    for number, line in enumerate(lines, 1):
        table.add_row(f"{rows}{number}", *(x.rjust(cell) for x in line[:kept]), *more)
    return table


def _bar(share: float) -> str:
    """The share as a column of one character; a dot for none at all."""
    return "▁▂▃▄▅▆▇█"[max(0, round(8 * share) - 1)] if share > 0 else "·"


def _number(x: float, whole: bool | None = None) -> str:
    """Three decimals, or none where there are none to show."""
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    if x == round(x) if whole is None else whole:
        return f"{x:.0f}"
    return f"{x:.3f}"


def _natural(steps: Steps) -> bool:
    """Whether β is 1/√d."""
    K = steps.key.shape[1]
    return K > 0 and math.isclose(steps.beta, 1 / math.sqrt(K))


def _products(a: Tensor, b: Tensor) -> str:
    """The sum of products that a dot product is, in figures."""
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    return _sum(f"{_signed(_number(x))}·{_signed(_number(y))}" for x, y in pairs)


def _signed(number: str) -> str:
    return f"({number})" if number.startswith("-") else number


def _sum(terms: Iterable[str], most: int = 4) -> str:
    """Terms with plus signs between them; where there are many, the first ones."""
    given = list(terms)
    shown = given if len(given) <= most else [*given[: most - 1], "…"]
    return " + ".join(shown) or "0"
