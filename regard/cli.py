"""The command line: words in, words out.

A command imports what it needs when it is chosen, so that `regard --help` answers at once.
Whatever a user can set right is said in one line that begins with `regard:`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from regard import __version__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"regard: {message}; see regard --help\n")


def _demo(options: argparse.Namespace) -> None:
    from regard.lab.byhand import demo

    demo()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="regard",
        description="The Transformer, complete, fast and see-through.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"regard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="step through attention by hand and draw the masks",
        description="Steps through attention by hand, table by table, and draws the masks.",
    )
    demo.set_defaults(run=_demo)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    2 means that the words or the data were wrong; 130 and 141 are what a shell reports for a
    command that was interrupted or whose reader went away.
    """
    try:
        options = _parser().parse_args(words)
        options.run(options)
        sys.stdout.flush()
    except ValueError as error:
        print("regard:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes once more at exit, and would complain about the closed pipe then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
