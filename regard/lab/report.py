"""Results as an HTML page: one file that fetches nothing, in the reader's light or dark scheme.

`section` is one experiment. The page consists of sections; a notebook shows one by `fragment`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from regard.lab import chart
from regard.lab.claims import Family
from regard.lab.claims.stated import STATED, Stated
from regard.lab.equation import mathml
from regard.lab.experiment import MARKS, Measured, Plot, Table, Verdict
from regard.lab.numbers import columns, figure
from regard.lab.perform import Result, by_family
from regard.machine import atomic

STYLE = (files("regard.lab") / "report.css").read_text(encoding="utf-8")
"""The CSS of sections and plots; every rule is under the class `regard-lab`."""

CLASSES: dict[Verdict, str] = {
    "holds": "holds",
    "holds under conditions": "conditions",
    "true in context, to be said more exactly": "exactly",
    "wrong as stated": "wrong",
    "undecided": "undecided",
}
"""The CSS class that colours a verdict."""


class Shown(Result):
    """A result that a notebook shows as its section of the report."""

    def _repr_html_(self) -> str:
        return fragment(self)


def page(results: Sequence[Result], seconds: float) -> str:
    """The whole page: counts, contents, sections by family, and what is only stated."""
    grouped = by_family(results)
    trained = sum(result.experiment.trained for result in results)
    added = sum(result.experiment.kind == "added" for result in results)
    return html(
        "Regard: what is taught about attention, put to the test",
        f"""{_contents(grouped)}
<main>
<h1>What is taught about attention, put to the test</h1>
<p class="lead">{len(results)} experiments about what course documents say of attention,
Transformers and ViT, {added} of them added beside it. Each verdict is computed from what was
measured.</p>
{SEARCH}
{_counts(results)}
{_glance(grouped)}
{"".join(_family(family, some) for family, some in grouped)}
{_stated()}
<footer>Computed in {seconds:.0f} s, {trained} of the experiments by training models, with five
seeds or more each. <code>regard lab NAME</code> runs one of them again.</footer>
</main>""",
    )


def html(title: str, body: str, style: str = "") -> str:
    """A page that fetches nothing; `body` has contents, main part and the box of `SEARCH`."""
    css = STYLE + (files("regard.lab") / "page.css").read_text(encoding="utf-8") + style
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{css}</style>
</head>
<body class="regard-lab">
<div class="page">
{body}
</div>
<script type="module">{(files("regard.lab") / "search.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


SEARCH = """<p class="search" role="search" hidden><label for="find">Search</label>
<input type="search" id="find" autocomplete="off" spellcheck="false" aria-describedby="found">
<span id="found" role="status"></span></p>"""
"""The box that filters a page; its script shows it."""


def fragment(result: Result) -> str:
    """One experiment for a notebook: its section, with its CSS."""
    return f'<div class="regard-lab"><style>{STYLE}</style>{section(result)}</div>'


def section(result: Result) -> str:
    """One experiment: what is taught, what was computed, the results, and what is true."""
    experiment, finding = result.experiment, result.finding
    kind, mark = CLASSES[finding.verdict], MARKS[finding.verdict]
    equations = "".join(mathml(equation) for equation in experiment.equations)
    shown = [table(numbers) for numbers in finding.tables] + [_plot(plot) for plot in finding.plots]
    return f"""<article id="{escape(experiment.name)}" class="{kind}">
<header><h3><a href="#{escape(experiment.name)}">{escape(experiment.name)}</a></h3>
<span class="where">item {experiment.item}, {escape(str(experiment.place))}</span>
<span class="chip">{mark} {finding.verdict}</span></header>
<dl class="words"><dt>{experiment.kind.capitalize()}</dt>
<dd class="taught">{words(experiment.taught)}</dd>
<dt>Computed</dt><dd>{words(experiment.method)}</dd></dl>
{f'<div class="equations">{equations}</div>' if equations else ""}
{f'<div class="figures">{"".join(shown)}</div>' if shown else ""}
<details{"" if shown else " open"}><summary>What the verdict rests on</summary>
{measurements(finding.measurements)}</details>
<div class="correct"><p><b>What is true.</b> {words(result.conclusion)}</p></div>
</article>
"""


def words(text: str) -> str:
    """Plain text as HTML: code between backticks, and indices such as d_k as subscripts."""
    parts = " ".join(text.split()).split("`")
    for place, part in enumerate(parts):
        part = escape(part)
        if place % 2:
            parts[place] = f"<code>{part}</code>"
        else:
            parts[place] = _INDEX.sub(r"<i>\1</i><sub>\2</sub>", part)
    return "".join(parts)


# An index is letters and digits; a power after it, as in d_v², is none of it.
_INDEX = re.compile(r"(?<![\w&])([A-Za-zα-ωΑ-Ω])_([A-Za-z0-9]{1,3})(?![A-Za-z0-9_])")


def _contents(grouped: Sequence[tuple[Family, Sequence[Result]]]) -> str:
    entries = "".join(
        f'<li><a class="group" href="#{family.name}">{escape(family.title)}</a><ol>'
        + "".join(map(_entry, some))
        + "</ol></li>"
        for family, some in grouped
    )
    return (
        '<nav><input type="checkbox" id="contents"><label for="contents">Contents</label>'
        f'<p class="brand">Regard <span>lab</span></p><ol>{entries}'
        '<li><a class="group" href="#stated">Stated, not computed</a></li></ol></nav>'
    )


def _entry(result: Result) -> str:
    kind, mark = CLASSES[result.finding.verdict], MARKS[result.finding.verdict]
    name = escape(result.experiment.name)
    return (
        f'<li class="{kind}"><a href="#{name}"><span class="mark" aria-hidden="true">{mark}</span>'
        f"{name}</a></li>"
    )


def _counts(results: Sequence[Result]) -> str:
    """The number of each verdict, as a bar and as buttons that filter the page."""
    counts = Counter(result.finding.verdict for result in results)
    bar = "".join(
        f'<span class="{kind}" style="flex:{counts[verdict]}"></span>'
        for verdict, kind in CLASSES.items()
        if counts[verdict]
    )
    buttons = "".join(
        f'<label class="{kind}"><input type="radio" name="only" id="only-{kind}">'
        f"<b>{counts[verdict]}</b> {verdict}</label>"
        for verdict, kind in CLASSES.items()
        if counts[verdict]
    )
    return (
        f'<div class="bar" aria-hidden="true">{bar}</div><div class="counts">'
        '<label><input type="radio" name="only" id="only-all" checked>'
        f"<b>{len(results)}</b> all</label>{buttons}</div>"
    )


def _glance(grouped: Sequence[tuple[Family, Sequence[Result]]]) -> str:
    """The number of each verdict in each family."""
    present = [v for v in CLASSES if any(r.finding.verdict == v for _, s in grouped for r in s)]
    head = "".join(
        f'<th class="n {CLASSES[verdict]}"><span class="chip" title="{verdict}">'
        f"{MARKS[verdict]}</span></th>"
        for verdict in present
    )

    def cells(results: Sequence[Result]) -> str:
        counts = Counter(result.finding.verdict for result in results)
        numbers = "".join(
            f'<td class="n">{counts[v]}</td>' if counts[v] else '<td class="n zero">0</td>'
            for v in present
        )
        return f'{numbers}<td class="n">{len(results)}</td>'

    rows = "".join(
        f'<tr><td><a href="#{family.name}" style="color:inherit">{escape(family.title)}</a></td>'
        f"{cells(some)}</tr>"
        for family, some in grouped
    )
    total = cells([result for _, some in grouped for result in some])
    return (
        f'<div class="glance scroll"><table><thead><tr><th>about</th>{head}<th class="n">all</th>'
        f"</tr></thead><tbody>{rows}</tbody><tfoot><tr><td>together</td>{total}</tr></tfoot>"
        "</table></div>"
    )


def _family(family: Family, results: Sequence[Result]) -> str:
    sections = "".join(section(result) for result in results)
    return (
        f'<h2 id="{family.name}">{escape(family.title)}</h2><p>{escape(family.about)}</p>{sections}'
    )


def _stated() -> str:
    rows = "".join(
        f"<tr><td>{entry.item}</td><td>{_part(entry)}{words(entry.words)} "
        f'<span class="where">{escape(str(entry.place))}</span></td>'
        f'<td class="{CLASSES[entry.verdict]}"><span class="chip">{MARKS[entry.verdict]} '
        f"{entry.verdict}</span><br>{words(entry.source)}</td></tr>"
        for entry in STATED
    )
    return (
        '<h2 id="stated">Stated, not computed</h2><p>Items, and parts of items, that tell '
        "history or give an opinion, and what settles them.</p>"
        '<div class="stated"><table><thead><tr>'
        f"<th>item</th><th>what is said</th><th>what settles it</th></tr></thead><tbody>{rows}"
        "</tbody></table></div>"
    )


def _part(entry: Stated) -> str:
    return f'<span class="where">{escape(entry.part)}:</span> ' if entry.part else ""


def table(numbers: Table) -> str:
    """A table of numbers, aligned in columns."""
    aligned = columns(numbers)
    kinds = [' class="n"' if right else "" for _, right, _ in aligned]
    head = "".join(f"<th{kind}>{words(name)}</th>" for kind, name in zip(kinds, numbers.head))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{words(cell)}</td>" for kind, cell in zip(kinds, row))
        + "</tr>"
        for row in zip(*(cells for _, _, cells in aligned))
    )
    title = f"<figcaption>{words(numbers.title)}</figcaption>" if numbers.title else ""
    return (
        f'<figure>{title}<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></figure>"
    )


def measurements(measured: Mapping[str, Measured]) -> str:
    """Measured values by name."""
    rows = "".join(
        f"<tr><td>{words(name)}</td><td>{escape(figure(value))}</td></tr>"
        for name, value in measured.items()
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'


def _plot(plot: Plot) -> str:
    return (
        f'<figure class="drawn"><figcaption>{words(plot.title)}</figcaption>'
        f"{chart.svg(plot)}</figure>"
    )


def write_plots(path: Path, plots: Sequence[Plot]) -> str:
    """Writes plots as one SVG file, atomically, and says so."""
    atomic.write(path, chart.drawing(plots, STYLE))
    return f"{path}: {len(plots)} plot{'s' * (len(plots) > 1)}"
