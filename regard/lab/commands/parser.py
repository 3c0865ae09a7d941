"""The argument parser of the lab's commands, which reports an error in one line."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Raises a ValueError for wrong options; the command line prints it as one line."""

    def __init__(self, command: str, description: str, epilog: str):
        super().__init__(
            prog=f"regard {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")
