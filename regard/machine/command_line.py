"""The words of a command line, before they are parsed into settings.

check_words(words)     refuses empty words, and dashes that only look like hyphens
check_columns()        refuses a terminal wider than there can be
check_once(words)      refuses a flag that is given twice
unknown_flag(…)        the line about an unknown flag, with the one that was probably meant
unknown_name(…)        the same for a command, a task, or another name out of a few
matching(rows, words)  the commands whose text has all of these words, to be printed
Parser                 argparse, whose errors are ValueErrors of one line
"""

import argparse
import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from regard.synonyms import first_word, synonym


def check_words(words: Sequence[str]) -> None:
    """Raises for words that are almost certainly mistakes, in any command."""
    for before, word in zip(["", *words], words):
        if not word or re.fullmatch(r"--[\w.-]+=", word):
            flag = word[:-1] or before
            what = f"{flag} is empty" if flag.startswith("-") else "a name is empty ('')"
            raise ValueError(f"{what}, perhaps from a variable that is not set; give it a value")
        if re.fullmatch(r"--[\w.-]+=--", word):
            raise ValueError(f"{word[:-3]} (--) is a flag without a name; give it a value")
        if match := re.fullmatch(r"-*[\u2010-\u2015\u2212]-*(?!inf)([A-Za-z].*)", word, re.DOTALL):
            raise ValueError(f"{word} has a dash that is not a hyphen; write --{match[1]}")
        if "\0" in word:
            raise ValueError(f"{word!r} has a NUL in it, which no name can have")


def check_columns() -> None:
    """Raises if COLUMNS is wider than lines can be filled up to."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and len(columns.lstrip("0")) > 5:
        raise ValueError(f"COLUMNS ({columns}) must be below 100000; unset it")


def check_once(words: Sequence[str], known: Callable[[str], str | None]) -> None:
    """Raises if a flag is given twice, since the first value would be lost.

    `known` gives a setting's name for the word that sets it, and None for all other words.
    """
    seen = set()
    for word in words:
        flag = word.partition("=")[0]
        name = known(flag)
        if name in seen:
            raise ValueError(f"{flag} is given twice; give it once, with all its values")
        if name is not None:
            seen.add(name)


def unknown_flag(flag: str, known: Iterable[str], prog: str) -> str:
    """The line about an unknown flag: another tool's word for one of ours, or a misspelling."""
    # Without the dashes, which would make all of them alike.
    bare = {name.lstrip("-"): name for name in known}
    word = flag.lstrip("-")
    settings = {name.rpartition(".")[2].replace("-", "_"): name for name in bare}
    ours = synonym(word.rpartition(".")[2], settings) or ""
    near = difflib.get_close_matches(word, bare, 1)
    meant = bare.get(settings.get(first_word(ours)) or (near[0] if near else ""))
    remedy = f"did you mean {meant}? See" if meant else "see"
    return f"{flag} is unknown; {remedy} {prog} --help"


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    return f"{what} ({name!r}) is unknown; {remedy}"


def matching(rows: Iterable[tuple[str, str]], words: Sequence[str]) -> list[str]:
    """Commands, each with its text below, of which together every word is a part."""
    wanted = [word.casefold() for word in " ".join(words).split()]
    width = min(96, shutil.get_terminal_size().columns)
    lines = []
    for command, text in rows:
        if all(word in f"{command} {text}".casefold() for word in wanted):
            lines.append(command)
            lines += textwrap.wrap(text, width, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return lines


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ValueErrors of one line, which the command line prints."""

    def error(self, message: str) -> NoReturn:
        extra = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        what = f"{extra} is one word too many" if extra else _choice(message) or message
        raise ValueError(f"{what}{' See' if what.endswith('?') else '; see'} {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        actions = self._option_string_actions
        check_once(words, lambda flag: actions[flag].dest if flag in actions else None)
        # argparse would first report missing arguments, and leave a command's flags to `regard`.
        for word in self._own(words):
            flag = word.partition("=")[0]
            if re.match(r"--[A-Za-z]", flag) and flag not in actions:
                raise ValueError(unknown_flag(flag, actions, self.prog))
        return super().parse_known_args(words, namespace)

    def _own(self, words: list[str]) -> Iterable[str]:
        """The words that may be flags of this parser: none after `--`, or a command's name."""
        if "-" not in self.prefix_chars:
            return []
        commands = self._subparsers is not None
        return takewhile(lambda word: word != "--" and not (commands and word[0] != "-"), words)


def _choice(message: str) -> str | None:
    """The line about an unknown choice of argparse's, with the closest match."""
    pattern = r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)"
    match = re.fullmatch(pattern, message, re.DOTALL)
    if match is None:
        return None
    return unknown_name(match[1], match[2], re.findall(r"[\w./-]+", match[3]))
