"""From exceptions to exit codes: whatever goes wrong is one line that begins with `regard:`.

0    done
1    something that was tried failed, or a part of the input could not be used
2    the words or the data were wrong, and the line says what to do
70   a fault of Regard's own; the line names a file with the traceback
130  interrupted
141  whoever read the output went away
"""

import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from regard.machine.extras import remedy
from regard.machine.processes import one_line

FAULT, INTERRUPTED, GONE = 70, 130, 141

LONGEST = 2000
"""Characters of a line about an error; values that it quotes may be of any length."""


def prepare_streams() -> None:
    """Signs that a terminal cannot show are replaced; streams that were closed swallow all."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure") and stream.errors in ("strict", "surrogateescape"):
            # The second is what Python takes where there is no locale.
            stream.reconfigure(errors="replace")
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C counts only afterwards: in the midst of torch's import it would abort the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def guarded(run: Callable[[], int | None], debug: bool) -> int:
    """The exit code of a command. With `debug`, exceptions pass through as they are."""
    try:
        with _threads_reported():
            status = run() or 0
        return _flushed(status)
    except BrokenPipeError:
        return _flushed(GONE)
    except SystemExit as end:  # --help
        raise SystemExit(_flushed(end.code) if isinstance(end.code, int) else end.code) from None
    except (KeyboardInterrupt, Exception) as error:
        if debug:
            raise
        try:
            return _flushed(_report(error))
        except KeyboardInterrupt:  # a second one
            return INTERRUPTED


def _flushed(status: int) -> int:
    """The exit code, once all output is written; what cannot be is given up.

    Python would try once more at its end, and exit with a code of its own.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError, ValueError):  # a stream without a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if status == 0:
            return GONE if isinstance(error, BrokenPipeError) else _report(error)
    return status


@contextmanager
def _threads_reported() -> Iterator[None]:
    """An exception that ends a thread is one line as well."""

    def report(failed: threading.ExceptHookArgs) -> None:
        if isinstance(failed.exc_value, Exception):
            _fault(failed.exc_value)

    before, threading.excepthook = threading.excepthook, report
    try:
        yield
    finally:
        threading.excepthook = before


def _report(error: BaseException) -> int:
    if not isinstance(error, Exception):
        return INTERRUPTED
    if isinstance(error, ValueError | OSError) and one_line(error):
        _say(one_line(error))
        return 2
    if isinstance(error, ImportError) and (line := remedy(error)):
        _say(line)
        return 2
    if _out_of_memory(error):
        _say(f"there is not enough memory; use a smaller model or a smaller batch ({_kind(error)})")
        return 2
    _fault(error)
    return FAULT


def _fault(error: Exception) -> None:
    _say(
        f"this is a fault of Regard's own ({_kind(error)}); the traceback is in {_kept(error)}; "
        "please report it"
    )


def _kind(error: Exception) -> str:
    text = one_line(error)
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _out_of_memory(error: Exception) -> bool:
    text = str(error)
    known = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(words in text for words in known)


def _kept(error: Exception) -> str:
    """A file with the traceback, for a report."""
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="regard-", suffix=".txt", encoding="utf-8", errors="replace", delete=False
        ) as file:
            file.write(text)
        return file.name
    except OSError:
        return "no file, since none could be written; --debug shows it"


def _say(text: str) -> None:
    short = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
    with suppress(OSError):  # nobody is there to be told
        print("regard:", short, file=sys.stderr)
