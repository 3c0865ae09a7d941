"""What the lab's commands have in common: how they describe themselves, and where they write."""

import argparse
from pathlib import Path

from regard.machine.command_line import Parser as OneLineParser


class Parser(OneLineParser):
    """With a description and examples that are printed as they are."""

    def __init__(self, command: str, description: str, epilog: str):
        super().__init__(
            prog=f"regard {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )


def check_output(options: argparse.Namespace, *names: str) -> None:
    """Files to be written must be possible ones, which is said before anything is computed."""
    for name in names:
        path = getattr(options, name)
        if path is None:
            continue
        folder = Path(path).resolve().parent
        if Path(path).is_dir():
            raise ValueError(f"--{name} {path} is a folder; name a file")
        if not folder.is_dir():
            raise ValueError(f"--{name} {path}: no folder {folder}; make it")
