"""Counters and histograms in Prometheus' text format.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds."""


class Metrics:
    """Of one HTTP process, and what is known of the others."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = defaultdict(int)
        """By route and status."""
        self.seconds: dict[str, list[int]] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self.running = 0
        self.cancelled = 0
        self.others: list[dict[str, Any]] = []
        """Of every other process, its `state`."""

    def answered(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self._counts(route)[bisect_left(BUCKETS, seconds)] += 1
        self._sums[route] += seconds

    def _counts(self, route: str) -> list[int]:
        return self.seconds.setdefault(route, [0] * (len(BUCKETS) + 1))

    def state(self) -> dict[str, Any]:
        """All of this process, as JSON has it."""
        return {
            "requests": [[*key, count] for key, count in self.requests.items()],
            "seconds": self.seconds,
            "sums": self._sums,
            "running": self.running,
            "cancelled": self.cancelled,
        }

    def add(self, state: Mapping[str, Any]) -> None:
        for route, status, count in state["requests"]:
            self.requests[route, status] += count
        for route, counts in state["seconds"].items():
            self.seconds[route] = [a + b for a, b in zip(self._counts(route), counts)]
            self._sums[route] += state["sums"][route]
        self.running += state["running"]
        self.cancelled += state["cancelled"]

    def text(self, workers: list[dict[str, int]], restarts: int) -> str:
        whole = Metrics()
        for state in (self.state(), *self.others):
            whole.add(state)
        return "".join(f"{line}\n" for line in whole._lines(workers, restarts))

    def _lines(self, workers: list[dict[str, int]], restarts: int) -> Iterator[str]:
        yield from _header("regard_requests_total", "counter", "Requests by route and status.")
        for (route, status), count in sorted(self.requests.items()):
            labels = {"route": route, "status": str(status)}
            yield _sample("regard_requests_total", labels, count)
        yield from _header("regard_request_seconds", "histogram", "Time to answer a request.")
        for route, counts in sorted(self.seconds.items()):
            total = 0
            for edge, count in zip((*map(str, BUCKETS), "+Inf"), counts):
                total += count
                labels = {"route": route, "le": edge}
                yield _sample("regard_request_seconds_bucket", labels, total)
            yield _sample("regard_request_seconds_sum", {"route": route}, self._sums[route])
            yield _sample("regard_request_seconds_count", {"route": route}, total)
        yield from _plain("regard_running", "gauge", "Requests being answered.", self.running)
        yield from _plain(
            "regard_cancelled_total", "counter", "Requests whose client left.", self.cancelled
        )
        yield from _plain(
            "regard_worker_restarts_total", "counter", "Workers that had to be restarted.", restarts
        )
        for name, key, kind, about in (
            ("regard_waiting", "waiting", "gauge", "Sentences and images that wait."),
            ("regard_sentences_total", "sentences", "counter", "Sentences and images begun."),
            ("regard_steps_total", "steps", "counter", "Steps of the models."),
            ("regard_worker_bytes", "bytes", "gauge", "Resident memory of a worker."),
        ):
            yield from _header(name, kind, about)
            for n, worker in enumerate(workers):
                yield _sample(name, {"worker": str(n)}, worker.get(key, 0))


def _header(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def _plain(name: str, kind: str, about: str, value: float) -> Iterator[str]:
    yield from _header(name, kind, about)
    yield f"{name} {value}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
