"""From words to settings: every setting of a dataclass is a flag, its docstring the flag's help."""

import contextlib
import dataclasses
import io
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.config import fits_64_bits
from regard.machine.command_line import check_once, unknown_flag

Settings = TypeVar("Settings")


def with_folder(
    command: str, kind: type[Settings], default: Settings, words: Sequence[str]
) -> tuple[Path, Settings]:
    """A folder and what the flags say, in any order; `--help` needs no folder."""
    folder, names, options = with_inputs(command, kind, default, words)
    if names:
        raise ValueError(f"{command} takes one folder, {folder}, and {names[0]} is another word")
    return folder, options


def with_inputs(
    command: str, kind: type[Settings], default: Settings, words: Sequence[str], after: str = ""
) -> tuple[Path, list[str], Settings]:
    """The folder, which is the first name, the names after it, and what the flags say.

    `after` is what the help calls these names.
    Flags may stand before, between and after the names; one that takes any number of values takes
    all that follow it. After a lone `--` there are only names.
    """
    names, flags = _names(kind, words)
    if not names and not {"-h", "--help"} & set(words):
        raise ValueError(
            f"{command} needs a run's or a model's folder, before any flag that takes several "
            f"values: regard {command} RUN"
        )
    options = parse(kind, default, flags, f"regard {command} RUN{after}")
    return Path(names[0]), names[1:], options


def _names(kind: type[Any], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are no flags, nor values of one, and the others."""
    counts: dict[str, int | None] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        bare, *extras = (
            (hint.__origin__, *hint.__metadata__) if get_origin(hint) is Annotated else (hint,)
        )
        aliases = [alias for extra in extras for alias in getattr(extra, "aliases", None) or ()]
        counts |= dict.fromkeys([f"--{name.replace('_', '-')}", *aliases], _values(bare))
    names: list[str] = []
    flags: list[str] = []
    waiting: int | None = 0  # values that the last flag still takes; None for any number
    for n, word in enumerate(words):
        if word == "--":
            return [*names, *words[n + 1 :]], flags
        if waiting and waiting > 0:
            flags.append(word)
            waiting -= 1
        elif re.match(r"--?[A-Za-z]", word):
            flags.append(word)
            waiting = 0 if "=" in word else counts.get(word.replace("_", "-"), 0)
        elif waiting is None:
            flags.append(word)
        else:
            names.append(word)
    return names, flags


def _values(hint: Any) -> int | None:
    """How many words a flag of this type takes; None for any number."""
    kinds = [one for one in get_args(hint) if one is not NoneType]
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return _values(kinds[0])
    if hint is bool:
        return 0
    if get_origin(hint) is tuple:
        return None if kinds[-1] is Ellipsis else len(kinds)
    return 1


def parse(
    kind: type[Settings],
    default: Settings,
    words: Sequence[str],
    prog: str,
    more: Sequence[str] = (),
) -> Settings:
    """Settings from flags. What is wrong with them is one line; `--help` explains all.

    `more` are flags that were read before, and may have been meant by one that is misspelt.
    """
    check_once(words, _setting)
    if {"-h", "--help"} & set(words):
        from regard.cli.help import help_lines

        print("\n".join(help_lines(kind, default, prog)))
        raise SystemExit(0)
    import tyro

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            settings = tyro.cli(kind, prog=prog, args=list(words), default=default)
    except SystemExit:
        program = prog.partition(" RUN")[0]
        problem = _one_line(errors.getvalue())
        if problem.startswith(_UNRECOGNIZED):
            raise ValueError(_unknown(kind, words, problem, program, more)) from None
        raise ValueError(f"{problem} (see {program} --help)") from None
    _check_numbers(settings)
    return settings


def spelled_out(kind: type[Any], words: Sequence[str]) -> list[str]:
    """The same words, with the names of nested settings in full where they are clear.

    `--minutes` is `--training.minutes`, since no other setting is called so.
    """
    full: dict[str, list[str]] = {}
    for path in setting_names(kind):
        full.setdefault(path.rpartition(".")[2].replace("_", "-"), []).append(path)
    return [_in_full(word, full) for word in words]


def setting_names(kind: type[Any]) -> Iterator[str]:
    """The names of all settings, those of sections with a dot."""
    return (path for path, _ in _settings(kind))


def _settings(kind: type[Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """The names of all settings, and their types."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _settings(hint, f"{inside}{field.name}.")
        else:
            yield f"{inside}{field.name}", hint


def _unknown(
    kind: type[Any], words: Sequence[str], problem: str, program: str, more: Sequence[str]
) -> str:
    """The line about a flag that is no setting's, or about a word that belongs to none."""
    known = [*more, *_flags(kind)]
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if re.match(r"--?[A-Za-z]", flag) and flag not in known:
            return unknown_flag(flag, known, program)
    extra = problem.removeprefix(_UNRECOGNIZED).partition(", ")[0]
    return f"{extra} is one word too many, and belongs to no flag; see {program} --help"


def _flags(kind: type[Any]) -> Iterator[str]:
    """Every flag, in full and, as it may also be written, without its section."""
    for path, hint in _settings(kind):
        section, dot, name = path.replace("_", "-").rpartition(".")
        bare = hint.__origin__ if get_origin(hint) is Annotated else hint
        for spelled in (name, *[f"no-{name}"] * (bare is bool)):
            yield from dict.fromkeys((f"--{spelled}", f"--{section}{dot}{spelled}"))
        for extra in hint.__metadata__ if get_origin(hint) is Annotated else ():
            yield from getattr(extra, "aliases", None) or ()


def _in_full(word: str, full: dict[str, list[str]]) -> str:
    match = re.fullmatch(r"--(no-)?([A-Za-z][\w-]*)(=.*)?", word, re.DOTALL)
    if match is None:
        return word
    negated, name, value = match[1] or "", match[2].replace("_", "-"), match[3] or ""
    paths = full.get(name, [])
    if len(paths) != 1 or "." not in paths[0]:
        return word
    section, _, last = paths[0].replace("_", "-").rpartition(".")
    return f"--{section}.{negated}{last}{value}"


def _setting(word: str) -> str | None:
    """The setting that a word sets; --training.no-tensorboard sets what its opposite does."""
    if not re.match(r"--[A-Za-z]", word):
        return None
    return re.sub(r"(?<=[-.])no-", "", word.replace("_", "-"))


def _check_numbers(settings: object) -> None:
    """Integers fit into 64 bits, and there is no NaN and no infinity."""
    for name, value in _numbers(settings):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} ({value}) must be a finite number")
        if isinstance(value, int) and not fits_64_bits(value):
            raise ValueError(f"{name} ({value}) does not fit into 64 bits; give a smaller number")


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            inner = f"{name}.{field.name}" if name else field.name
            yield from _numbers(getattr(value, field.name), inner)
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item, name)
    else:
        yield name, value


# What tyro says


_UNRECOGNIZED = "Unrecognized options: "


def _one_line(box: str) -> str:
    """tyro frames its errors, over several lines, and adds the help of each flag."""
    lines = [re.sub(r"[│╭╮╰╯─]+|[+-]{4,}", " ", line).strip(" |") for line in box.splitlines()]
    text = re.sub(r"\s+", " ", " ".join(lines[1:]))
    text = re.split(r" ?(?:Argument helptext:|For full helptext)", text)[0]
    problem = text.partition(" Perhaps you meant: ")[0]
    return _plainly(problem.strip().rstrip("."))


def _plainly(problem: str) -> str:
    """The same without Python's types and calls."""
    for pattern, words in _FORMS:
        if match := re.fullmatch(pattern, problem):
            return words(match)
    return problem


def _wanted(match: re.Match[str]) -> str:
    """A value that is of none of a flag's types."""
    given = match["given"].replace("', '", " ").strip("'")
    kinds = [_KINDS[kind] for kind in re.findall(rf"{_TYPE}(?: {_TYPE})*", match["kinds"])]
    value = f" ({given})" if given else ""
    return f"{match['flag']}{value} must be {' or '.join(kinds) or match['kinds']}"


_TYPE = r"(?:INT\|STR|INT|FLOAT)"

_KINDS = {
    "INT": "a whole number",
    "INT INT": "two whole numbers",
    "INT INT INT": "three whole numbers",
    "FLOAT": "a number",
    "FLOAT FLOAT": "two numbers",
    "INT|STR INT|STR": "two numbers or names",
}

_FORMS = (
    (
        r"Error parsing (?P<flag>--\S+): no type matching (?P<kinds>.*?) could be instantiated "
        r"from \[(?P<given>.*?)\]\..*",
        _wanted,
    ),
    (
        r"Error parsing (?P<flag>--\S+): invalid literal for int\(\) with base 10: (.*)",
        lambda match: f"{match['flag']} ({match[2]}) must be a whole number",
    ),
    (
        r"Error parsing (?P<flag>--\S+): could not convert string to float: (.*)",
        lambda match: f"{match['flag']} ({match[2]}) must be a number",
    ),
    (
        r"Error parsing (?P<flag>--\S+): Exceeds the limit .*",
        lambda match: f"{match['flag']} does not fit into 64 bits; give a smaller number",
    ),
    (
        r"Missing value for argument '(\S+)'\. Expected (\d+) values",
        lambda match: f"{match[1]} needs {match[2]} value{'s' * (match[2] != '1')}",
    ),
    (
        r"invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*)\)",
        lambda match: (
            f"{match[2]} ({match[1]}) must be one of "
            + ", ".join(sorted(re.findall(r"'([^']*)'", match[3])))
        ),
    ),
    # What a dataclass refuses, it names itself.
    (r"Error parsing [A-Z]\w*: (.*)", lambda match: match[1]),
    (r"Error parsing ([a-z]\w*): (.*)", lambda match: f"{match[1]}.{match[2]}"),
)


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
