"""Costs in tables: for a terminal, as Markdown, as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from regard.config import to_json
from regard.lab import chart
from regard.lab.cost import documents
from regard.lab.cost.documents import mark, short
from regard.lab.cost.layers import LAYERS, Sizes, measure
from regard.lab.cost.models import ModelCost
from regard.lab.experiment import Curve, Plot, Table
from regard.lab.show import table as drawn_table
from regard.lab.terminal import indented
from regard.model.formula import PARTS, Part, model_formula
from regard.model.transformer import TransformerConfig
from regard.model.vit import VisionConfig


@dataclass(frozen=True)
class Page:
    """The cost of the layers, or of one model."""

    title: str
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...]
    notes: tuple[str, ...]
    data: dict[str, Any]
    """The same as JSON, with all digits."""


def layers_page(sizes: Sizes, precision: str, bytes_each: int) -> Page:
    """All layers at one size."""
    counted = {each.name: measure(each, sizes) for each in LAYERS}
    costs = {each.name: each.cost(sizes) for each in LAYERS}
    products, sums, order, memory = [], [], [], []
    for each in LAYERS:
        name, cost, found = each.name, costs[each.name], counted[each.name]
        check = {
            what: mark(getattr(cost, what), None if found is None else getattr(found, what))
            for what in ("parameters", "multiply_adds", "additions", "steps", "path")
        }
        multiply_adds = short(cost.multiply_adds), check["multiply_adds"]
        products.append(
            (name, each.parameters, check["parameters"], each.multiply_adds, *multiply_adds)
        )
        others = None if found is None else found.others
        sums.append((name, short(cost.additions), check["additions"], short(others)))
        path = "never" if cost.path is None else check["path"]
        order.append((name, each.steps, check["steps"], each.path, path))
        saved = "—" if found is None else _bytes(found.activations * bytes_each)
        in_bytes = _bytes(cost.parameters * bytes_each), saved, _bytes(cost.cache * bytes_each)
        memory.append((name, *in_bytes))
    n, d = sizes.length, sizes.width
    compared = documents.comparison(sizes)
    crossings = tuple(
        (name, other, words, "—" if at is None else f"{at:,.0f}")
        for name, other, words, at in documents.crossovers(sizes)
    )
    return Page(
        f"Layers over n = {n:,} positions of width d = {d:,}: kernel size k = {sizes.kernel}, "
        f"h = {sizes.heads} heads, a window of w = {sizes.window} to each side, "
        f"batch {sizes.batch}",
        (
            Table(
                "Parameters and multiply-adds",
                ("layer", "parameters", "counted", "multiply-adds", "by formula", "counted"),
                tuple(products),
            ),
            Table(
                "Additions, and elementwise operations",
                ("layer", "additions by formula", "counted", "others counted"),
                tuple(sums),
            ),
            Table(
                "Sequential steps, and the longest path between two positions",
                ("layer", "sequential steps", "counted", "longest path", "measured"),
                tuple(order),
            ),
            Table(
                f"Memory in {precision}",
                ("layer", "weights", "activations", "cache"),
                tuple(memory),
            ),
            documents.comparison_table(compared),
            Table(
                "Where attention costs as much as another layer",
                ("attention", "as", "at", "positions"),
                crossings,
            ),
        ),
        (documents.scaling(sizes),),
        (
            "✓ the count equals the formula; ≠ it does not; — too long to run, by formula alone.",
            "A sequential step is a product that needs the result of the one before.",
            "A window's formula has the pairs that are needed; counted are the blocks that the "
            "kernel computes.",
            "Activations are what autograd saves for the backward pass. The cache, by formula, is "
            "what decoding keeps: keys and values, or a state.",
        ),
        {
            "sizes": asdict(sizes),
            "precision": precision,
            "layers": [
                {
                    "name": each.name,
                    "formula": asdict(costs[each.name]),
                    "counted": None if (found := counted[each.name]) is None else asdict(found),
                    "words": {
                        "parameters": each.parameters,
                        "multiply_adds": each.multiply_adds,
                        "steps": each.steps,
                        "path": each.path,
                    },
                }
                for each in LAYERS
            ],
            "documents": [
                {
                    "document": entry.place.document,
                    "section": entry.place.section,
                    "layer": entry.layer,
                    "of": entry.what,
                    "order_taught": entry.order,
                    "left_out": entry.left_out,
                    "complete": entry.exact,
                    "by_formula": value,
                    "counted": count,
                }
                for entry, value, count in compared
            ],
            "crossovers": [
                {"attention": name, "as": other, "length": at}
                for name, other, _, at in documents.crossovers(sizes)
            ],
        },
    )


def model_page(name: str, cost: ModelCost, printed: int | float | None) -> Page:
    """One model; `printed` is the number of parameters in its paper."""
    rows = []
    for part in PARTS:
        formula, counted = cost.formula[part], cost.measured[part]
        if formula == counted == Part():
            continue
        rows.append(
            (
                part,
                mark(formula.parameters, counted.parameters),
                _share(counted.parameters, cost.parameters),
                mark(formula.multiply_adds, counted.multiply_adds),
                _share(counted.multiply_adds, cost.multiply_adds),
            )
        )
    parameters = sum(part.parameters for part in cost.formula.values())
    forward = sum(part.multiply_adds for part in cost.formula.values())
    rows.append(
        ("together", mark(parameters, cost.parameters), "", mark(forward, cost.multiply_adds), "")
    )
    arithmetic = [
        ("forward pass, multiply-adds", short(cost.multiply_adds)),
        ("forward pass, additions", short(cost.additions)),
        ("backward pass, multiply-adds", short(cost.backward)),
        ("training step, multiply-adds", short(cost.training)),
        ("training step / forward pass", f"{cost.training / cost.multiply_adds:.3f}"),
    ]
    memory = [(what, _bytes(size)) for what, size in cost.memory.items()]
    if cost.cache is not None and cost.cache_formula is not None:
        for what, count, right in (
            ("KV cache, each target token", cost.cache.each, cost.cache_formula.each),
            ("KV cache, each source token", cost.cache.source, cost.cache_formula.source),
        ):
            sign = "✓" if count == right else "≠"
            memory.append((what, f"{_bytes(count * cost.bytes_per_number)} {sign}"))
    notes = ["✓ the count equals the formula; ≠ it does not."]
    if cost.every_row is not None:
        notes.append(
            f"The last block computes only the class token's row. With all rows, as others count, "
            f"it would be {short(cost.every_row)} multiply-adds."
        )
    if printed is not None:
        off = 100 * (cost.parameters / printed - 1)
        notes.append(
            f"Parameters: {cost.parameters:,} here, {printed / 1e6:g} million in the paper "
            f"({off:+.1f} %)."
        )
    if cost.precision != "fp32":
        notes.append("Mixed precision: weights, gradients and Adam's moments stay fp32.")
    notes.append(
        "The backward pass of fused attention recomputes the scores, so a training step costs more "
        "than 3 forward passes."
    )
    of = f"{cost.batch} × " if cost.batch > 1 else ""
    size = f"{of}one image"
    if _reads_text(cost):
        both = isinstance(cost.config, TransformerConfig)
        size = f"{of}{cost.length:,} {'source and as many target ' * both}tokens"
    return Page(
        f"{name}: {short(cost.parameters)} parameters, {short(cost.multiply_adds)} multiply-adds "
        f"for {size}",
        (
            Table(
                "Parts",
                ("part", "parameters", "share", "multiply-adds", "share"),
                tuple(rows),
            ),
            Table("Arithmetic, counted", ("", "operations"), tuple(arithmetic)),
            Table(f"Memory in {cost.precision}", ("", "bytes"), tuple(memory)),
        ),
        (_model_plot(cost),) if _reads_text(cost) else (),
        tuple(notes),
        {
            "name": name,
            "config": to_json(cost.config),
            "length": cost.length if _reads_text(cost) else None,
            "batch": cost.batch,
            "precision": cost.precision,
            "parts": {
                part: {
                    "formula": asdict(cost.formula[part]),
                    "counted": asdict(cost.measured[part]),
                }
                for part in PARTS
            },
            "parameters": cost.parameters,
            "paper": printed,
            "multiply_adds": cost.multiply_adds,
            "multiply_adds_every_row": cost.every_row,
            "additions": cost.additions,
            "backward_multiply_adds": cost.backward,
            "training_multiply_adds": cost.training,
            "memory": cost.memory,
            "cache": None
            if cost.cache is None or cost.cache_formula is None
            else {"formula": asdict(cost.cache_formula), "counted": asdict(cost.cache)},
        },
    )


def _reads_text(cost: ModelCost) -> bool:
    return not isinstance(cost.config, VisionConfig)


def _model_plot(cost: ModelCost) -> Plot:
    """Multiply-adds of each part over the length, by formula."""
    lengths = [2**e for e in range(4, 15)]
    formulas = [model_formula(cost.config, n, cost.batch) for n in lengths]
    curves = tuple(
        Curve(part, lengths, [each[part].multiply_adds for each in formulas])
        for part in PARTS
        if formulas[0][part].multiply_adds
    )
    return Plot("Multiply-adds", "tokens", "multiply-adds", curves, log_x=True, log_y=True)


def print_page(page: Page, console: Console) -> None:
    """Prints tables, plots and notes to a terminal."""
    console.print(Text(page.title, "bold magenta"), "")
    for table in page.tables:
        console.print(indented(Text(table.title, "bold")))
        drawn = drawn_table(table)
        for column, values in zip(drawn.columns, zip(*table.rows)):
            if all(_is_number(str(value)) for value in values):
                column.justify = "right"
        console.print(indented(drawn), "")
    for plot in page.plots:
        console.print(indented(Text(plot.title, "bold")))
        console.print(indented(chart.terminal(plot, min(console.width, 90) - 4)), "")
    for note in page.notes:
        console.print(indented(Text(note, "dim")))


def markdown(page: Page) -> str:
    """The tables and notes as Markdown."""
    parts = [f"## {page.title}"]
    for table in page.tables:
        lines = [table.head, tuple("---" for _ in table.head), *table.rows]
        body = "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
        parts.append(f"### {table.title}\n\n{body}")
    return "\n\n".join([*parts, *page.notes])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole and part else ""


def _bytes(size: int | float) -> str:
    return f"{short(size)}B" if size >= 1000 else f"{short(size)} B"


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell == "—"
