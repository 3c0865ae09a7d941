"""The files that a visitor of the repository looks for agree with the package and each other."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import regard
from regard.cli.main import _parser
from tests.processes import HANG

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def stem(path: Path) -> str:
    return path.stem


# Workflows


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def scripts(path: Path) -> list[str]:
    """The scripts of a workflow, with those that its matrices list."""
    lines = [step["run"] for step in steps(path) if "run" in step]
    for job in read(path)["jobs"].values():
        for case in job.get("strategy", {}).get("matrix", {}).get("include", ()):
            lines += [script for name, script in case.items() if name == "run"]
            lines += [f"make {target}" for name, target in case.items() if name == "target"]
    return [script for script in lines if "matrix.run" not in script]


@pytest.mark.parametrize("path", WORKFLOWS, ids=stem)
def test_workflows_may_only_read_and_end_in_time(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "github.ref" in workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] < 360
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, GITHUB / "actions" / "setup" / "action.yml"], ids=stem
)
def test_actions_are_pinned(path: Path) -> None:
    for used in re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8")):
        if used.startswith("./"):
            assert (ROOT / used / "action.yml").is_file()
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40})", used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=stem)
def test_the_steps_of_workflows_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for script in scripts(path):
        plain = re.sub(r"\$\{\{.*?\}\}", "test", script)
        subprocess.run(["bash", "-n", "-c", plain], check=True, timeout=HANG)
        assert set(re.findall(r"\bmake ([a-z][a-z-]*)", plain)) <= targets
        for extras in re.findall(r'"\.\[([\w,]+)\]"', plain):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        for words in re.findall(r"^regard (.*)$", plain, re.MULTILINE):
            _parser().parse_args(words.split())


def test_every_version_of_python_is_tested() -> None:
    cases = read(GITHUB / "workflows" / "tests.yml")["jobs"]["linux"]["strategy"]["matrix"]
    named = [re.search(r":: (3\.\d+)$", line) for line in PROJECT["classifiers"]]
    promised = [match[1] for match in named if match]
    tested = {case["python"] for case in cases["include"] if case["target"] == "test"}
    assert tested == set(promised)
    assert PROJECT["requires-python"] == f">={promised[0]}"


# Forms, addresses, citation


@pytest.mark.parametrize("path", FORMS, ids=stem)
def test_issue_forms_ask_for_what_they_name(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) > 0
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
    commands = re.findall(r"`regard (\w+)`", path.read_text(encoding="utf-8"))
    for command in commands:
        _parser().parse_args([command])


def test_addresses_agree_with_the_metadata() -> None:
    (maintainer,) = PROJECT["maintainers"]
    assert all(url.startswith(REPOSITORY) for url in PROJECT["urls"].values())
    assert maintainer["email"] in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for link in read(GITHUB / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]:
        assert link["url"].startswith(f"{REPOSITORY}/")
    assert read(ROOT / "CITATION.cff")["repository-code"] == REPOSITORY


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == regard.__version__
    assert citation["abstract"] == PROJECT["description"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_hooks_run_what_lint_runs() -> None:
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    lint = re.findall(r"^\t\$\(BIN\)/([\w-]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for hook in hooks:
        tool = hook["entry"].split()[0]
        if tool.startswith(".venv/bin/"):
            assert Path(tool).name in lint
        else:
            assert (ROOT / tool).is_file()
