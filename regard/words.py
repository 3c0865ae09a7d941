"""The words of a command line, before anybody makes settings of them.

check_words(words)     refuses empty words, and dashes that only look like hyphens
check_once(words)      refuses a flag that is given twice
Parser                 argparse, whose errors are ValueErrors of one line
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


def check_words(words: Sequence[str]) -> None:
    """What is hardly ever meant is refused, whatever the command."""
    for before, word in zip(["", *words], words):
        if not word or re.fullmatch(r"--[\w.-]+=", word):
            flag = word[:-1] or before
            what = f"{flag} is empty" if flag.startswith("-") else "a name is empty ('')"
            raise ValueError(f"{what}, perhaps from a variable that is not set; give it a value")
        if match := re.fullmatch(r"-*[\u2010-\u2015\u2212]-*(?!inf)([A-Za-z].*)", word, re.DOTALL):
            raise ValueError(f"{word} has a dash that is not a hyphen; write --{match[1]}")
        if "\0" in word:
            raise ValueError(f"{word!r} has a NUL in it, which no name can have")


def check_once(words: Sequence[str], known: Callable[[str], str | None]) -> None:
    """Of two values for one flag the first would be lost without a word.

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


class Parser(argparse.ArgumentParser):
    """argparse, in one line: what is wrong is a ValueError, which the command line prints."""

    def error(self, message: str) -> NoReturn:
        what = _choice(message) or message
        raise ValueError(f"{what}{' See' if what.endswith('?') else '; see'} {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        actions = self._option_string_actions
        check_once(words, lambda flag: actions[flag].dest if flag in actions else None)
        return super().parse_known_args(words, namespace)


def _choice(message: str) -> str | None:
    """argparse's line about a word that is none of the known ones, and what was meant perhaps."""
    pattern = r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)"
    match = re.fullmatch(pattern, message, re.DOTALL)
    if match is None:
        return None
    known = re.findall(r"[\w./-]+", match[3])
    near = difflib.get_close_matches(match[2], known, 1)
    remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    return f"{match[1]} ('{match[2]}') is unknown; {remedy}"
