"""What `deploy/` says is true, as far as it can be run without Docker."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from regard.cli.arguments import parse
from regard.cli.serve import Serve

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, with lines that go on joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_the_dockerfile_copies_what_there_is() -> None:
    copied = [words.split()[:-1] for name, words in instructions() if name == "COPY"]
    assert copied
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists(), name


def test_the_dockerfile_is_a_careful_one() -> None:
    names = [name for name, _ in instructions()]
    known = {
        *("FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "VOLUME", "STOPSIGNAL"),
        *("HEALTHCHECK", "ENTRYPOINT", "CMD"),
    }
    assert set(names) <= known
    assert names.index("USER") < names.index("ENTRYPOINT")
    for name, words in instructions():
        if name == "FROM":
            assert ":" in words or words == "build"
            assert ":latest" not in words
        if name == "RUN" and "pip install" in words:
            assert words.count("pip install") == words.count("-c constraints.txt")
        if name == "RUN" and "apt-get" in words:
            assert "rm -rf /var/lib/apt/lists" in words


def test_its_command_is_understood() -> None:
    command = next(words for name, words in instructions() if name == "CMD")
    words = yaml.safe_load(command)
    entry = yaml.safe_load(next(words for name, words in instructions() if name == "ENTRYPOINT"))
    assert entry == ["regard", "serve"]
    options = parse(Serve, Serve(), words[1:], "regard serve RUN")
    assert (options.host, options.precision) == ("0.0.0.0", "int8")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert compose["services"]["regard"]["command"] == words


def test_the_extra_that_is_installed_exists() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installed = " ".join(words for name, words in instructions() if name == "RUN")
    assert re.findall(r"'\.\[(\w+)\]'", installed) == ["serve"]
    assert "serve" in extras


def test_compose_is_closed_to_the_outside() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:")
    ours = compose["services"]["regard"]
    assert ours["read_only"] is True
    assert ours["cap_drop"] == ["ALL"]
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["regard:8000"]
    assert (
        "./prometheus.yaml:/etc/prometheus/prometheus.yml:ro"
        in compose["services"]["prometheus"]["volumes"]
    )


def test_the_health_check_is_python() -> None:
    words = next(words for name, words in instructions() if name == "HEALTHCHECK")
    command = yaml.safe_load(words.partition("CMD")[2].strip())
    compile(command[2], "health", "exec")
    assert shlex.join(command).startswith("python -c")


pytestmark = pytest.mark.usefixtures("unchecked")
