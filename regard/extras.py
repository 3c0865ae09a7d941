"""Packages that only some uses need, and the line that installs them.

The core is small: torch, tokenizers and what a command line wants. Everything else is imported
where it is used; where it is missing, a command says which extra of `pip install` brings it.
"""

EXTRAS = {
    "vision": ("PIL",),
    "demo": ("babel", "sklearn"),
    "lab": ("latex2mathml", "matplotlib"),
    "train": ("tensorboard", "yaml"),
    "text": ("pyarrow", "sentencepiece", "zstandard"),
    "serve": ("fastapi", "httptools", "uvicorn", "uvloop"),
    "export": ("ctranslate2", "onnx", "onnxruntime", "onnxscript", "transformers"),
}
"""The first extra that brings each module, by the module's name."""


def install(extra: str) -> str:
    """The line that installs an extra."""
    return f"python -m pip install 'regard[{extra}]'"


def remedy(error: ImportError) -> str | None:
    """What to do about a module that is not there; None where it is none of ours to ask for."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if name in modules:
            return f"this needs {name}, which is not installed: {install(extra)}"
    return None
