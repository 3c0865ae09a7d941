"""The command `serve`: serves models over HTTP."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regard.cli.arguments import parse
from regard.machine.extras import install
from regard.service.requests import Limits
from regard.task.settings import check_positive


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serves models over HTTP: translation, language models, images and labels."""

    host: str = "127.0.0.1"
    """Address to listen on. By default only this machine can connect; 0.0.0.0 accepts any."""
    port: int = 8000
    """Port to listen on; 0 is any free port."""
    workers: int = 0
    """Worker processes that run the models, behind one port. 0 is one on a CPU and one for each
    GPU; up to four for each GPU if all models together have at most 1 GiB of weights and there are
    four cores for each worker, so that Python code and GPU kernels overlap. More workers than GPUs
    are assigned in turn, and share GPU memory."""
    http_processes: int = 0
    """HTTP processes behind the same port. 0 is one; with a GPU, which one process cannot keep
    busy, one for every four cores, up to four."""
    threads: int = 0
    """Threads of each worker on the CPU; 0 shares the cores among the workers."""
    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1. Several workers on cuda take
    GPUs in turn."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Precision of weights and activations: auto is bf16 on a GPU, and on a CPU fp32, or int8 if
    the folder stores 8-bit weights. int8 is for a CPU, several times faster than fp32, and its
    results are exactly the same whatever else is in the batch."""
    memory: float | None = None
    """Maximum GB of weights in a worker; beyond it, the least recently used model is unloaded until
    its next request."""
    keys: str | None = None
    """File with API keys, one in each line; or set REGARD_API_KEYS, separated by commas. Without
    keys, every client is accepted."""
    cors: tuple[str, ...] = ()
    """Allowed origins of browser requests (CORS), such as https://example.org; by default none."""
    characters: int = Limits.characters
    """Maximum number of characters in a request."""
    pixels: int = Limits.pixels
    """Maximum number of pixels in an image."""
    beams: int = Limits.beams
    """Maximum beam size of a request."""
    seconds: float = Limits.seconds
    """Timeout of a request in seconds."""
    queue: int = Limits.queue
    """Maximum number of waiting sentences and images in a worker; then requests are refused."""
    drain: float = 60.0
    """Seconds to finish accepted requests when the server is stopped."""
    log: Literal["debug", "info", "warning", "error"] = "info"
    """Log level; the log is JSON on standard error."""
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
    if sys.platform == "win32":
        raise ValueError("serve needs the signals of Linux or macOS; run it in WSL2")
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
    http_processes = options.http_processes or _http_processes(options.device, cores())
    listening = bound_together(options.host, options.port, http_processes)
    logs.start(options.log)

    def ready(backend: Workers) -> None:
        host, port = listening[0].getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        for model in backend.models():
            print(f"regard: {model['name']}: {model['task']}, {model['engine']}", file=sys.stderr)
        print(f"regard: http://{address}:{port}/docs", file=sys.stderr, flush=True)

    shown = Options(limits=limits, keys=keys, cors=options.cors, log_text=options.log_text)
    with ExitStack() as stack:
        for socket in listening:
            stack.enter_context(socket)
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
    """The number of HTTP processes that a GPU needs. A GPU is detected by its driver's device file:
    only workers import torch."""
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
