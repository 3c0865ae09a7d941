"""What can be typed into the user's shell as it is shown: this program, its interpreter, a path.

typed(text)     with program() for every regard that begins a command
program()       regard where that is on PATH, else .venv/bin/regard or python -m regard
python()        python where that is this interpreter, else its path
short(path)     from the working directory where it lies inside, and quoted where that is needed
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path


def typed(text: str) -> str:
    """Commands at the beginning of lines, and after a pipe, as they work from here."""
    return re.sub(
        r"(^ *|\| )regard(?= )", lambda match: match[1] + program(), text, flags=re.MULTILINE
    )


def program() -> str:
    """How this program was started; regard where somebody else's program calls it."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.resolve().parent == Path(__file__).parent.parent:
        return f"{python()} -m regard"
    if started.stem != "regard" or _on_path("regard", started):
        return "regard"
    return _by_path(started)


def python() -> str:
    """The running interpreter."""
    if not sys.executable:  # embedded
        return "python"
    names = ("python", "python3", Path(sys.executable).name)
    known = next((name for name in names if _on_path(name, Path(sys.executable))), None)
    return known or _by_path(Path(sys.executable))


def short(path: Path) -> str:
    # Not resolved: an environment's interpreter is a link to that of the system.
    whole = os.path.abspath(path)
    here = os.path.join(os.getcwd(), "")
    inside = os.path.relpath(whole) if f"{whole}{os.sep}".startswith(here) else whole
    return shlex.quote(inside)


def _by_path(file: Path) -> str:
    """A program by its path: its name alone would be looked for on PATH."""
    shown = short(file)
    return shown if os.sep in shown else os.path.join(os.curdir, shown)


def _on_path(name: str, path: Path) -> bool:
    """Whether a shell finds this file by this name."""
    found = shutil.which(name)
    return found is not None and os.path.abspath(found) == os.path.abspath(path)
