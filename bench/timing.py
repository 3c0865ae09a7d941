"""Timing things side by side: they take turns, and each keeps the median of its turns."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass
class Run:
    """Something to time, and the context it runs in, which is entered outside of the clock."""

    call: Callable[[], torch.Tensor]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def turns(runs: dict[str, Run], rounds: int = 7, at_least: float = 0.02) -> dict[str, float]:
    """Median seconds per call, device work included, of each run as the host calls it."""
    calls = {}
    for name, run in runs.items():
        with run.context():
            _settle(run)
            start = time.perf_counter()
            run.call()
            _wait()
            calls[name] = max(1, int(at_least / max(time.perf_counter() - start, 1e-6)))
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            with run.context():
                _wait()
                start = time.perf_counter()
                for _ in range(calls[name]):
                    run.call()
                _wait()
                took[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(times) for name, times in took.items()}


def replays(runs: dict[str, Run], rounds: int = 9, calls: int = 6) -> dict[str, float]:
    """Median seconds per call of each run captured in a CUDA graph: the kernels alone."""
    graphs = {}
    for name, run in runs.items():
        with run.context():
            graphs[name] = _capture(run, calls)
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            took[name].append(begin.elapsed_time(end) / 1e3 / calls)
    return {name: statistics.median(times) for name, times in took.items()}


def _capture(run: Run, calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _settle(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run.call()
    torch.cuda.synchronize()
    graph.replay()
    return graph


def _settle(run: Run) -> None:
    """What happens once, compiling above all, is not what is timed."""
    for _ in range(2):
        run.call()
    _wait()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
