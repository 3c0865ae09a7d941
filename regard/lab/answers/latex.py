r"""Answers in LaTeX, to paste into a solution sheet.

    \usepackage{amsmath, amssymb, graphicx}

One \subsection* for each question; figures, which are made for a page, are left out.
"""

from collections.abc import Mapping, Sequence

from regard.lab.answers.answer import Demonstration, Erratum, Page
from regard.lab.answers.prose import latex
from regard.lab.answers.show import counted
from regard.lab.experiment import Measured, Table
from regard.lab.numbers import columns, figure
from regard.lab.place import TITLES, Document


def sheet(document: Document, pages: Sequence[Page], wrong: Sequence[Erratum]) -> str:
    """All answers, and the errata after them."""
    title = rf"\section*{{Answers: {TITLES[document]}}}"
    parts = ["% needs \\usepackage{amsmath, amssymb, graphicx}", title, *map(section, pages)]
    if wrong:
        parts.append(_errata(wrong))
    return "\n\n".join(parts) + "\n"


def section(one: Page) -> str:
    """One question, with everything that belongs to it."""
    answer = one.answer
    steps = "\n".join(f"{latex(step.words)}\n\\[ {step.equation} \\]" for step in answer.derivation)
    parts = [
        rf"\subsection*{{{latex(answer.place.section)}: {latex(answer.place.about)}}}",
        rf"\noindent\textit{{{latex(answer.question)}}}",
        rf"\noindent {latex(answer.answer)}",
        rf"\paragraph{{Derivation.}} {steps}",
        rf"\paragraph{{Measured.}} {_demonstration(one.shown)}",
    ]
    for mistake, run in zip(answer.mistakes, one.mistakes):
        parts.append(
            rf"\paragraph{{A wrong answer.}} \textit{{{latex(mistake.answer)}}} "
            f"{latex(mistake.why)} {_demonstration(run)}"
        )
    rows = "\n".join(rf"\item[{point.marks:g}] {latex(point.words)}" for point in answer.points)
    marks = rf"\paragraph{{Marking ({counted(answer.marks, 'point')}).}}"
    parts.append(f"{marks}\\begin{{description}}\n{rows}\n\\end{{description}}")
    return "\n\n".join(parts)


def _demonstration(run: Demonstration) -> str:
    parts = [_table(numbers) for numbers in run.tables]
    if run.measured:
        parts.append(_measured(run.measured))
    return "\n\n".join(parts)


def _table(numbers: Table) -> str:
    aligned = columns(numbers)
    kinds = "".join("r" if right else "l" for _, right, _ in aligned)
    head = " & ".join(_head(name) for name, _, _ in aligned)
    rows = [" & ".join(map(latex, row)) for row in zip(*(cells for _, _, cells in aligned))]
    body = " \\\\\n".join([head, r"\hline " + rows[0], *rows[1:]])
    return (
        f"\\begin{{center}}\\small {latex(numbers.title)}\n\n\\resizebox"
        "{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%\n"
        f"\\begin{{tabular}}{{{kinds}}}\n{body}\n\\end{{tabular}}}}\\end{{center}}"
    )


def _head(name: str) -> str:
    """A column's head, in two lines if it is long."""
    if len(name) < _LONG:
        return latex(name)
    words = name.split()
    half = next(n for n in range(1, len(words) + 1) if len(" ".join(words[:n])) >= len(name) / 2)
    lines = " ".join(words[:half]), " ".join(words[half:])
    return (
        rf"\begin{{tabular}}[b]{{@{{}}c@{{}}}}{latex(lines[0])}\\{latex(lines[1])}\end{{tabular}}"
    )


_LONG = 18


def _measured(measured: Mapping[str, Measured]) -> str:
    rows = "\n".join(
        rf"\item {latex(name)}: {latex(figure(value))}" for name, value in measured.items()
    )
    return f"\\begin{{itemize}}\n{rows}\n\\end{{itemize}}"


def _errata(wrong: Sequence[Erratum]) -> str:
    rows = "\n".join(
        rf"\item[{latex(erratum.place.section)}] \textit{{{latex(erratum.said)}}} "
        f"({erratum.verdict}) {latex(erratum.true)}"
        for erratum in wrong
    )
    return f"\\section*{{Errata}}\n\\begin{{description}}\n{rows}\n\\end{{description}}"
