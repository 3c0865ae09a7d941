"""The command `completion`: a script that has a shell complete commands, tasks and flags.

bash    regard completion bash > ~/.local/share/bash-completion/completions/regard
zsh     regard completion zsh > ~/.zfunc/_regard       with fpath=(~/.zfunc $fpath) before compinit
fish    regard completion fish > ~/.config/fish/completions/regard.fish

The script is plain text: pressing Tab starts no Python. It is written anew after an update.
"""

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence

from regard.machine.command_line import Parser

Flags = dict[str, list[str]]
"""The flags of each command, by its words: "translate", "train dates"."""


def completion(words: Sequence[str], run: Callable[[list[str]], object]) -> None:
    """`run` runs a command line, which is asked for its help."""
    parser = Parser(
        prog="regard completion",
        description="Prints a script that has a shell complete commands, tasks and flags.",
        epilog="bash: regard completion bash > ~/.local/share/bash-completion/completions/regard; "
        "zsh: into a folder of $fpath, as _regard; "
        "fish: regard completion fish > ~/.config/fish/completions/regard.fish",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    shell = parser.parse_args(list(words)).shell
    write = {"bash": bash, "zsh": zsh, "fish": fish}[shell]
    print(write(collected(run)), end="")


def collected(run: Callable[[list[str]], object]) -> Flags:
    """What every command says of itself."""
    from regard.task.specs import NAMES

    overview = _said(run, ["--help"])
    commands = re.findall(r"^ {4}([a-z][a-z0-9-]*)(?: |$)", overview, re.MULTILINE)
    found: Flags = {"": ["--debug", "--help", "--version"]}
    for name in commands:
        found[name] = _flags(_said(run, [name, "--help"]))
    for task in NAMES:
        found[f"train {task}"] = ["--size", *_flags(_said(run, ["train", task, "--help-all"]))]
    return found


def _said(run: Callable[[list[str]], object], words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run(words)
    return out.getvalue()


def _flags(text: str) -> list[str]:
    """The flags that a help explains, each at the beginning of a line."""
    found = re.findall(r"^[│|\s]*(?:-\w[^-\n]*?, )?(--[a-z][\w.-]*)", text, re.MULTILINE)
    return sorted({*found, "--help"} - {"--"})


def bash(flags: Flags) -> str:
    cases = "\n".join(
        f"    {_quoted(name)}) words={_quoted(' '.join(known))} ;;"
        for name, known in sorted(flags.items())
        if name
    )
    commands = " ".join(_commands(flags))
    return f"""# Completion of regard's commands, tasks and flags; regard completion bash wrote it.
_regard() {{
  local now="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "{commands} --debug --help --version" -- "$now"))
    return
  fi
  if [[ $command == train && $COMP_CWORD -eq 2 ]]; then
    COMPREPLY=($(compgen -W "{" ".join(_tasks(flags))} --resume --again --from --config" -- "$now"))
    return
  fi
  [[ $command == train ]] && command="train ${{COMP_WORDS[2]}}"
  case $command in
{cases}
  esac
  if [[ $now == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$now"))
  else
    COMPREPLY=($(compgen -f -- "$now"))
  fi
}}
complete -o filenames -F _regard regard
"""


def zsh(flags: Flags) -> str:
    """bash's function, which zsh can run."""
    return "#compdef regard\nautoload -U +X bashcompinit && bashcompinit\n" + bash(flags).replace(
        "regard completion bash", "regard completion zsh"
    )


def fish(flags: Flags) -> str:
    lines = ["# Completion of regard's commands, tasks and flags; regard completion fish wrote it."]
    commands = " ".join(_commands(flags))
    lines.append(f"complete -c regard -n __fish_use_subcommand -f -a {_quoted(commands)}")
    tasks = " ".join(_tasks(flags))
    seen = "__fish_seen_subcommand_from"
    none = f"'{seen} train; and not {seen} {tasks}'"
    lines.append(f"complete -c regard -n {none} -f -a {_quoted(tasks)}")
    for name, known in sorted(flags.items()):
        if not name:
            continue
        test = "; and ".join(f"{seen} {word}" for word in name.split())
        for flag in known:
            lines.append(f"complete -c regard -n {_quoted(test)} -l {flag[2:]}")
    return "\n".join(lines) + "\n"


def _commands(flags: Mapping[str, object]) -> list[str]:
    return [name for name in flags if name and " " not in name]


def _tasks(flags: Mapping[str, object]) -> list[str]:
    return [name.partition(" ")[2] for name in flags if name.startswith("train ")]


def _quoted(text: str) -> str:
    return f"'{text}'"
