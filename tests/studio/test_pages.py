"""Every page in a real browser: numbers from the page, the keyboard, narrow and dark, and axe.

What models answer is tested on small ones that are trained here, so `make test-all` runs these.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.studio.ask import questions
from regard.studio.runs import Runs
from regard.studio.server import PAGES, Server
from tests.studio.conftest import Open, serving
from tests.studio.golden import golden
from tests.studio.test_input import assert_sliders_follow_the_mouse, compose, held
from tests.studio.test_smoke import cells

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five small models: dates, digits, strips of digits, a text, and texts in two classes."""
    place = tmp_path_factory.mktemp("runs")
    actors, places = ("dog", "cat", "man", "child"), ("beach", "street", "grass", "hill")
    lines = [f"The {who} runs on the {where}." for who in actors for where in places]
    text, texts = place / "text.txt", place / "texts.tsv"
    text.write_text("\n".join(lines * 40), encoding="utf-8")
    labelled = [
        f"{'animal' if line.split()[1] in actors[:2] else 'human'}\t{line}" for line in lines
    ]
    texts.write_text("\n".join(labelled * 10), encoding="utf-8")
    trained: tuple[tuple[str, str, int, list[str]], ...] = (
        ("dates", "dates", 450, []),
        ("classify", "digits", 150, []),
        ("read", "strips", 60, []),
        ("language", "text", 60, ["--text", str(text), "--cache", str(place / "cache")]),
        ("label", "texts", 40, ["--texts", str(texts), "--valid", str(texts)]),
    )
    for task, name, steps, more in trained:
        words = ["train", task, str(place / name), "--training.steps", str(steps), *more]
        command = [sys.executable, "-m", "regard", *words, "--training.evaluate-every", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    return [place / name for _, name, _, _ in trained]


@pytest.fixture(scope="session")
def studio(runs: list[Path]) -> Iterator[Server]:
    with serving(runs) as server:
        yield server


def fact(page: Any, name: str) -> str:
    text: str = page.inner_text(f"[data-fact='{name}']")
    return text


def settled(page: Any) -> None:
    page.wait_for_timeout(350)
    # A page's policy allows no expression to be polled.
    page.wait_for_selector("[aria-busy=true], .busy", state="detached")


# All pages


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_overflows_on_a_phone(
    studio: Server, open_page: Open, name: str, dark: bool
) -> None:
    page = open_page(studio, name, width=360, height=740, dark=dark)
    settled(page)
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360, f"{name} is {wide} pixels wide"
    page.click("button.menu")
    assert page.get_attribute("button.menu", "aria-expanded") == "true"
    page.click("#pages a[href='#cost']")
    page.wait_for_selector("body[data-ready=cost]")


@pytest.mark.parametrize("name", PAGES)
def test_pages_fill_a_large_screen(studio: Server, open_page: Open, name: str) -> None:
    page = open_page(studio, name, width=3840, height=2160)
    assert page.evaluate("document.documentElement.scrollWidth") <= 3840
    assert page.evaluate("document.querySelector('main').getBoundingClientRect().width") > 3000


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("axe needs npm: apt install npm")
    place = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        [npm, "install", "--silent", "--no-save", "--prefix", str(place), "axe-core@4"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = place / "node_modules" / "axe-core" / "axe.min.js"
    if not found.is_file():
        pytest.skip(f"npm cannot fetch axe-core here: {done.stderr[-200:]}")
    return found.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(
    studio: Server, open_page: Open, axe: str, name: str, dark: bool
) -> None:
    page = open_page(studio, name, dark=dark)
    settled(page)
    assert serious(page, axe) == []
    if page.query_selector("[data-key=effects]"):
        page.click("[data-key=effects]")
        page.wait_for_selector("[data-key=effects]", state="detached")
        for summary in page.locator("main summary").all():
            summary.click()
        assert serious(page, axe) == []


def serious(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def test_the_first_page_is_painted_within_a_second(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "byhand")
    page.wait_for_timeout(200)
    script = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert page.evaluate(script) < 1000


def test_numbers_in_the_page_equal_pythons(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "byhand")
    compare = (Path(__file__).parent / "compare.js").read_text(encoding="utf-8")
    script = compare.replace("export function", "function")
    found = page.evaluate(
        f"""async (golden) => {{
            {script}
            const [core, view, byhand] = await Promise.all(
                ["/core.js", "/view.js", "/byhand.js"].map((name) => import(name)));
            return compare(core, view, golden, byhand.PRESETS);
        }}""",
        golden(),
    )
    assert found["wrong"] == []
    assert found["checked"] > 3000


CONTROLS = (
    *("masks?a=window&b=padding", "geometry?noise=1", "as?as=permutation"),
    *("translate?layer=0&head=0", "text?run=text&layer=0&head=0"),
    *("vision?layer=0&head=0", "read?layer=0&head=0"),
)
"""Addresses at which pages have more sliders than at first."""


@pytest.mark.parametrize("address", [*PAGES, *CONTROLS])
def test_every_slider_follows_the_mouse(studio: Server, open_page: Open, address: str) -> None:
    page = open_page(studio, address)
    settled(page)
    count = assert_sliders_follow_the_mouse(page)
    assert count or address in PAGES


# Toy pages


def test_by_hand_explains_any_cell(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "byhand")
    page.focus("[data-key='Weights-0-0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.inner_text(".arithmetic") == "0.493 / (1.000 + 0.493 + 0.243) = 0.284"
    before = cells(page, "output")
    page.click("text=Shuffle keys and values together")
    assert cells(page, "output") == before
    assert cells(page, "weights") != [["0.576", "0.284", "0.140"], ["0.882", "0.106", "0.013"]]
    address = page.url
    page.reload()
    page.wait_for_selector("body[data-ready=byhand]")
    assert page.url == address
    assert cells(page, "output") == before


def test_by_hand_goes_step_by_step(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "byhand")
    page.click("[data-key=step]")
    assert page.locator(".stages > li").count() == 1
    page.keyboard.press("Enter")  # the button keeps the focus
    assert page.locator(".stages > li").count() == 2
    page.click("text=All steps")
    assert page.locator(".stages > li").count() == 5


def test_by_hand_masks_and_projects(toys: Server, open_page: Open) -> None:
    page = open_page(
        toys,
        "byhand?preset=words&q=1+0+0%3B+0+1+0%3B+1+1+0&k=1+0+0%3B+0+1+0%3B+1+1+0&v=1+0%3B+0+1%3B+1+1",
    )
    page.select_option("[data-key=mask]", "causal")
    weights = cells(page, "weights")
    assert weights[0] == ["1.000", "0.000", "0.000"]
    assert weights[1][2] == "0.000"
    page.select_option("[data-key=preset]", "projected")
    # X = 1 0 1; 0 2 0; 1 1 1 and W_Q = 1 0; 0 1; 1 0 make q = 2 0; 0 2; 2 1.
    query = page.eval_on_selector_all(
        "table[data-matrix='Q = X W_Q'] tbody tr",
        "rows => rows.map((row) => [...row.cells].map((cell) => Number(cell.innerText)))",
    )
    assert query == [[2, 0], [0, 2], [2, 1]]
    page.fill("[data-key=wk]", "1 2 3; 4 5")
    assert "rows have 3 and 2 numbers" in page.inner_text("[role=alert]")


def test_a_moved_key_slides_the_output_along_its_line(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "geometry?mx=0&my=0")
    assert fact(page, "gap") == "0.000"
    page.focus("[data-key='key-0']")
    for _ in range(12):
        page.keyboard.press("ArrowUp")
    assert fact(page, "delta") == "0.360"  # 12 steps of 0.05, times the query's 0.6
    assert fact(page, "weight") == fact(page, "formula")
    assert float(fact(page, "line").replace("−", "-")) < 1e-9
    assert float(fact(page, "gap")) > 0
    box = page.locator("[data-key='key-1']").bounding_box()
    page.mouse.move(box["x"] + 8, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 30)
    page.mouse.up()
    assert "j=1" in page.url


@pytest.mark.parametrize(
    ("kind", "beta", "most"),
    [
        ("identity", 30, 1e-9),
        ("permutation", 30, 1e-9),
        ("mean", 3, 1e-12),
        ("pointwise", 30, 1e-9),
        ("convolution", 30, 1e-9),
        ("dictionary", 30, 1e-9),
    ],
)
def test_attention_as_other_operations(
    toys: Server, open_page: Open, kind: str, beta: int, most: float
) -> None:
    page = open_page(toys, f"as?as={kind}&beta={beta}")
    assert float(fact(page, "error").split()[-1].replace("−", "-")) < most
    if kind != "mean":
        page = open_page(toys, f"as?as={kind}&beta=1")
        assert float(fact(page, "error").split()[-1]) > 0.01


def test_positions_make_order(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "positions")
    words = fact(page, "order").replace("−", "-").split()
    assert float(words[1]) < 1e-12
    assert float(words[4]) > 0.01


def test_masks_say_which_backend_runs(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "masks")
    settled(page)
    assert fact(page, "mask") == "causal()"
    assert "kernel flag" in fact(page, "reason")
    page.select_option("[data-key=b]", "padding")
    page.wait_for_selector("[data-fact=mask]:has-text('padding')")
    assert fact(page, "mask") == "causal() & padding([6])"
    page.click("[data-key='cell-0-7']")
    page.wait_for_selector("[data-key='cell-0-7'][aria-pressed=true]")
    assert "padding" not in fact(page, "mask")
    page.click("[data-key='box-1']")
    assert fact(page, "parameters").startswith("1,050,624 × 6")


def test_costs_cross_where_python_says(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "cost")
    settled(page)
    assert fact(page, "cross-0-2") == "n > 512"
    assert fact(page, "cross-4-8") == "n > 1,024"
    assert fact(page, "cross-4-2") == "always"
    from regard.model.transformer import Transformer

    with torch.device("meta"):
        base = Transformer.base(37_000)
    count = sum(parameter.numel() for parameter in base.parameters())
    assert fact(page, "parameters-base") == f"{count:,}"


def test_toy_pages_answer_within_50_ms(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "byhand")
    for name, key in (("byhand", "beta"), ("geometry", "stretch"), ("as", "beta"), ("cost", "d")):
        page.goto(f"{toys.address}#{name}")
        page.wait_for_selector(f"body[data-ready={name}] [data-key={key}]")
        took = page.evaluate(
            """async (key) => {
                const times = [];
                for (let n = 0; n < 15; n++) {
                    const input = document.querySelector(`[data-key="${key}"]`);
                    input.value = Number(input.value) + Number(input.step);
                    const begin = performance.now();
                    input.dispatchEvent(new Event("input", { bubbles: true }));
                    await new Promise((done) => setTimeout(done));
                    times.push(performance.now() - begin);
                }
                return Math.min(...times);
            }""",
            key,
        )
        assert took < 50, f"{name} took {took:.0f} ms"


def test_the_course_runs_answers_and_mistakes(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "course")
    page.click("[data-key='run-3']")
    page.wait_for_selector("[data-fact=verdict]")
    assert fact(page, "verdict") == "✓ stands"
    page.click("[data-key='wrong-3'] summary")
    page.click("[data-key='try-3-0']")
    page.wait_for_selector(".mistake .chip")
    assert "fails" in page.inner_text(".mistake .chip")


# Models


def test_without_a_run_the_command_is_offered(toys: Server, open_page: Open) -> None:
    for name, command in (
        ("translate", "demo dates"),
        ("vision", "demo digits"),
        ("read", "demo read"),
        ("text", "train language"),
    ):
        page = open_page(toys, name)
        assert f"regard {command}" in page.inner_text("main")


def test_the_best_head_off_changes_the_output(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "translate?text=4.+M%C3%A4rz+1983")
    settled(page)
    before, likely = fact(page, "output"), log_p(page)
    page.click("[data-key=effects]")
    page.wait_for_selector(".effect")
    settled(page)
    # The head that aligns best is chosen now, and named below the alignment.
    layer, head = re.findall(r"layer (\d+), head (\d+)", page.inner_text(".one h2").lower())[0]
    assert f"head {head} of layer {layer}, which aligns best" in page.inner_text("main")
    page.click("[data-key=head-off]")
    settled(page)
    assert log_p(page) < likely - 0.01
    # Other heads of its layer look at the same: without all of them the date is another one.
    for other in range(4):
        if other != int(head) - 1:
            page.click(f"[data-key='head-{int(layer) - 1}-{other}']")
            page.click("[data-key=head-off]")
            settled(page)
    assert fact(page, "output") != before
    page.click("text=Undo all")
    settled(page)
    assert fact(page, "output") == before


def log_p(page: Any) -> float:
    found = re.search(r"log p (?:of the text )?(\S+)", page.inner_text(".before"))
    assert found
    return float(found[1].rstrip(",;.").replace("−", "-"))


def test_text_is_composed_while_answers_arrive(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "translate?text=1990")
    settled(page)
    page.focus("[data-key=text]")
    page.keyboard.press("End")
    compose(page, ("n", "ne", "nen", "年"), pause=lambda: settled(page))
    assert page.input_value("[data-key=text]") == "1990年"
    page.keyboard.press("Control+z")
    settled(page)
    assert page.input_value("[data-key=text]") == "1990"
    assert page.url.endswith("text=1990")


def test_a_late_translation_does_not_paint_over_another_page(
    studio: Server, open_page: Open
) -> None:
    page = open_page(studio, "translate?text=1990")
    settled(page)
    with held(studio, {"translate": studio.asks["translate"]}) as release:
        page.fill("[data-key=text]", "1991")
        page.wait_for_timeout(350)
        page.click("#pages a[href='#byhand']")
        page.wait_for_selector("body[data-ready=byhand] table[data-step=scores]")
        release.set()
        page.wait_for_timeout(600)
    assert page.inner_text("main h1") == "Attention by hand"
    page.fill("[data-key=q]", "1 2")
    assert "#byhand?" in page.url


def test_a_newer_question_makes_an_older_answer_obsolete(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "masks")
    settled(page)
    with held(studio, {"architecture": studio.asks["architecture"]}) as release:
        page.select_option("[data-key=model]", "big")
        page.wait_for_timeout(100)
        page.select_option("[data-key=model]", "tiny")
        release.set()
    settled(page)
    page.click("[data-key='box-1']")
    assert "width 512" not in page.inner_text("main")
    tiny = questions(Runs([], Path("no-such-folder")))["architecture"]({"model": "tiny"})
    assert f"width {tiny['width']}, {tiny['heads']} heads" in page.inner_text("main")


def test_drawing_goes_on_while_an_answer_arrives(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "vision")
    settled(page)
    with held(studio, {"classify": studio.asks["classify"]}) as release:
        page.click("[data-key='sample-3']")
        page.wait_for_timeout(100)
        box = page.locator("canvas.draw").bounding_box()
        x, y, height = box["x"] + box["width"] / 2, box["y"], box["height"]
        page.mouse.move(x, y + 0.1 * height)
        page.mouse.down()
        page.mouse.move(x, y + 0.4 * height, steps=4)
        release.set()
        settled(page)
        page.mouse.move(x, y + 0.9 * height, steps=4)
        page.mouse.up()
    settled(page)
    drawn = re.findall("drawn=([0-9a-f]{64})", page.url)[0]
    rows = [drawn[8 * n : 8 * n + 8] for n in range(8)]
    assert all(set(row) != {"0"} for row in rows)


def test_a_patch_that_is_not_there_is_refused(runs: list[Path]) -> None:
    asks = questions(Runs(runs, Path("no-such-folder")))
    image = asks["samples"]({"kind": "digit"})[0]
    for place in (16, 1 << 20):
        with pytest.raises(ValueError, match=rf"hidden \({place}\) must be a patch, from 0 to"):
            asks["classify"]({"run": "digits", "image": image, "hidden": [place]})


def test_words_are_hidden_and_forced(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "translate?text=4.+M%C3%A4rz+1983")
    settled(page)
    before = fact(page, "output")
    for place in range(8, 12):  # 1983
        page.click(f"[data-key='word-{place}']")
        settled(page)
    assert fact(page, "output") != before
    page.click("text=Undo all")
    settled(page)
    page.click("summary:has-text('might have been written')")
    others = page.locator("[data-key^='force-0-']").all()
    tokens = [one.inner_text().split()[0] for one in others]
    # A sign such as the start of a text is not in the text.
    place = next(n for n, token in enumerate(tokens) if n and token.isalnum())
    token = tokens[place]
    others[place].click()
    settled(page)
    assert fact(page, "output").startswith(token)


def test_every_hypothesis_has_its_own_attention(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "translate?text=4.+M%C3%A4rz+1983")
    settled(page)
    second = page.locator("tr:has([data-key='hypothesis-1']) th").inner_text()
    page.click("[data-key='hypothesis-1']")
    settled(page)
    assert fact(page, "output").startswith(second)


def test_a_real_head_by_hand_has_the_models_weights(
    studio: Server, runs: list[Path], open_page: Open
) -> None:
    page = open_page(studio, "translate?text=4.+M%C3%A4rz+1983&map=cross&layer=0&head=2")
    settled(page)
    page.click("[data-key=to-byhand]")
    page.wait_for_selector("table[data-step=weights]")
    asks = questions(Runs(runs, Path("no-such-folder")))
    asked = {
        "run": "dates",
        "text": "4. März 1983",
        "attention": "decoder.blocks.0.cross",
        "head": 2,
    }
    expected = asks["head"](asked)["weights"]
    shown = [[float(x.replace("−", "-")) for x in row] for row in cells(page, "weights")]
    for row, numbers in zip(shown, expected, strict=True):
        assert row == pytest.approx(numbers, abs=6e-4)


def test_a_language_model_answers_again(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "text?run=text&text=The+dog+runs+on+the")
    settled(page)
    before, likely = fact(page, "output"), log_p(page)
    assert page.inner_text("[data-key='next-0']") in ("beach", "street", "grass", "hill")
    for place in range(3):  # nobody may attend to the start, nor to what follows it
        page.click(f"[data-key='word-{place}']")
        settled(page)
    assert "hidden=0%2C1%2C2" in page.url
    assert log_p(page) != likely
    page.click("text=Undo all")
    settled(page)
    for head in range(4):
        page.click(f"[data-key='head-3-{head}']")
        page.click("[data-key=head-off]")
        settled(page)
    assert log_p(page) != likely
    address, changed = page.url, (fact(page, "output"), log_p(page))
    page.reload()
    page.wait_for_selector("[data-fact=output]")
    settled(page)
    assert (page.url, (fact(page, "output"), log_p(page))) == (address, changed)
    page.click("text=Undo all")
    settled(page)
    assert (fact(page, "output"), log_p(page)) == (before, likely)
    word = page.inner_text("[data-key='next-0']")
    page.click("[data-key='next-0']")
    settled(page)
    assert page.input_value("[data-key=text]") == f"The dog runs on the {word}"


def test_rows_are_chosen_by_the_keyboard(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "text?run=text&text=The+dog+runs")
    settled(page)
    page.focus("[data-key=heat]")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".one .bars")
    page.keyboard.press("ArrowDown")
    assert "row=1" in page.url
    page.keyboard.press("ArrowUp")
    assert "row=0" in page.url


def test_a_texts_label_and_what_its_words_do(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "text?run=texts&text=The+dog+runs+on+the+beach.")
    settled(page)
    assert fact(page, "output") == "animal"
    page.click("[data-key=effects]")
    page.wait_for_selector(".effect")
    rows = page.eval_on_selector_all(
        ".effect .bars tr", "rows => rows.map((row) => row.innerText.split('\\t'))"
    )
    assert rows[0][0] == "dog"  # the word that tells
    before = page.inner_text(".bars")
    page.click("[data-key='word-1']")
    settled(page)
    assert page.inner_text(".bars") != before
    assert "Without changes: animal" in page.inner_text(".before")


def test_a_language_models_head_by_hand_keeps_its_changes(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "text?run=text&text=The+dog+runs&hidden=2&layer=0&head=1")
    settled(page)
    page.click("[data-key=to-byhand]")
    page.wait_for_selector("table[data-step=weights]")
    weights = cells(page, "weights")
    assert {row[2] for row in weights} == {"0.000"}
    assert all(float(row[0]) > 0 for row in weights)


TIMED = """
import json, sys, time
from pathlib import Path
from regard.studio.ask import questions
from regard.studio.runs import Runs
ask = questions(Runs([Path(sys.argv[1])], Path("no-such-folder")))["translate"]
question = {"run": "dates", "text": "4. März 1983", "beams": 4}
times = []
for _ in range(25):
    begin = time.perf_counter()
    json.dumps(ask(question))
    times.append(time.perf_counter() - begin)
print(min(times))
"""


def test_a_demo_model_answers_within_300_ms(runs: list[Path]) -> None:
    """In a process of its own, in which nobody checks types."""
    command = [sys.executable, "-c", TIMED, str(runs[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3


def test_vision_hides_patches(studio: Server, open_page: Open) -> None:
    page = open_page(studio, "vision")
    settled(page)
    before = page.inner_text(".bars")
    assert fact(page, "label") in "0123456789"
    page.check("[data-key=hiding]")
    page.locator(".overlay[aria-label='Click a patch to hide it'] .patch").first.click()
    settled(page)
    assert page.inner_text(".bars") != before
    page.click("[data-key='sample-7']")
    settled(page)
    page.click("[data-key=effects]")
    page.wait_for_selector("text=What hiding each patch does")


@pytest.mark.parametrize("by", ["mouse", "keyboard"])
@pytest.mark.parametrize(("name", "what"), [("vision", "label"), ("read", "text")])
def test_what_is_drawn_is_read(
    studio: Server, open_page: Open, name: str, what: str, by: str
) -> None:
    page = open_page(studio, name)
    settled(page)
    board = page.locator("canvas.draw")
    if by == "keyboard":
        board.focus()
        for key in ("ArrowUp", "ArrowUp", *["Shift+ArrowDown"] * 4, "Space", "Enter"):
            page.keyboard.press(key)
    else:
        box = board.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 15)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] - 15, steps=8)
        page.mouse.up()
    settled(page)
    if by == "keyboard":
        assert board.evaluate("canvas => canvas === document.activeElement")
    assert "drawn=" in page.url
    assert fact(page, what)
    address = page.url
    page.goto("about:blank")
    page = open_page(studio, address.partition("#")[2])
    settled(page)
    assert page.url == address


def test_training_is_shown_while_it_grows(
    studio: Server, runs: list[Path], open_page: Open
) -> None:
    page = open_page(studio, "training?runs=dates,digits")
    page.wait_for_selector("[data-fact='step-digits']")
    assert fact(page, "step-dates") == "450"
    path = runs[0] / "metrics.jsonl"
    before = path.read_bytes()
    try:
        with path.open("ab") as file:
            file.write(b'{"step": 460, "loss": 0.5, "seconds": 99.0}\n')
        page.wait_for_selector("[data-fact=step-dates]:has-text('460')")
        assert "training" in page.inner_text("tr:has([data-fact=step-dates])")
    finally:
        path.write_bytes(before)
