"""From words to settings: every setting of a dataclass is a flag, its docstring the flag's help."""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

Settings = TypeVar("Settings")


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"regard: {message}; see {self.prog} --help\n")


def with_folder(
    command: str, kind: type[Settings], default: Settings, words: Sequence[str]
) -> tuple[Path, Settings]:
    """The folder that comes first, and what the flags say; `--help` needs no folder."""
    folder = words[0] if words and not words[0].startswith("-") else None
    flags = words if folder is None else words[1:]
    options = parse(kind, default, flags, f"regard {command} RUN")
    if folder is None:
        raise ValueError(f"{command} needs a run's or a model's folder: regard {command} RUN")
    return Path(folder), options


def parse(kind: type[Settings], default: Settings, words: Sequence[str], prog: str) -> Settings:
    """Settings from flags. What is wrong with them is one line; `--help` explains all."""
    import tyro

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(kind, prog=prog, args=list(words), default=default)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(
            f"{_one_line(errors.getvalue())} (see {prog.replace(' RUN', '')} --help)"
        ) from None


def _one_line(box: str) -> str:
    """tyro frames its errors, over several lines, and adds the help of each flag."""
    lines = [re.sub(r"[│╭╮╰╯─]+|[+-]{4,}", " ", line).strip(" |") for line in box.splitlines()]
    text = re.sub(r"\s+", " ", " ".join(lines[1:]))
    text = re.split(r" ?(?:Argument helptext:|For full helptext)", text)[0]
    problem, _, near = text.partition(" Perhaps you meant: ")
    meant = f"; did you mean {near.split()[0]}?" if near else ""
    return f"{problem.strip().rstrip('.')}{meant}"


class Progress:
    """What is being prepared: a line that grows on a terminal, its beginning elsewhere."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, share: float) -> None:
        if sys.stderr.isatty():
            end = "\n" if share >= 1 else ""
            print(f"\r{what} {share:4.0%}", end=end, file=sys.stderr, flush=True)
        elif what != self._last:
            print(f"{what} …", file=sys.stderr, flush=True)
        self._last = what
