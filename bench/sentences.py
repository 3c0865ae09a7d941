"""CPU time for each sentence, from text to text: a trained model in int8 beside CTranslate2.

    python -m bench.sentences RUN --source test.en

Both have one thread, and a process of their own; they take turns, and each keeps its median. CPU
time is what a shared machine can tell: how long a sentence takes there depends on the others.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.serving import ctranslate2_translator, read

ALONE = 48
"""Sentences that are translated where each is a batch of its own."""

Translate = Callable[[list[str], int, int], list[str]]
"""From texts, beams and the size of a batch."""


def ours(run: str) -> Translate:
    import torch

    from regard import load
    from regard.decode.engine.int8.linear import int8

    torch.set_num_threads(1)
    ready: Any = load(run)
    int8(ready.model)
    return lambda texts, beams, batch: ready.translate(texts, beams=beams, batch=batch)


def work(pipe: Any, name: str, run: str, exported: str) -> None:
    """A system, in a process of its own."""
    peer = name != "ours"
    translate = ctranslate2_translator(run, exported, "int8", 1) if peer else ours(run)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        texts, beams, batch = asked
        begun = time.process_time()
        if batch == 1:  # one after the other, as somebody types them
            found = [translate([text], beams, 1)[0] for text in texts]
        else:
            found = translate(texts, beams, batch)
        pipe.send((time.process_time() - begun, found))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sentences", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--source", required=True, help="sentences, one in each line")
    parser.add_argument("--count", type=int, default=192, help="of sentences")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    texts = read(options.source)[: options.count]
    with tempfile.TemporaryDirectory() as folder:
        exported = str(Path(folder) / "exported")
        words = ["export", options.run, exported, "--to", "ctranslate2", "--precision", "int8"]
        subprocess.run([sys.executable, "-m", "regard", *words], check=True, stdout=sys.stderr)
        context = multiprocessing.get_context("spawn")
        systems = {}
        for name in ("ours", "CTranslate2"):
            systems[name], other = context.Pipe()
            given = (other, name, options.run, exported)
            context.Process(target=work, args=given, daemon=True).start()
            systems[name].recv()
        for beams, batch in itertools.product(options.beams, options.batch):
            some = texts[:ALONE] if batch == 1 else texts
            print(compare(systems, some, beams, batch, options.rounds), flush=True)
        for pipe in systems.values():
            pipe.send(None)


def compare(systems: dict[str, Any], texts: list[str], beams: int, batch: int, rounds: int) -> str:
    taken: dict[str, list[float]] = {name: [] for name in systems}
    found: dict[str, list[str]] = {}
    for n in range(rounds + 1):  # the first is not counted
        for name, pipe in systems.items():
            pipe.send((texts, beams, batch))
            seconds, found[name] = pipe.recv()
            taken[name] += [1000 * seconds / len(texts)] * (n > 0)
    mine, theirs = (statistics.median(taken[name]) for name in systems)
    alike = sum(map(str.__eq__, *found.values())) / len(texts)
    return (
        f"{beams} beams, batches of {batch:2d}: ours {mine:6.2f} ms, CTranslate2 {theirs:6.2f} ms "
        f"of CPU time for each, {theirs / mine:.2f} ×; {alike:.0%} alike"
    )


if __name__ == "__main__":
    main()
