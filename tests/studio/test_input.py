"""Input by mouse, keyboard and input method in a real browser, and answers that arrive late."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.studio.server import PAGES, Ask, Server
from tests.studio.conftest import Open


def slider_keys(page: Any) -> list[str]:
    keys: list[str] = page.eval_on_selector_all(
        "main input[type=range]", "sliders => sliders.map((slider) => slider.dataset.key)"
    )
    return keys


def drag(page: Any, key: str) -> list[float]:
    """The values of a slider while the mouse drags it from its left end to its right."""
    slider = page.locator(f"input[data-key='{key}']")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 8, y)
    page.mouse.down()
    values = [float(slider.input_value())]
    for part in (0.3, 0.5, 0.7, 1.2):
        page.mouse.move(box["x"] + part * box["width"], y)
        page.wait_for_timeout(20)  # time for an answer to redraw the page under the mouse
        values.append(float(slider.input_value()))
    page.mouse.up()
    assert values[-1] == float(slider.get_attribute("max"))
    return values


def assert_sliders_follow_the_mouse(page: Any) -> int:
    keys = slider_keys(page)
    for key in keys:
        values = drag(page, key)
        assert values == sorted(set(values)), f"{key} went through {values}"
    return len(keys)


def test_sliders_follow_the_mouse(toys: Server, open_page: Open) -> None:
    assert assert_sliders_follow_the_mouse(open_page(toys, "geometry")) == 3


def compose(page: Any, texts: Sequence[str], pause: Callable[[], None] = lambda: None) -> None:
    """Composes a text by an input method, step by step, and enters the last one."""
    client = page.context.new_cdp_session(page)
    for text in texts:
        selection = {"selectionStart": len(text), "selectionEnd": len(text)}
        client.send("Input.imeSetComposition", {"text": text, **selection})
        pause()
    client.send("Input.insertText", {"text": texts[-1]})


def test_text_is_composed_undone_and_keeps_its_selection(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "positions?text=1990")
    page.focus("[data-key=text]")
    page.keyboard.press("End")
    compose(page, ("n", "ne", "nen", "年"))
    assert page.input_value("[data-key=text]") == "1990年"
    assert page.url.endswith("text=1990%E5%B9%B4")
    page.keyboard.press("Control+z")
    assert page.input_value("[data-key=text]") == "1990"
    assert page.url.endswith("text=1990")
    page.keyboard.press("Control+Shift+z")
    assert page.input_value("[data-key=text]") == "1990年"
    page.keyboard.press("Home")
    page.keyboard.type("in ")
    assert page.input_value("[data-key=text]") == "in 1990年"
    selection = "[document.activeElement.selectionStart, document.activeElement.selectionEnd]"
    assert page.evaluate(selection) == [3, 3]


@contextmanager
def held(server: Server, asks: Mapping[str, Ask]) -> Iterator[threading.Event]:
    """Lets these questions wait until the event is set, and ends when all of them are answered."""
    release, usual, waiting = threading.Event(), server.asks, threading.Semaphore(0)
    count = 0

    def hold(ask: Ask) -> Ask:
        def wait(question: Mapping[str, Any]) -> Any:
            nonlocal count
            count += 1
            try:
                release.wait(30)
                return ask(question)
            finally:
                waiting.release()

        return wait

    server.asks = {**usual, **{name: hold(ask) for name, ask in asks.items()}}
    try:
        yield release
    finally:
        release.set()
        server.asks = usual
        for _ in range(count):
            waiting.acquire(timeout=60)


def refuse(question: Mapping[str, Any]) -> Any:
    raise ValueError("too late")


def test_answers_to_a_page_that_was_left_are_dropped(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "byhand")
    for name in PAGES:
        if name in ("byhand", "geometry", "as", "positions"):  # which ask nothing
            continue
        with held(toys, dict.fromkeys(toys.asks, refuse)) as release:
            with page.expect_request("**/api/*"):
                page.click(f"#pages a[href='#{name}']")
            page.click("#pages a[href='#byhand']")
            page.wait_for_selector("body[data-ready=byhand] table[data-step=scores]")
            release.set()
        page.wait_for_timeout(30)
        assert page.inner_text("main h1") == "Attention by hand", name
        assert page.url.endswith("#byhand"), name
        assert page.inner_text("#pages a[aria-current]") == "By hand", name


def test_elements_and_their_state_outlive_an_update(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "byhand")
    script = (Path(__file__).parent / "morph.js").read_text(encoding="utf-8")
    results = page.evaluate(f"async () => {{ {script} return outlived(); }}")
    assert len(results) > 20
    assert [name for name, holds in results if not holds] == []


def test_what_is_open_and_scrolled_stays_so(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "positions?length=64")
    page.click("section:has-text('every pair') summary")
    page.wait_for_selector("section:has-text('every pair') details table")
    scroll = "document.querySelector('main details[open] .scroll')"
    page.evaluate(f"{scroll}.scrollLeft = 99")
    page.evaluate("scrollTo(0, 311)")
    pixels = "document.querySelector('canvas').toDataURL()"
    before = page.evaluate(pixels)
    page.focus("[data-key=base]")
    page.evaluate("scrollTo(0, 311)")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(pixels) != before
    assert page.evaluate(f"{scroll}.scrollLeft") == 99
    assert page.evaluate("scrollY") == 311
    assert page.evaluate("document.activeElement.dataset.key") == "base"
