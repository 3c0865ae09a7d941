"""Packages that only some uses need, and the line that installs them.

The core is small: torch, tokenizers and what a command line wants. Everything else is imported
where it is used; where it is missing, a command says which extra of `pip install` brings it.
"""

import shlex
from pathlib import Path

from regard.machine.shell import python, short

EXTRAS = {
    "vision": ("PIL",),
    "demo": ("babel", "sklearn"),
    "plots": ("matplotlib",),
    "lab": ("latex2mathml",),
    "train": ("tensorboard", "yaml"),
    "text": ("pyarrow", "sentencepiece", "zstandard"),
    "serve": ("fastapi", "httptools", "uvicorn", "uvloop"),
    "export": ("ctranslate2", "onnx", "onnxruntime", "onnxscript", "transformers"),
}
"""The modules that each extra adds, by the extra that installs least beside them."""


def install(extra: str) -> str:
    """The line that installs an extra for this interpreter; in a checkout, at tested versions."""
    checkout = Path(__file__).parent.parent.parent
    constraints = checkout / "constraints.txt"
    if not constraints.is_file():
        return install_package(f"regard[{extra}]")
    path = shlex.split(short(checkout))[0]
    return f"{python()} -m pip install -c {short(constraints)} -e {shlex.quote(f'{path}[{extra}]')}"


def install_package(name: str) -> str:
    """The line that installs a package for this interpreter."""
    return f"{python()} -m pip install {shlex.quote(name)}"


def remedy(error: ImportError) -> str | None:
    """What to do about a module that is not there; None where it is none of ours to ask for."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if name in modules:
            return f"this needs {name}, which is not installed: {install(extra)}"
    return None
