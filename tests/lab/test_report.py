"""The page: whole, by itself, and the same in a notebook."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from regard.lab.chart import drawing, svg
from regard.lab.claims import experiments
from regard.lab.claims.stated import STATED
from regard.lab.equation import mathml
from regard.lab.experiment import Curve, Finding, Plot
from regard.lab.perform import Result
from regard.lab.report import STYLE, page, section, words
from tests.processes import HANG

ALONE = {"meta", "br", "input"}
"""Elements without an end."""

NAMES = ("exercise-1", "equivariance", "position-kernel")


class Reader(HTMLParser):
    """Checks that elements are nested, and keeps names and links."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        if tag not in ALONE:
            self.open.append(tag)
        values = dict(given)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        assert "src" not in values

    def handle_startendtag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html(results: dict[str, Result]) -> str:
    return page([results[name] for name in NAMES], 12.0)


def test_the_page_is_well_formed(html: str) -> None:
    read = Reader(html)
    assert len(read.ids) == len(set(read.ids))
    assert {link for link in read.links if link.removeprefix("#") not in read.ids} == set()
    assert set(NAMES) <= set(read.ids)


def test_the_page_fetches_nothing(html: str) -> None:
    assert not re.search(r"<(link|img|iframe)|<script[^>]*src|@import|url\(", html)
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
    }


def test_the_page_has_both_schemes_and_both_widths(html: str) -> None:
    assert "prefers-color-scheme: dark" in html
    assert "max-width: 60rem" in html
    assert 'name="viewport"' in html


def test_the_page_says_everything(html: str, results: dict[str, Result]) -> None:
    for name in NAMES:
        assert words(results[name].experiment.taught) in html
        assert words(results[name].conclusion) in html
    assert all(words(entry.words) in html for entry in STATED)
    assert "<b>2</b> wrong as stated" in html


def test_a_notebook_shows_the_same_section(html: str, results: dict[str, Result]) -> None:
    for name in NAMES:
        shown = results[name]._repr_html_()
        Reader(shown)
        assert section(results[name]) in shown
        assert section(results[name]) in html
        assert STYLE in shown


def test_every_rule_of_the_style_keeps_to_the_lab() -> None:
    # A notebook has other cells, which a rule for all tables would change.
    bare = re.sub(r"/\*.*?\*/|@media[^{]*\{", "", STYLE, flags=re.DOTALL)
    for selectors in re.findall(r"([^{}]+)\{[^}]*\}", bare):
        assert all(".regard-lab" in one for one in selectors.split(",")), selectors


def test_words_are_safe_and_have_indices() -> None:
    assert words("a < b & d_k of `W_O <x>`") == (
        "a &lt; b &amp; <i>d</i><sub>k</sub> of <code>W_O &lt;x&gt;</code>"
    )
    assert words("in_channels") == "in_channels"
    assert words("L d_v²") == "L <i>d</i><sub>v</sub>²"


def test_names_are_escaped(results: dict[str, Result]) -> None:
    plot = Plot("<t>", "<x>", "<y>", ())
    odd = Finding("undecided", {"<b>": "<i>"}, plots=(plot,), conclusion="<p>")
    Reader(section(replace(results["exercise-1"], finding=odd)))


def test_every_equation_is_set() -> None:
    for experiment in experiments():
        for equation in experiment.equations:
            set_ = mathml(equation)
            ElementTree.fromstring(set_)
            assert "\\" not in set_, equation
            assert 'display="block"' in set_


@pytest.mark.parametrize("log", [False, True])
def test_a_drawing_is_svg(log: bool) -> None:
    curves = tuple(Curve(f"curve <{n}>", [1, 10, 100], [n + 1, 5.0, 2.5]) for n in range(7))
    plot = Plot("a < b", "x", "y", curves, log_x=log, log_y=log)
    root = ElementTree.fromstring(drawing([plot, plot], STYLE))
    assert len(root.findall(".//{*}path[@class='curve c0']")) == 2 * 2 * 2
    numbers = re.findall(r"[MLH ](-?[\d.]+)", svg(plot))
    assert all(-1 <= float(number) <= 600 for number in numbers)


# The search box

SEARCHED = """
const { JSDOM } = require("jsdom");
const html = require("fs").readFileSync("page.html", "utf8").replace('type="module"', "");
const { window } = new JSDOM(html, { runScripts: "dangerously" });
const { document } = window, box = document.getElementById("find");
const shown = (what) => [...document.querySelectorAll(what)].filter((one) => !one.hidden);
const state = () => ({
  articles: shown("article").map((one) => one.id), links: shown("nav li li").length,
  headings: shown("main h2").length, count: document.getElementById("found").textContent,
});
const key = (key) => document.dispatchEvent(new window.KeyboardEvent("keydown", { key }));
const typed = (text) => { box.value = text; box.dispatchEvent(new window.Event("input")); };
const states = [state()];
key("/");
for (const text of ["PERMUT", "colourless"]) { typed(text); states.push(state()); }
states.push({ hidden: box.closest("p").hidden, focused: document.activeElement === box });
key("Escape");
states.push(state());
console.log(JSON.stringify(states));
"""


@pytest.mark.slow
def test_the_search_box_filters(html: str, tmp_path: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs Node 20 or newer: https://nodejs.org")
    install = [npm, "install", "--silent", "--no-save", "--prefix", str(tmp_path), "jsdom@24"]
    subprocess.run(install, capture_output=True, timeout=HANG)
    if not (tmp_path / "node_modules" / "jsdom").is_dir():
        pytest.skip("npm cannot fetch jsdom here")
    (tmp_path / "page.html").write_text(html)
    (tmp_path / "run.js").write_text(SEARCHED)
    done = subprocess.run([node, "run.js"], cwd=tmp_path, capture_output=True, timeout=HANG)
    whole, some, none, box, cleared = json.loads(done.stdout)
    assert set(whole["articles"]) == set(NAMES)
    assert 0 < len(some["articles"]) < len(NAMES)
    assert some["links"] == len(some["articles"])
    assert "equivariance" in some["articles"]
    assert (none["articles"], none["headings"]) == ([], 0)
    assert none["count"].startswith("0 of ")
    assert box == {"hidden": False, "focused": True}
    assert cleared == whole


def test_without_a_script_there_is_no_box(html: str) -> None:
    assert re.search(r'<p class="search" role="search" hidden><label for="find">', html)
