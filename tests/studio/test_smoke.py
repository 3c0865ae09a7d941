"""The first page in a real browser: drawn at once, with the right numbers."""

from typing import Any

from regard.studio.server import Server
from tests.studio.conftest import Open


def cells(page: Any, step: str) -> list[list[str]]:
    rows: list[list[str]] = page.eval_on_selector_all(
        f"table[data-step={step}] tbody tr",
        "rows => rows.map((row) => [...row.querySelectorAll('td')].map((cell) => cell.innerText))",
    )
    return rows


def test_exercise_3_by_hand(toys: Server, open_page: Open) -> None:
    page = open_page(toys, "byhand")
    assert cells(page, "scores") == [["4.000", "3.000", "2.000"], ["7.000", "4.000", "1.000"]]
    assert cells(page, "weights") == [["0.576", "0.284", "0.140"], ["0.882", "0.106", "0.013"]]
    assert cells(page, "output") == [["0.860", "1.576", "−0.724"], ["0.987", "1.882", "−1.565"]]
    assert cells(page, "operations")[-1] == ["30", "12", "22", "6"]
    page.click("[data-key='beta-0']")
    assert cells(page, "weights") == [["0.333"] * 3] * 2
    page.click("[data-key='beta-inf']")
    assert cells(page, "weights") == [["1.000", "0.000", "0.000"]] * 2
    assert "beta=inf" in page.url
