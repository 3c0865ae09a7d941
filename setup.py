"""The description of the package: README.md with links that work outside of the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def absolute(link: re.Match[str]) -> str:
    kind = "raw" if link[1].endswith((".png", ".svg")) else "blob"
    return f"]({REPOSITORY}/{kind}/HEAD/{link[1]})"


README = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"\]\((?!#|\w+:)([^)]+)\)", absolute, README),
    long_description_content_type="text/markdown",
)
