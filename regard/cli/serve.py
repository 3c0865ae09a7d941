"""regard serve RUN…: models over HTTP."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regard.cli.arguments import parse
from regard.extras import install
from regard.service.requests import Limits
from regard.task.settings import check_positive


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serves models over HTTP: translation, language models, images and labels."""

    host: str = "127.0.0.1"
    """Address to listen at. By default only this machine can ask; 0.0.0.0 is for everybody."""
    port: int = 8000
    """Port to listen at; 0 is any that is free."""
    workers: int = 0
    """Worker processes that compute, behind one port. 0 is one on a CPU and one for each GPU; where
    all models together have up to 1 GiB of weights and there are four cores for each, up to four
    for each GPU: what Python does for the one is done while others' are computed. More than there
    are GPUs take them in turn, and share their memory."""
    http_processes: int = 0
    """Processes that speak HTTP, behind the same port; 0 is one, and beside a GPU, which answers
    more than one of them can ask, one for every four cores, up to four."""
    threads: int = 0
    """Threads of each worker on the CPU; 0 shares the cores among the workers."""
    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1. Several workers on cuda take
    GPUs in turn."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Precision of weights and activations: auto is bf16 on a GPU, and on a CPU fp32, or int8 if
    the folder stores 8-bit weights. int8 is for a CPU, several times faster than fp32, and its
    answers do not depend on what else is in a batch, to the last bit."""
    memory: float | None = None
    """GB of weights that a worker holds at most; beyond, the model that has not been asked for the
    longest is let go, and loaded again when it is asked for."""
    keys: str | None = None
    """File with API keys, one in each line; or set REGARD_API_KEYS, separated by commas. Without
    any, everybody who can connect may ask."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may ask from a browser, such as https://example.org; by default none."""
    characters: int = Limits.characters
    """Characters of a request, at most."""
    pixels: int = Limits.pixels
    """Pixels of an image, at most."""
    beams: int = Limits.beams
    """Beam size that may be asked for, at most."""
    seconds: float = Limits.seconds
    """Seconds in which a request is answered, or given up."""
    queue: int = Limits.queue
    """Sentences and images that may wait in a worker; beyond, requests are refused for a while."""
    drain: float = 60.0
    """Seconds that are left for what was accepted, once the server is told to end."""
    log: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged, as JSON on standard error."""
    log_text: bool = False
    """Log the texts of requests too."""

    def __post_init__(self) -> None:
        check_positive(self, "characters", "pixels", "beams", "queue")
        for name in ("workers", "threads", "port", "http_processes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 0 or more")
        for name in ("seconds", "memory", "drain"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} ({value}) must be above 0")
        if self.http_processes > 1 and sys.platform != "linux":
            raise ValueError(
                f"http_processes ({self.http_processes}) share a port on Linux alone; leave it out"
            )


def serve(words: Sequence[str]) -> int:
    folders = []
    for word in words:
        if word.startswith("-"):
            break
        folders.append(word)
    if not folders and not {"-h", "--help"} & set(words):
        raise ValueError(
            "serve needs runs' or models' folders, before all flags: regard serve RUN, or NAME=RUN"
        )
    options = parse(Serve, Serve(), words[len(folders) :], "regard serve RUN|NAME=RUN ...")
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError(f"serve needs FastAPI and uvicorn: {install('serve')}") from None
    from regard.serve import logs
    from regard.serve.app import Options
    from regard.serve.gpus import default_workers, gpus
    from regard.serve.server import bound_together, loop
    from regard.serve.server import serve as run
    from regard.serve.workers import Settings, Workers, cores, named

    models = named(folders)
    for _, folder in models:
        if not Path(folder).is_dir():
            raise ValueError(f"{folder} cannot be found; name a run's or a model's folder")
    limits = Limits(
        characters=options.characters,
        pixels=options.pixels,
        beams=options.beams,
        seconds=options.seconds,
        queue=options.queue,
    )
    names = [folder for _, folder in models]
    workers = options.workers or default_workers(
        names, options.device, options.precision, cores(), gpus()
    )
    settings = Settings(
        models,
        limits,
        options.device,
        options.precision,
        None if options.memory is None else round(options.memory * 1e9),
        options.threads or max(1, cores() // workers),
    )
    keys = _keys(options.keys)
    fronts = options.http_processes or _http_processes(options.device, cores())
    listening = bound_together(options.host, options.port, fronts)
    logs.start(options.log)

    def ready(backend: Workers) -> None:
        host, port = listening[0].getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        for model in backend.models():
            print(f"regard: {model['name']}: {model['task']}, {model['engine']}", file=sys.stderr)
        print(f"regard: http://{address}:{port}/docs", file=sys.stderr, flush=True)

    shown = Options(limits=limits, keys=keys, cors=options.cors, log_text=options.log_text)
    with ExitStack() as stack:
        for one in listening:
            stack.enter_context(one)
        runner = stack.enter_context(asyncio.Runner(loop_factory=loop()))
        runner.run(
            run(
                listening,
                settings,
                shown,
                workers=workers,
                drain=options.drain,
                level=options.log,
                ready=ready,
            )
        )
    return 0


def _http_processes(device: str, cores: int) -> int:
    """As many as a GPU needs. Whether there is one is seen by its driver: torch, which would know,
    is the workers' alone."""
    drivers = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
    there = any(driver.exists() for driver in drivers)
    on_gpu = device.startswith("cuda") or (device == "auto" and there)
    return max(1, min(4, cores // 4)) if on_gpu and sys.platform == "linux" else 1


def _keys(file: str | None) -> tuple[str, ...]:
    words = os.environ.get("REGARD_API_KEYS", "").split(",")
    if file is not None:
        try:
            words += Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"keys ({file}) cannot be read: {error}") from None
    keys = tuple(word.strip() for word in words if word.strip())
    if file is not None and not keys:
        raise ValueError(f"keys ({file}) has no key in it; write one in each line")
    return keys
