"""The studio in a real browser: the first paint once it listens, and how soon controls answer.

python -m bench.studio runs/demo-dates runs/demo-digits runs/demo-read RUN…

A control has answered when the page is drawn again: after an event on a page of toys, and after the
answer of the model elsewhere. Needs Chromium on the PATH.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

TOYS = {
    "byhand": "beta",
    "geometry": "stretch",
    "as": "beta",
    "positions": "width",
    "cost": "d",
}
"""A slider of each page."""

TOY = """async (key) => {
    const times = [];
    for (let n = 0; n < 21; n++) {
        const input = document.querySelector(`[data-key="${key}"]`);
        input.value = Number(input.value) + (n % 2 ? -1 : 1) * Number(input.step);
        const begin = performance.now();
        input.dispatchEvent(new Event("input", { bubbles: true }));
        await new Promise((drawn) => setTimeout(drawn));
        times.push(performance.now() - begin);
    }
    return times;
}"""

MODEL = """async () => {
    const times = [];
    for (let n = 0; n < 21; n++) {
        const begin = performance.now();
        const answered = new Promise((done) => {
            const look = new MutationObserver(() => {
                if (document.querySelector(".busy")) return;
                look.disconnect();
                done();
            });
            setTimeout(() => look.observe(document.body, { subtree: true, childList: true }));
        });
        document.querySelector("[data-key=head-off]").click();
        await answered;
        times.push(performance.now() - begin);
    }
    return times;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="*", help="runs, as for regard studio")
    runs = parser.parse_args().runs
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        browser.new_page().goto("about:blank")  # what starting a browser takes is not the studio's
        command = [sys.executable, "-m", "regard", "studio", *runs, "--no-browser", "--port", "0"]
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as studio:
            assert studio.stdout is not None
            address = studio.stdout.readline().split()[4]
            listens = time.perf_counter() - begin
            try:
                measure(browser, address, listens, runs)
            finally:
                studio.terminate()
        browser.close()


def measure(browser: Any, address: str, listens: float, runs: list[str]) -> None:
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("body[data-ready=byhand]")
    script = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    page.wait_for_timeout(300)
    print(f"listens after {listens:.2f} s; first paint {page.evaluate(script):.0f} ms later")
    for name, key in TOYS.items():
        page.goto(f"{address}#{name}")
        page.wait_for_selector(f"body[data-ready={name}] [data-key={key}]")
        report(name, page.evaluate(TOY, key))
    for name in ("translate", "text", "vision", "read") if runs else ():
        page.goto(f"{address}#{name}?layer=0&head=0")
        page.wait_for_selector(f"body[data-ready={name}]")
        if page.query_selector(".offer"):
            continue
        page.wait_for_selector("[data-key=head-off]")
        page.wait_for_selector(".busy", state="detached")
        report(name, page.evaluate(MODEL))


def report(name: str, times: list[float]) -> None:
    print(f"  {name:10s} {statistics.median(times):6.1f} ms, at most {max(times):6.1f}", flush=True)


if __name__ == "__main__":
    main()
