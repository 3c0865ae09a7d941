"""Files of any size, translated by any number of processes, each line exactly once.

    python -m regard.service.corpus RUN big.en OUT
    torchrun --nproc-per-node 4 -m regard.service.corpus RUN big.en OUT --precision int8

The input is cut into shards of so many lines. Process r of n takes the shards r, r + n, r + 2n, …,
and writes each as a whole or not at all: OUT/shards/00000007.txt. Killed at any moment, on any
machine, the job is started again with the same words, by as many processes as there are now: what
is there is not done again. When all shards are there, the first process puts them together as
OUT/translations.txt.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from regard.checkpoint import CONFIG
from regard.data.files import LineFile, Reading
from regard.machine import atomic
from regard.machine.command_line import Parser
from regard.service.models import load_served
from regard.task.folder import model_folder
from regard.task.settings import Precision

JOB, SHARDS, WHOLE = "job.json", "shards", "translations.txt"


def shards(path: Path, size: int) -> Iterator[list[str]]:
    """The lines of a file, so many at a time; a line that is no text is an empty one."""
    held: list[str] = []
    with ExitStack() as stack:
        file = LineFile(path, Reading(), stack)
        while (line := file.line()) is not None:
            held.append("" if file.overlong is not None else line.decode(errors="replace"))
            if len(held) == size:
                yield held
                held = []
    if held:
        yield held


def describe(run: str, path: Path, size: int, precision: str, beams: int | None) -> dict[str, Any]:
    """What makes two jobs the same: the model, the input, and how it is cut."""
    config = (model_folder(run) / CONFIG).read_bytes()  # which has the checksums of all its files
    about = path.stat()
    return {
        "model": hashlib.sha256(config).hexdigest(),
        "input": [path.name, about.st_size, about.st_mtime_ns],
        "shard": size,
        "precision": precision,
        "beams": beams,
    }


def begin(out: Path, job: dict[str, Any]) -> None:
    """Makes the folder, or goes on with the same job in it; another one is refused."""
    (out / SHARDS).mkdir(parents=True, exist_ok=True)
    if (out / JOB).exists():
        if json.loads((out / JOB).read_bytes()) != job:
            raise ValueError(
                f"{out} holds another job: its model, input or settings differ; choose a new folder"
            )
    else:
        atomic.write(out / JOB, json.dumps(job))


def translate(
    run: str,
    path: Path,
    out: Path,
    *,
    rank: int = 0,
    size: int = 1,
    shard: int = 1000,
    beams: int | None = None,
    precision: Precision = "fp32",
    device: str = "auto",
) -> int:
    """The shards of one process; gives the number that it has translated."""
    begin(out, describe(run, path, shard, precision, beams))
    model: Any = None
    done = 0
    for n, lines in enumerate(shards(path, shard)):
        target = out / SHARDS / f"{n:08}.txt"
        if n % size != rank or target.exists():
            continue
        if model is None:
            model = load_served("model", run, device=device, precision=precision, version=1).whole
        found = model.translate(lines, beams=beams)
        atomic.write(target, "".join(f"{text}\n" for text in found))
        done += 1
    return done


def join(path: Path, out: Path, shard: int, patience: float = 0.5) -> Path:
    """Waits for all shards, and puts them together."""
    count = sum(1 for _ in shards(path, shard))
    names = [out / SHARDS / f"{n:08}.txt" for n in range(count)]
    while not all(name.exists() for name in names):
        time.sleep(patience)
    with atomic.file(out / WHOLE) as draft, draft.open("wb") as whole:
        for name in names:
            whole.write(name.read_bytes())
    return out / WHOLE


def main(words: list[str] | None = None) -> int:
    parser = Parser(prog="python -m regard.service.corpus", description=__doc__)
    parser.add_argument("run", help="a run's or a model's folder")
    parser.add_argument("input", type=Path, help="text, a sentence in each line; may be compressed")
    parser.add_argument("out", type=Path, help="a new folder, or one to go on in")
    parser.add_argument("--shard", type=int, default=1000, help="lines of a shard")
    parser.add_argument("--beams", type=int, help="by default the model's own")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16", "int8"], default="fp32")
    parser.add_argument("--device", default="auto")
    try:
        given: argparse.Namespace = parser.parse_args(words)
        if given.shard < 1:
            raise ValueError(f"shard ({given.shard}) must be 1 or more")
        # Ranks alone are wanted: shards are shared through the folder, and nobody waits for others.
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        how: dict[str, Any] = {
            "shard": given.shard,
            "beams": given.beams,
            "precision": given.precision,
            "device": given.device,
        }
        translate(given.run, given.input, given.out, rank=rank, size=size, **how)
        if rank == 0:
            print(join(given.input, given.out, given.shard))
    except (ValueError, OSError) as error:
        print("regard:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
