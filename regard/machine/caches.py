"""Where Regard keeps what can be made again: tokenized text, decoded images, compiled kernels."""

import os
from pathlib import Path


def default_cache() -> Path:
    """The folder, unless a run names another."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "regard"
    try:
        return Path.home() / ".cache" / "regard"
    except RuntimeError as error:  # a user without a home
        raise OSError(f"{error}; name a folder in XDG_CACHE_HOME") from error
