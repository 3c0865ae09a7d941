"""Answers as an HTML page, one for each document, in the style of the lab's report."""

from collections.abc import Sequence
from html import escape

from regard.lab import report
from regard.lab.answers import figure
from regard.lab.answers.answer import Demonstration, Erratum, Mistake, Page
from regard.lab.answers.figure import Figure
from regard.lab.answers.prose import html
from regard.lab.answers.show import counted
from regard.lab.equation import mathml
from regard.lab.experiment import MARKS
from regard.lab.perform import Result
from regard.lab.place import TITLES, Document, Place
from regard.lab.report import CLASSES, words


def page(document: Document, pages: Sequence[Page], wrong: Sequence[Erratum]) -> str:
    """The whole page: contents, errata, and a section for each question."""
    title = f"Answers: {TITLES[document]}"
    runs = sum(1 + len(one.mistakes) for one in pages)
    marks = counted(sum(one.answer.marks for one in pages), "point")
    body = f"""{_contents(pages, bool(wrong))}
<main>
<h1>{escape(title)}</h1>
<p class="lead">{counted(len(pages), "answer")}, {marks}. {counted(runs, "demonstration")} ran while
this page was made; their numbers are what was measured.</p>
{report.SEARCH}
{_errata(wrong)}
<h2 id="answers">Answers</h2>
{"".join(map(section, pages))}
<footer><code>regard lab answers {document} PLACE</code> runs one of them again.</footer>
</main>"""
    return report.html(f"Regard: {title}", body, figure.STYLE)


def section(one: Page) -> str:
    """One question, with everything that belongs to it."""
    answer, place = one.answer, one.answer.place
    steps = "".join(
        f"<li>{html(step.words)}{mathml(step.equation)}</li>" for step in answer.derivation
    )
    marks = "".join(
        f'<tr><td class="n">{point.marks:g}</td><td>{html(point.words)}</td></tr>'
        for point in answer.points
    )
    mistakes = "".join(mistake(each, run) for each, run in zip(answer.mistakes, one.mistakes))
    return f"""<article id="{_id(place)}" class="{"holds" if one.stands else "wrong"}">
<header><h3><a href="#{_id(place)}">{escape(place.section)}</a></h3>
<span class="where">{escape(place.about)}</span>
<span class="chip">{counted(answer.marks, "point")}</span></header>
<p class="question">{html(answer.question)}</p>
<div class="correct"><p>{html(answer.answer)}</p></div>
<h4>Derivation</h4><ol class="steps">{steps}</ol>
<h4>Run</h4>{_demonstration(one.shown)}
{mistakes}
<h4>Marking</h4><div class="scroll"><table class="marks"><tbody>{marks}</tbody></table></div>
{_claims(one.results)}
</article>
"""


def _id(place: Place) -> str:
    return "".join(
        letter if letter.isalnum() or letter in ".-" else "_" for letter in place.section
    )


def mistake(mistake: Mistake, run: Demonstration) -> str:
    """A wrong answer, why it fails, and what came out when it was tried."""
    return f"""<section class="mistake"><h4>A wrong answer</h4>
<p class="said">{html(mistake.answer)}</p><p>{html(mistake.why)}</p>
{_demonstration(run)}</section>"""


def _demonstration(run: Demonstration) -> str:
    shown = [report.table(numbers) for numbers in run.tables]
    shown += [_figure(drawn) for drawn in run.figures]
    drawn = f'<div class="figures">{"".join(shown)}</div>' if shown else ""
    measured = report.measurements(run.measured) if run.measured else ""
    kind, verdict = ("holds", "✓ stands") if run.stands else ("wrong", "✗ fails")
    return (
        f'<div class="run {kind}">{drawn}<div class="measured">{measured}</div>'
        f'<span class="chip">{verdict}</span></div>'
    )


def _figure(drawn: Figure) -> str:
    return (
        f'<figure class="drawn"><figcaption>{words(drawn.title)}</figcaption>'
        f"{figure.svg(drawn)}</figure>"
    )


def _claims(results: Sequence[Result]) -> str:
    """The lab's verdicts on what the document says here."""
    if not results:
        return ""
    rows = "".join(
        f'<li class="{CLASSES[result.finding.verdict]}"><span class="chip">'
        f"{MARKS[result.finding.verdict]} {result.finding.verdict}</span> "
        f"{words(result.experiment.taught)}{_command(result)}</li>"
        for result in results
    )
    return (
        "<details><summary>What is said here, tested</summary>"
        f'<ul class="claims">{rows}</ul></details>'
    )


def _errata(wrong: Sequence[Erratum]) -> str:
    """What to correct in the document."""
    if not wrong:
        return ""
    rows = "".join(
        f'<tr class="{CLASSES[erratum.verdict]}"><td>{_where(erratum.place)}</td>'
        f'<td>{words(erratum.said)}</td><td><span class="chip">{MARKS[erratum.verdict]} '
        f"{erratum.verdict}</span> {words(erratum.true)}{_command(erratum.result)}</td></tr>"
        for erratum in wrong
    )
    return (
        '<h2 id="errata">Errata</h2><p>What is said in the document and does not hold as it '
        "stands, in our own words, and what is true.</p>"
        '<div class="errata"><table><thead><tr><th>place</th><th>what is said</th>'
        f"<th>what is true</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _command(result: Result | None) -> str:
    return f" <code>regard lab {escape(result.experiment.name)}</code>" if result else ""


def _where(place: Place) -> str:
    return f'<a href="#{_id(place)}">{escape(place.section)}</a>'


def _contents(pages: Sequence[Page], errata: bool) -> str:
    entries = "".join(
        f'<li class="{"holds" if one.stands else "wrong"}"><a href="#{_id(one.answer.place)}">'
        f'<span class="mark" aria-hidden="true">{"✓" if one.stands else "✗"}</span>'
        f"{escape(one.answer.place.section)}</a></li>"
        for one in pages
    )
    return (
        '<nav><input type="checkbox" id="contents"><label for="contents">Contents</label>'
        '<p class="brand">Regard <span>lab</span></p><ol>'
        + '<li><a class="group" href="#errata">Errata</a></li>' * errata
        + f'<li><a class="group" href="#answers">Answers</a><ol>{entries}</ol></li></ol></nav>'
    )
