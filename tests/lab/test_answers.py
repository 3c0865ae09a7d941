"""Answers: every question of the documents has one, its command runs, and what it says is true."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from regard.cli import main as cli
from regard.lab.answers import answers, errata, perform, places, prose, report, show
from regard.lab.answers.answer import Answer, Demonstration, Page
from regard.lab.answers.architecture import architecture
from regard.lab.answers.figure import Heat, svg, terminal
from regard.lab.answers.homework import temperature
from regard.lab.answers.plots import heat_map, moving_key
from regard.lab.claims import experiments
from regard.lab.claims.stated import STATED
from regard.lab.commands import answers as command
from regard.lab.perform import Result
from regard.lab.place import SECTIONS, Document, Place
from tests.lab.conftest import Results
from tests.lab.test_report import Reader

# As readers run them: with run-time checks, the demonstrations would take most of the suite's time.
pytestmark = pytest.mark.usefixtures("unchecked")

PLACES = [Place(document, section) for document in SECTIONS for section in SECTIONS[document]]
MARKS = {
    "1.1": (1, 2, 3, 3, 2, 2),
    "1.2": (1, 2),
    "1.3": (2, 2, 2, 2, 3),
    "1.4": (3, 3, 3, 3, 3),
    "1.5": (2, 2, 2, 2),
}
"""The points of the homework's questions, as they are printed."""


@pytest.fixture(autouse=True)
def _untrained(monkeypatch: pytest.MonkeyPatch, results: Results) -> None:
    """Experiments run once for all tests, and none trains: they have tests of their own."""

    def some(chosen: list[Place]) -> tuple[list[Result], list[object]]:
        wanted = [e for e in experiments() if e.place in chosen and not e.trained]
        return [results[experiment.name] for experiment in wanted], []

    monkeypatch.setattr(command, "_results", some)


def answered(place: Place) -> Answer:
    (found,) = (answer for answer in answers(place.document) if answer.place == place)
    return found


# Every question


@pytest.mark.parametrize("document", SECTIONS)
def test_every_section_has_one_answer(document: Document) -> None:
    assert [answer.place.section for answer in answers(document)] == list(SECTIONS[document])


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_command_answers(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, pages = answered(place), list[Page]()
    shown_by = show.page
    monkeypatch.setattr(
        show, "page", lambda one, console: (pages.append(one), shown_by(one, console))
    )
    # `exercises 2` also gives 2(a) and so on: one of them is looked at here.
    assert cli.main(["lab", "answers", place.document, place.section]) == 0
    for page in pages:
        assert page.answer.derivation
        assert page.answer.points
        assert all(run.measured or run.tables for run in (page.shown, *page.mistakes))
    said = " ".join(capsys.readouterr().out.split())
    assert str(place) in said
    for text in (answer.question, answer.answer, *(mistake.why for mistake in answer.mistakes)):
        assert " ".join(prose.plain(text).split()) in said
    shown = [answered(each) for each in places(place.document, [place.section])]
    assert said.count("✓ stands") == len(shown)
    assert said.count("✗ fails") == sum(len(each.mistakes) for each in shown) >= len(shown)
    for experiment in experiments():
        if experiment.place == place and not experiment.trained:
            assert f"regard lab {experiment.name}" in said


def test_the_homework_has_its_points() -> None:
    marks = {answer.place.section: answer.marks for answer in answers("homework")}
    printed = {
        f"{section}({letter})": number
        for section, numbers in MARKS.items()
        for letter, number in zip("abcdef", numbers)
    }
    assert marks == printed | {"2": 50}
    assert sum(marks.values()) == 100


# What makes a page fail


def test_a_broken_library_fails_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As if attention took no notice of β.
    whole = temperature.attend
    monkeypatch.setattr(temperature, "attend", lambda *tensors, beta=None: whole(*tensors))
    assert cli.main(["lab", "answers", "homework", "1.1c", "1.1d"]) == 1
    assert "do not agree: 1.1(c), 1.1(d)" in capsys.readouterr().out


def test_a_mistake_that_stands_fails_the_page() -> None:
    answer = answered(Place("sheet", "6-2(d)"))
    (mistake,) = answer.mistakes
    right = replace(mistake, run=lambda: Demonstration(True))
    assert perform(answer, []).stands
    assert not perform(replace(answer, mistakes=(right,)), []).stands


# Places


@pytest.mark.parametrize(
    ("document", "words", "sections"),
    [
        ("homework", ["1.1c"], ["1.1(c)"]),
        ("homework", ["1.1(C)"], ["1.1(c)"]),
        ("homework", ["1.2"], ["1.2(a)", "1.2(b)"]),
        ("homework", ["1.3b", "1.2a"], ["1.2(a)", "1.3(b)"]),
        ("homework", ["2"], ["2"]),
        ("sheet", ["6-2"], [f"6-2({letter})" for letter in "abcde"]),
        ("exercises", ["2"], ["2", "2(a)", "2(b)", "2(c)", "2(d)"]),
        ("handout", ["cost", "table"], ["cost table"]),
        ("handout", ["cost table"], ["cost table"]),
        ("handout", ["positional"], ["positional encoding"]),
        ("handout", ["rnns", "cnns"], ["RNNs", "CNNs"]),
        ("handout", ["take-away"], ["take-away: attention", "take-away: Transformers"]),
    ],
)
def test_places_by_what_one_types(
    document: Document, words: list[str], sections: list[str]
) -> None:
    assert [place.section for place in places(document, words)] == sections


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["homework", "1.6"], r"homework has no '1\.6'; choose from 1\.1a, 1\.1b"),
        (["handout", "colour"], r"handout has no 'colour'; choose from RNNs, CNNs"),
        (["book"], r"document \('book'\) is unknown; choose from exercises, slides"),
        (["--errata"], "--errata needs a document"),
        (["sheet", "--report", "no/such/folder/a.html"], "no folder .*no/such/folder; make it"),
        (["sheet", "--colour"], "--colour is unknown; see regard lab answers --help"),
    ],
)
def test_what_cannot_be_answered(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", "answers", *words]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_the_list_of_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "answers"]) == 0
    said = capsys.readouterr().out
    for place in PLACES:
        assert re.search(rf"^ +{re.escape(place.section)} .*{re.escape(place.about)}$", said, re.M)


# Errata


def test_errata_are_drawn_from_the_experiments(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", "answers", "homework", "--errata"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    wrong = 0
    for experiment in experiments():
        if experiment.place.document != "homework" or experiment.trained:
            continue
        result = results[experiment.name]
        listed = experiment.kind == "taught" and result.finding.verdict != "holds"
        assert (f"{result.finding.verdict} {experiment.name}" in said) == listed
        wrong += listed
    for entry in STATED:
        listed = entry.place.document == "homework" and entry.verdict != "holds"
        assert (entry.source in said) == listed
        wrong += listed
    assert f"{wrong} statements" in said
    assert wrong > 10
    assert "✓ stands" not in said


def test_errata_follow_the_document(results: Results) -> None:
    some = [results[name] for name in ("permutation", "preserving-a-value", "spreading")]
    right = replace(results["longer-key"], finding=replace(some[0].finding, verdict="holds"))
    ours = replace(some[1], experiment=replace(some[1].experiment, kind="added"))
    elsewhere = results["equivariance"]
    found = errata("homework", [*some, right, ours, elsewhere])
    assert [erratum.result.experiment.name for erratum in found if erratum.result] == [
        "preserving-a-value",
        "spreading",
        "permutation",
    ]
    sections = list(SECTIONS["homework"])
    order = [sections.index(erratum.place.section) for erratum in found]
    assert order == sorted(order)


# JSON


def test_json_has_texts_places_verdicts_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "answers", "exercises", "--json"]) == 0

    def refused(word: str) -> Any:
        raise AssertionError(word)

    said = json.loads(capsys.readouterr().out, parse_constant=refused)
    assert said["document"] == "exercises"
    assert [entry["place"]["section"] for entry in said["answers"]] == list(SECTIONS["exercises"])
    third = said["answers"][-1]
    assert third["demonstration"]["stands"] is True
    assert third["demonstration"]["measured"]["C"][0][0] == pytest.approx(0.860, abs=5e-4)
    assert [m["demonstration"]["stands"] for m in third["mistakes"]] == [False] * 3
    assert third["points"][0]["marks"] == 1
    assert {claim["name"] for claim in third["claims"]} >= {"exercise-3"}
    masked = said["answers"][5]["mistakes"][0]["demonstration"]["measured"]
    assert masked["first row of weights, with −∞ on the diagonal too"] == ["nan"] * 4
    for entry in said["errata"]:
        assert entry["verdict"] != "holds"
        assert entry["place"]["document"] == "exercises"
        assert entry["true"]


# The page


def test_the_report_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "answers.html"
    assert cli.main(["lab", "answers", "homework", "1.1", "1.3", "--report", str(path)]) == 0
    html = path.read_text()
    read = Reader(html)
    assert len(read.ids) == len(set(read.ids))
    assert {link for link in read.links if link.removeprefix("#") not in read.ids} == set()
    assert not re.search(r"<(link|img|iframe)|<script[^>]*src|@import|url\(", html)
    assert html.count("✗ fails") == sum(
        len(answered(place).mistakes) for place in places("homework", ["1.1", "1.3"])
    )
    assert "prefers-color-scheme: dark" in html
    assert "$" not in re.sub(r"<code>.*?</code>", "", html)


def test_formulas_of_every_answer_are_set() -> None:
    for place in PLACES:
        answer = answered(place)
        for step in answer.derivation:
            set_ = report.mathml(step.equation)
            ElementTree.fromstring(set_)
            assert "\\" not in set_, step.equation
        for text in texts(answer):
            assert text.count("$") % 2 == 0
            assert "\\" not in prose.html(text), text
            assert "$" not in prose.plain(text)


def texts(answer: Answer) -> list[str]:
    found = [answer.question, answer.answer, *(point.words for point in answer.points)]
    found += [step.words for step in answer.derivation]
    return found + [text for m in answer.mistakes for text in (m.answer, m.why)]


def test_spaces_stay_around_formulas() -> None:
    assert re.fullmatch(
        r"the width <math.*</math> of <math.*</math>, say", prose.html("the width $d$ of $q$, say")
    )


# Figures


def test_figures_are_drawn_for_page_and_terminal() -> None:
    for figure in (architecture(), heat_map(), moving_key()):
        ElementTree.fromstring(svg(figure))
        assert len(str(terminal(figure, 76)).splitlines()) > 10
        assert max(map(len, str(terminal(figure, 76)).splitlines())) < 80
    drawn = svg(architecture())
    for kind in ("self", "masked", "cross"):
        assert drawn.count(f'class="box {kind}"') == 1


def test_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "drawn.svg"
    assert cli.main(["lab", "answers", "sheet", "6-2b", "6-2c", "--plot", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: 2 figures\n"
    titles = ElementTree.parse(path).findall(".//{*}text[@class='title']")
    assert [title.text for title in titles] == [architecture().title, heat_map().title]
    assert cli.main(["lab", "answers", "sheet", "6-2d", "--plot", str(path)]) != 0
    assert "there is no figure in what was asked for" in capsys.readouterr().err


def test_a_heat_map_has_a_cell_for_each_number() -> None:
    heat = Heat("t", "x", "y", [[1.0, 0.0, -1.0], [0.5, -0.5, 0.0]])
    drawn = svg(heat)
    assert drawn.count("z") - drawn.count("z ") >= 4
    assert len(re.findall(r"M[\d.]+ [\d.]+h", drawn)) == 4  # zeros have no colour
    assert str(terminal(heat, 76)).splitlines()[1:3] == ["   0 █ ●", "   1 ▒∘ "]


def test_the_moving_key_stays_on_its_line() -> None:
    line, measured, _ = moving_key().curves
    (x0, x1), (y0, y1) = line.x, line.y
    for x, y in zip(measured.x, measured.y):
        share = (x - x0) / (x1 - x0)
        assert y == pytest.approx(y0 + share * (y1 - y0), abs=1e-12)
        assert -1e-12 <= share <= 1 + 1e-12
    shares = [(x - x0) / (x1 - x0) for x in measured.x]
    assert shares == sorted(shares)
    assert shares[-1] > 0.99


# LaTeX


def test_characters_become_commands() -> None:
    assert prose.latex("√d_k of `a_b`, β² & 50% → ∞") == (
        r"\ensuremath{\sqrt{d_{k}}} of \texttt{a\_b}, \ensuremath{\beta}\ensuremath{^{2}} \& 50\% "
        r"\ensuremath{\to} \ensuremath{\infty}"
    )
    assert prose.latex("x̃_n") == r"\ensuremath{\tilde{x} _{n}}"
    assert prose.latex(r"as $\beta \to 0$") == r"as $\beta \to 0$"
    assert prose.latex("2.2×10⁻¹⁶") == (
        r"2.2\ensuremath{\times}10\ensuremath{^{-}}\ensuremath{^{1}}\ensuremath{^{6}}"
    )


def test_every_text_is_in_characters_that_tex_knows(results: Results) -> None:
    for place in PLACES:
        for text in texts(answered(place)):
            assert prose.latex(text).isascii(), text
    for experiment in experiments():
        if not experiment.trained:
            for text in (experiment.taught, results[experiment.name].conclusion):
                assert re.fullmatch(r"[\x20-\u017f]*", prose.latex(text)), text


DOCUMENT = r"""\documentclass{article}
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\usepackage{amsmath, amssymb, graphicx}
\begin{document}
\input{answers.tex}
\end{document}
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="needs pdflatex (Debian: texlive-latex-recommended)"
)
@pytest.mark.parametrize("document", SECTIONS)
def test_the_solution_sheet_compiles(document: Document, tmp_path: Path) -> None:
    assert cli.main(["lab", "answers", document, "--latex", str(tmp_path / "answers.tex")]) == 0
    (tmp_path / "sheet.tex").write_text(DOCUMENT)
    made = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "sheet.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert made.returncode == 0, made.stdout[-2000:]
    assert (tmp_path / "sheet.pdf").exists()
