"""The page of `regard look`, opened from disk, and as a notebook shows it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.attention.mask import causal
from regard.look.record import AttentionCall, Recording
from regard.look.view import Best, Effect, View, maps

pytestmark = pytest.mark.slow


def made() -> View:
    def asked(L: int, S: int, mask: bool = False) -> AttentionCall:
        query, key = 2 * torch.randn(1, 2, L, 4), torch.randn(1, 2, S, 4)
        return AttentionCall(query, key, causal() if mask else None, None, None)

    seen = Recording(
        {
            "encoder.blocks.0.attention": asked(4, 4),
            "encoder.blocks.1.attention": asked(4, 4),
            "decoder.blocks.0.attention": asked(3, 3, mask=True),
            "decoder.blocks.0.cross": asked(3, 4),
        }
    )
    found = maps(
        seen,
        ["▁Ein", "▁Hu", "nd", "</s>"],
        ["<s>", "▁A", "▁dog"],
        ["▁A", "▁dog", "</s>"],
        source_words=[0, 1, 1, 2],
        target_words=[0, 1, 2],
    )
    effect = Effect(
        ("Ein", "Hund", "∎"), ((0,), (1, 2), (3,)), torch.randn(3, 3), ("A", "dog", "∎")
    )
    return View(
        "A view",
        found,
        source="Ein Hund",
        text="A dog",
        tokens=(("▁A", 0.9), ("▁dog", 0.8), ("</s>", 0.7)),
        best=Best(0, 1, 0, torch.tensor([[0.25, 0.75]])),
        effect=effect,
    )


def opened(browser: Any, page: str, path: Path) -> tuple[Any, list[str]]:
    problems: list[str] = []
    path.write_text(page, encoding="utf-8")
    context = browser.new_context(viewport={"width": 360, "height": 740})
    tab = context.new_page()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    tab.on(
        "request",
        lambda asked: (
            None
            if asked.url.startswith(("file:", "data:", "about:"))
            else problems.append(asked.url)
        ),
    )
    tab.goto(path.as_uri())
    return tab, problems


def test_the_page_shows_the_weights_and_words(browser: Any, tmp_path: Path) -> None:
    view = made()
    tab, problems = opened(browser, view.html(), tmp_path / "page.html")
    assert "Layer 1, head 2" in tab.inner_text(".one h2")
    weights = view.map("cross").weights[0, 1]
    titles = tab.eval_on_selector_all(
        "svg.heat .cell title", "all => all.map((t) => t.textContent)"
    )
    shown = [float(title.rpartition(" ")[2].replace("−", "-")) for title in titles[:12]]
    assert shown == pytest.approx(weights.flatten().tolist(), abs=6e-5)
    tab.click("text=words")
    titles = tab.eval_on_selector_all(
        "svg.heat .cell title", "all => all.map((t) => t.textContent)"
    )
    assert titles[1].startswith("A → Hund: ")
    merged = float(titles[1].rpartition(" ")[2])
    assert merged == pytest.approx(float(weights[0, 1] + weights[0, 2]), abs=1e-4)
    tab.click("text=token read")
    # The row that read A wrote dog.
    title = tab.text_content("svg.heat .cell title")
    assert title.startswith("A → Ein: ")
    assert float(title.rpartition(" ")[2]) == pytest.approx(float(weights[1, 0]), abs=6e-5)
    tab.click("text=Encoder")
    tab.click("[data-key='head-1-rollout']")
    assert "Rollout" in tab.inner_text(".one h2")
    tab.click(".one summary")
    tab.wait_for_selector(".one details table")
    assert tab.locator(".one details table tbody tr").count() == 3
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert problems == []


def test_several_stand_in_one_notebook(browser: Any, tmp_path: Path) -> None:
    frames = made()._repr_html_() + made()._repr_html_()
    tab, problems = opened(browser, f"<!doctype html><body>{frames}</body>", tmp_path / "a.html")
    for frame in tab.locator("iframe").all():
        assert "A view" in frame.content_frame.locator("h1").inner_text()
    assert problems == []
