"""A real browser, and servers for it to look at."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from regard.studio.ask import questions
from regard.studio.runs import Runs
from regard.studio.server import Server

FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]


@contextmanager
def serving(runs: list[Path]) -> Iterator[Server]:
    with Server("127.0.0.1", 0, questions(Runs(runs, Path("no-such-folder")))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium on the PATH: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def toys() -> Iterator[Server]:
    """A studio without any run."""
    with serving([]) as server:
        yield server


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a page of a server, and sees to it that nothing went wrong on it."""
    contexts, problems = [], []

    def opening(
        server: Server, address: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on(
            "console", lambda said: problems.append(said.text) if said.type == "error" else None
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((server.address, "data:"))
                else problems.append(request.url)
            ),
        )
        page.goto(f"{server.address}#{address}")
        name = address.partition("?")[0]
        page.wait_for_selector(f"body[data-ready={name}]")
        page.wait_for_selector("[aria-busy=true]", state="detached")
        return page

    yield opening
    for context in contexts:
        context.close()
    assert problems == []
