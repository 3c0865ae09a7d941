"""The command `help`: which command, flag or setting has to do with some words.

regard help              what `regard --help` says
regard help WORDS …      every command and flag whose name or explanation has all of them

Settings are read from the files that define them, without importing these: that would import torch,
which takes longer than everything else here.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from regard.machine.command_line import matching
from regard.machine.shell import program, typed

HELP = """usage: regard help [WORD ...]

Searches commands, flags and the settings of training: prints each whose name or explanation has
all the words. The lab is searched by regard lab --find."""

PACKAGE = Path(__file__).parent.parent

Rows = Iterator[tuple[str, str]]
"""Flags, or commands, and what is said of them."""


def help_(words: Sequence[str], commands: argparse.ArgumentParser) -> int:
    if {"-h", "--help"} & {*words}:
        print(HELP)
        return 0
    wanted = list(words)
    if not wanted:
        commands.print_help()
        return 0
    lines = matching(((typed(command), text) for command, text in rows(commands)), wanted)
    if not lines:
        print(
            f"regard: no command or flag has to do with {' '.join(wanted)!r}; {program()} --help "
            f"lists the commands, {program()} lab --find {' '.join(wanted)} searches the lab",
            file=sys.stderr,
        )
        return 1
    print("\n".join(lines))
    return 0


def rows(commands: argparse.ArgumentParser) -> Rows:
    """Everything that can be found. What several commands have alike is one row."""
    told: dict[tuple[str, str], list[str]] = {}
    for command, parser, about in _commands(commands):
        yield f"regard {command}", about
        for flag, text in (*_actions(parser), *_flags(command)):
            told.setdefault((flag, text), []).append(command)
    for flag, text in _flags("answers"):
        told.setdefault((flag, text), []).append("lab answers")
    everywhere = [f"train {task} RUN" for task in _tasks()]
    for task, command in zip(_tasks(), everywhere):
        module = f"regard.task.{task}"
        yield f"regard {command}", next(_texts(_tree(module), "summary"), "")
        for flag, text in _settings(module, "Config"):
            told.setdefault((flag, text), []).append(command)
    for (flag, text), having in told.items():
        first = "train TASK RUN" if having == everywhere else having[0]
        others = [one for one in having[1:] if having != everywhere]
        also = f" (also {', '.join(one.removesuffix(' RUN') for one in others)})" if others else ""
        yield f"regard {first} {flag}", f"{text}{also}"


def _commands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {one.dest: one.help or "" for one in action._choices_actions}
            for name, command in action.choices.items():
                yield name, command, about[name]


def _tasks() -> tuple[str, ...]:
    for node in _tree("regard.checkpoint").body:
        match node:
            case ast.Assign(targets=[ast.Name("TASKS")], value=names):
                return tuple(ast.literal_eval(names))
    raise ValueError("regard/checkpoint.py has no TASKS")


def _actions(parser: argparse.ArgumentParser) -> Rows:
    """The flags of a command that `main.py` describes."""
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if flags and action.help and action.dest != "help":
            known = f": {', '.join(action.choices)}" if action.choices else ""
            yield flags[0], f"{action.help}{known}"


def _flags(command: str) -> Rows:
    """The flags of a command that describes itself: in a dataclass of its name, or to argparse."""
    kind = command.capitalize()
    for module in (f"regard.cli.{command}", "regard.cli.predict"):
        if _file(module).is_file() and _class(_tree(module), kind):
            yield from _settings(module, kind)
            return
    for module in (f"regard.cli.{command}", f"regard.lab.commands.{command}"):
        if _file(module).is_file():
            yield from _overview(_tree(module))
            yield from _arguments(_tree(module))


def _settings(module: str, kind: str, section: str = "") -> Rows:
    """The settings of a dataclass, with those that it inherits, and of the sections within."""
    tree = _tree(module)
    found, home = _class(tree, kind), _imported(tree)
    if found is None:
        if kind in home:
            yield from _settings(home[kind], kind, section)
        return
    for base in found.bases:
        if isinstance(base, ast.Name):
            yield from _settings(home.get(base.id, module), base.id, section)
    for field, after in zip(found.body, [*found.body[1:], None]):
        match field:
            case ast.AnnAssign(target=ast.Name(name), annotation=ast.Name(inner)):
                inside = list(_settings(home.get(inner, module), inner, f"{section}{name}."))
                yield from inside
                if inside:
                    continue
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(name), annotation=annotation),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                choices = ", ".join(_choices(tree, annotation))
                known = f" One of: {choices}." if choices else ""
                flag = f"--{section}{name}".replace("_", "-")
                yield flag, " ".join(text.split()) + known


def _choices(tree: ast.Module, annotation: ast.AST | None) -> list[str]:
    """The names that a `Literal` lists, or an alias of one."""
    match annotation:
        case ast.Subscript(value=ast.Name("Literal"), slice=names):
            return [str(node.value) for node in ast.walk(names) if isinstance(node, ast.Constant)]
        case ast.BinOp(left=left):  # Literal[…] | None
            return _choices(tree, left)
        case ast.Name(alias):
            for node in tree.body:
                match node:
                    case ast.AnnAssign(target=ast.Name(name), value=value) if name == alias:
                        return _choices(tree, value)
            home = _imported(tree).get(alias)
            return _choices(_tree(home), annotation) if home else []
    return []


def _overview(tree: ast.Module) -> Rows:
    """The flags in the text `OVERVIEW` of a file, without what is filled in later."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name("OVERVIEW")], value=ast.Constant(value=str(text))):
                for flag, words in re.findall(r"^  (--[\w-]+) +(.*(?:\n {6}.*)*)", text, re.M):
                    yield flag, re.sub(r" [^.]*\{\w+\}", "", " ".join(words.split()))


def _arguments(tree: ast.Module) -> Rows:
    """The flags that a file describes to argparse."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(args=[ast.Constant(value=str(flag)), *_]) if flag.startswith("--"):
                yield from ((flag, text) for text in _texts(node, "help"))


def _texts(node: ast.AST, name: str) -> Iterator[str]:
    """What calls within are given by this name, where it is a plain text."""
    for one in ast.walk(node):
        match one:
            case ast.keyword(arg=str(arg), value=ast.Constant(value=str(text))) if arg == name:
                yield text


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    found = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return next(found, None)


def _imported(tree: ast.Module) -> dict[str, str]:
    """The modules of the names that a file imports from ours."""
    return {
        name.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("regard.")
        for name in node.names
    }


@cache
def _tree(module: str) -> ast.Module:
    path = _file(module)
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def _file(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
