"""The example scripts under both type checkers: python -m tests.checkers

mypy (--strict) and pyright (strict) must report no error in `examples/*.py`, and each line of
`tests/type_errors.py` that ends in `# wrong`, but no other.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WRONG = ROOT / "tests" / "type_errors.py"
FILES = [*sorted((ROOT / "examples").glob("*.py")), WRONG]


def errors_of_mypy(files: list[Path]) -> list[tuple[Path, int]]:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    command += ["--follow-imports=silent", *map(str, files)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    output = _output(command, environment)
    return [(ROOT / name, int(n)) for name, n in re.findall(r"(?m)^(.*?):(\d+): error:", output)]


def errors_of_pyright(files: list[Path]) -> list[tuple[Path, int]]:
    config = {
        "include": [str(file) for file in files],
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT)],
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "pyrightconfig.json"
        place.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "basedpyright", "--project", str(place), "--outputjson"]
        report = json.loads(_output([*command, "--pythonpath", sys.executable], dict(os.environ)))
    return [
        (Path(entry["file"]), entry["range"]["start"]["line"] + 1)
        for entry in report["generalDiagnostics"]
        if entry["severity"] == "error"
    ]


def _output(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: there are errors
        raise RuntimeError(f"{command[2]}: {done.stderr or done.stdout}")
    return done.stdout


def complaints(name: str, errors: list[tuple[Path, int]]) -> list[str]:
    """Errors that the checker should not report, and those that it does not report."""
    lines = WRONG.read_text(encoding="utf-8").splitlines()
    expected = {(WRONG, n) for n, line in enumerate(lines, 1) if line.endswith("# wrong")}
    found = set(errors)
    return [
        *(f"{name}: error in {path}:{line}" for path, line in sorted(found - expected)),
        *(f"{name}: no error in {path}:{line}" for path, line in sorted(expected - found)),
    ]


def main() -> int:
    problems = []
    for name, check in (("mypy", errors_of_mypy), ("pyright", errors_of_pyright)):
        errors = check(FILES)
        wrong = complaints(name, errors)
        problems += wrong
        lines = len({line for path, line in errors if path == WRONG})
        print(f"{name}: {len(FILES) - 1} examples, {lines} deliberate errors reported")
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
