"""Attention by hand: every matrix from queries, keys and values to the output.

`steps` computes them (steps.py), `stages` describes each (stages.py), `show` prints them, and
`by_hand` shows them in a notebook. `demo` works through an exercise, shows common mistakes, and
draws the masks.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from jaxtyping import Num
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.attention.attend import attend, explain_attention
from regard.attention.mask import Mask, causal, documents, packed, padding, prefix, window
from regard.lab.export import Shown
from regard.lab.layer import Layer, Part, outputs, projections
from regard.lab.matrix import Matrix, decimal
from regard.lab.scoring import Operations, size
from regard.lab.stages import Arithmetic, Convention, stages, worked
from regard.lab.steps import NOT_COUNTED, Steps, steps
from regard.lab.terminal import INDENT, indented, printing


def by_hand(
    query: Num[Tensor, "L K"] | Matrix,
    key: Num[Tensor, "S K"] | Matrix | None = None,
    value: Num[Tensor, "S V"] | Matrix | None = None,
    mask: Mask | None = None,
    beta: Fraction | float | None = None,
) -> Shown:
    """The steps of attention, which a notebook shows as tables; arguments as for `steps`."""
    return Shown(**vars(steps(query, key, value, mask, beta)))


def show(steps: Steps, console: Console, convention: Convention = "rows", digits: int = 3) -> None:
    """Prints queries, keys and values, and then every stage as a small table."""
    room = console.width - INDENT
    vectors = {name: (matrix, name.lower()) for name, matrix in zip("QKV", steps.written)}
    own = {name: (matrix, "") for name, matrix in steps.scoring.matrices.items()}
    _show_inputs({**vectors, **own}, console, convention, digits)
    examples = worked(steps, convention, digits)
    for number, stage in enumerate(stages(steps, convention, digits), 1):
        _heading(console, f"{number}  {stage.name}", stage.equation)
        console.print(indented(Text(stage.sentence)))
        if stage.name in examples:
            console.print(indented(Text(examples[stage.name], "dim")))
        table = _stage_table(stage.figures, stage.rows, stage.columns, room, stage.shares, digits)
        console.print(indented(table), "")


def _show_inputs(
    inputs: Mapping[str, tuple[Matrix, str]], console: Console, convention: Convention, digits: int
) -> None:
    """Prints matrices side by side, with the letter of their vectors where they have one."""
    shown = []
    for name, (matrix, letter) in inputs.items():
        letters = (letter, "")
        if convention == "columns":
            matrix, letters = matrix.transposed, ("", letter)
        title = Text.assemble((name, "bold"), (f"  {size(matrix.shape)}", "dim"))
        table = _table(matrix.figures(digits), *letters, console.width - INDENT)
        shown.append(Group(title, table))
    console.print(indented(Columns(shown, padding=(0, 4))), "")


def show_layer(whole: Layer, console: Console, convention: Convention, digits: int) -> None:
    """Prints a layer: its inputs, the projections, each head, and the output."""
    letters = {letter: whole.inputs[name] for name, letter in whole.sources.items()}
    inputs = {letter: (matrix, letter.lower()) for letter, matrix in letters.items()}
    weights = {name: (matrix, "") for name, matrix in whole.weights.items()}
    _show_inputs({**inputs, **weights}, console, convention, digits)
    for part in projections(whole, convention):
        _show_part(part, console, digits)
    for number, head in enumerate(whole.heads, 1):
        _heading(console, f"Head {number} of {len(whole.heads)}", "")
        show(head, console, convention, digits)
    for part in outputs(whole, convention):
        _show_part(part, console, digits)


def _show_part(part: Part, console: Console, digits: int) -> None:
    _heading(console, part.name, part.equation)
    room = console.width - INDENT
    table = _stage_table(part.figures, part.rows, part.columns, room, False, digits)
    console.print(indented(table), "")


def show_operations(
    counted: dict[str, Operations], console: Console, order: str = "O(n_q n_k (d_k + d_v))"
) -> None:
    """Prints the number of multiplications, divisions, additions and exponentials."""
    _heading(console, "Operations", order)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(style="dim")
    for name in counted["total"].figures:
        table.add_column(name, justify="right")
    for name, count in counted.items():
        figures = (f"{n:,}" for n in count.figures.values())
        table.add_row(name, *figures, style="bold" if name == "total" else None)
    console.print(indented(table))
    console.print(indented(Text(NOT_COUNTED, "dim")), "")


def show_arithmetic(entries: Sequence[Arithmetic], console: Console, of: str = "") -> None:
    """Prints how each of these entries is computed."""
    _heading(console, "Entry by entry", of)
    for one in entries:
        console.print(indented(Text(str(one))))
    console.print()


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
"""What `demo` draws: number of queries, number of keys, a sentence, and the masks."""

TRY = """\
import torch
from regard import attend, causal, explain_attention, packed
print((packed([3, 5]) & causal()).draw(8, 8))
x = torch.randn(8, 4)
print(attend(x, x, x, mask=causal()))
print(explain_attention(x, x, x, mask=causal()))
"""
"""What `demo` suggests to type."""


def demo() -> None:
    """Works through the exercise, shows common mistakes, and draws the masks."""
    query, key, value = exercise()
    right = steps(query, key, value)
    with printing() as console:
        _heading(console, "Attention by hand", "C = softmax(Q Kᵀ / √d) V")
        console.print()
        show(right, console)
        _compare(console, right)
        _check(console, right)
        _draw(console)
        _propose(console)


def _compare(console: Console, right: Steps) -> None:
    """The first row of the output beside two wrong ones."""
    unscaled = steps(right.query, right.key, right.value, beta=1.0)
    down = right.scaled.softmax(0)
    first, sharper = (decimal(float(one.weights[0].max())) for one in (right, unscaled))
    _heading(console, "Common mistakes", "c1")
    sentence = (
        f"Not scaled by 1/√{right.key.shape[1]}, the largest weight of q1 grows from {first} to "
        f"{sharper}. "
        f"With a softmax down the columns, q1's weights add up to {decimal(float(down[0].sum()))}."
    )
    console.print(indented(Text(sentence)))
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
        table.add_row(sign, name, *(decimal(x) for x in output[0].tolist()))
    console.print(indented(table), "")


def _check(console: Console, right: Steps) -> None:
    """Whether `attend` gives the same output."""
    inputs = right.query, right.key, right.value
    difference = float((attend(*inputs) - right.output).abs().max())
    rounding = torch.finfo(torch.float64).eps * float(right.output.abs().max())
    verdict = "the same" if difference <= 8 * rounding else "something else"
    _heading(console, "And attend(Q, K, V)?", verdict)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("largest difference", f"{difference:.1e}")
    facts.add_row("rounding in float64", f"{rounding:.1e}")
    facts.add_row("explain_attention(Q, K, V)", Text(explain_attention(*inputs)))
    console.print(indented(facts), "")


def _draw(console: Console) -> None:
    _heading(console, "Masks", "who may attend to what")
    for L, S, sentence, masks in DRAWN:
        console.print(indented(Text(sentence)), "")
        drawings = []
        for mask in masks:
            drawn = Text(mask.draw(L, S), "dim")
            drawn.highlight_regex("■", "not dim magenta")
            drawings.append(Group(Text(str(mask), "bold"), drawn, ""))
        console.print(indented(Columns(drawings, padding=(0, 4))))


def _propose(console: Console) -> None:
    _heading(console, "What to try next", "")
    words = Table.grid(padding=(0, 2))
    words.add_row(Text("make test", "bold"), "every number above, and many more, checked")
    words.add_row(Text("make bench", "bold"), "how fast attend is, beside its alternatives")
    words.add_row(Text(".venv/bin/python", "bold"), "and then, for example:")
    console.print(indented(words), "")
    for line in TRY.splitlines():
        console.print(indented(Text(f"  {line}", no_wrap=True)))


def _heading(console: Console, name: str, equation: str) -> None:
    """The name at the left and the equation at the right, within one line."""
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True)
    line.add_column(justify="right")
    line.add_row(Text(name, "bold"), Text(equation, "magenta"))
    # No wider than is easy to read.
    console.print(line, width=min(console.width, 80))


def _stage_table(
    matrix: Matrix, rows: str, columns: str, room: int, shares: bool, digits: int
) -> RenderableType:
    """A stage's matrix; if exact but not whole numbers, with its decimals beside it."""
    rounded = _table(matrix.decimals(digits), rows, columns, room, matrix if shares else None)
    if not matrix.exact or matrix.whole:
        return rounded
    exact = _table(matrix.figures(digits), rows, columns, room)
    return Columns([exact, rounded], padding=(0, 4))


def _table(
    lines: list[list[str]], rows: str, columns: str, room: int, shares: Matrix | None = None
) -> Table:
    """A matrix with the names of its rows and columns; columns that do not fit are left out."""
    if shares is not None:
        lines = [
            [f"{x} {_bar(float(share))}" for x, share in zip(line, row)]
            for line, row in zip(lines, shares.rows)
        ]
    # Aligned here: a name stands above its numbers, not above the bars beside them.
    beside = "  " if shares is not None else ""
    names = [f"{columns}{n + 1}{beside}" if columns else "" for n in range(len(lines[0]))]
    cell = max((len(x) for line in [names, *lines] for x in line), default=1)
    side = [f"{rows}{n + 1}" if rows else "" for n in range(len(lines))]
    fits = max(1, (room - len(side[-1]) - 2) // (cell + 2))
    kept = len(names) if len(names) <= fits else max(1, fits - 1)
    more = ["…"] * (len(names) > kept)
    table = Table(box=None, show_header=bool(columns), padding=(0, 2, 0, 0), header_style="dim")
    if rows:
        table.add_column(style="dim", no_wrap=True)
    for name in names[:kept]:
        table.add_column(Text(name.rjust(cell)), no_wrap=True)
    for name in more:
        table.add_column(name)
    for name, line in zip(side, lines):
        table.add_row(*([name] * bool(rows)), *(x.rjust(cell) for x in line[:kept]), *more)
    return table


def _bar(share: float) -> str:
    """The share as a bar of one character; a dot for 0."""
    return "▁▂▃▄▅▆▇█"[max(0, round(8 * share) - 1)] if share > 0 else "·"
