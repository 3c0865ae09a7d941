"""Real processes of the command line, without the seconds in which each would import torch.

    with zygote(folder) as commands:
        ended = commands.run(Run(["attend", "--query", "1 2"]))

A server imports everything once and forks for each command. The child has streams, signals, limits
and an exit code of its own, as if it had been started from a shell.
"""

import atexit
import faulthandler
import importlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]

MEMORY = 8 * 2**30
"""Address space that a command may take, torch's libraries included."""

LATE = 20
"""Times as many seconds in which a command that leaves its work to others is interrupted."""

POLL = 0.005
STUBBORN = 60
"""Seconds after which a command that was interrupted is killed."""


@dataclass(frozen=True)
class Run:
    """A command, and what it meets."""

    words: list[str]
    stdin: str = "/dev/null"
    stdout: str = "file"
    """file, full (a full disk), gone (a reader that has left) or closed."""
    encoding: str = "utf-8"
    """Of standard output and error, as PYTHONIOENCODING sets it."""
    signal: int = signal.SIGINT
    after: float = 10.0
    """Seconds of work after which the signal is sent."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    signalled: bool
    after: float
    """Seconds of work after the signal; not counting those in which others had the machine."""
    memory: int
    """Bytes at the height."""
    killed: bool


class Zygote:
    """The server, as a test sees it."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path):
        self.server, self.folder = server, folder

    def run(self, run: Run) -> Ended:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps(asdict(run)), file=self.server.stdin, flush=True)
        reply: dict[str, Any] = json.loads(self.server.stdout.readline())
        out, err = (
            (self.folder / name).read_text(encoding="utf-8", errors="replace")
            for name in (".stdout", ".stderr")
        )
        return Ended(out=out, err=err, **reply)


@contextmanager
def zygote(folder: Path) -> Iterator[Zygote]:
    """Commands that run in this folder, with a home, a cache and a place for drafts in it."""
    own = {"HOME": "home", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    for name in own.values():
        (folder / name).mkdir()
    places = {name: str(folder / place) for name, place in own.items()}
    environment = {**os.environ, **places, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.zygote"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Zygote(server, folder)
    finally:
        server.kill()
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                stream.close()
        server.wait()


# The server


def serve() -> None:
    _import_all()
    for line in sys.stdin:
        print(json.dumps(_ended(Run(**json.loads(line)))), flush=True)


def _import_all() -> None:
    from regard.task.specs import NAMES, spec

    for name in NAMES:
        spec(name)
    for name in (*_COMMANDS, *_LATE):
        importlib.import_module(name)


_COMMANDS = (
    *("regard.cli.average", "regard.cli.convert", "regard.cli.demo", "regard.cli.evaluate"),
    *("regard.cli.predict", "regard.cli.train", "regard.lab.byhand", "regard.lab.commands.attend"),
    *("regard.lab.commands.cost", "regard.lab.commands.lab", "regard.lab.cost.show"),
)
_LATE = (
    *("tyro", "typeguard", "matplotlib.pyplot", "sympy", "sacrebleu.metrics", "babel.dates"),
    *("PIL.ImageOps", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"),
)
"""What commands import when they need it, and the slowest of it."""


def _ended(run: Run) -> dict[str, Any]:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        _become(run, tell)
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    signalled, killed, spent, sent, begun = False, False, 0.0, 0.0, time.monotonic()
    waited = 0  # counted, not measured: the whole machine may stand still
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        late = time.monotonic() - begun > LATE * run.after
        if not signalled and (late or _seconds(child) >= run.after):
            signalled, spent, sent = True, _seconds(child), time.monotonic()
            os.killpg(child, run.signal)
        waited += signalled
        if not killed and waited * POLL > STUBBORN:
            killed = True
            os.kill(child, signal.SIGUSR1)  # where it hangs, for its standard error
            time.sleep(1)
            os.killpg(child, signal.SIGKILL)
        time.sleep(POLL)
    worked = used.ru_utime + used.ru_stime - spent
    return {
        "code": os.waitstatus_to_exitcode(status),
        "signalled": signalled,
        "after": min(worked, time.monotonic() - sent) if signalled else 0.0,
        "memory": used.ru_maxrss * 1024,
        "killed": killed,
    }


def _seconds(pid: int) -> float:
    """Time for which a process has computed, which does not depend on who else does."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _become(run: Run, ready: int) -> None:
    """Turns the child into the command; it does not return."""
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _streams(run)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        os.setpgid(0, 0)
        from regard.cli.main import main

        os.close(ready)
        code = main(run.words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(_flushed(code))


def _streams(run: Run) -> None:
    """Standard input, output and error as a shell and Python would have opened them."""
    os.dup2(os.open(run.stdin, os.O_RDONLY), 0)
    outputs = {"file": ".stdout", "full": "/dev/full", "closed": "/dev/null"}
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.close(os.open(".stdout", flags, 0o644))
    if run.stdout == "gone":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    else:
        os.dup2(os.open(outputs[run.stdout], flags, 0o644), 1)
    os.dup2(os.open(".stderr", flags, 0o644), 2)
    closed = run.stdout == "closed"

    def stream(fd: int, errors: str) -> IO[str]:
        raw = io.BufferedWriter(io.FileIO(fd, "wb", closefd=False))
        return io.TextIOWrapper(raw, run.encoding, errors)

    given: Any = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdin = None if closed else given
    sys.stdout = None if closed else stream(1, "strict")  # type: ignore[assignment]
    sys.stderr = stream(2, "backslashreplace")  # type: ignore[assignment]


def _flushed(code: int) -> int:
    """As Python ends: with its threads, and an error of its own for what cannot be written then."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as main does in a process of its own
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        return 120
    return code


if __name__ == "__main__":
    serve()
