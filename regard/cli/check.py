"""The command `check`: the equivalence contract, measured on one's own model and data.

regard check RUN
regard check RUN --data test.en
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from regard.checks import Finding
from regard.checks import check as measured
from regard.cli.arguments import with_folder
from regard.device import use


@dataclass(frozen=True)
class Check:
    """Checks that a model computes the same in each of its ways: fused and by the formula, packed
    and padded, cached and not, in every engine, exported, saved, resumed. Prints the largest
    difference of each. The exit code is 1 where one is beyond its tolerance."""

    data: tuple[str, ...] = ()
    """Files to check the model on: lines of text, or images. By default what it was trained on, or
    where that is gone random inputs."""
    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1."""
    json: bool = False
    """Print one JSON object, for programs."""


def check(words: Sequence[str]) -> int:
    """`regard check RUN …`."""
    folder, options = with_folder("check", Check, Check(), words)
    live = sys.stderr.isatty() and not options.json
    use(options.device)
    subject, findings = measured(
        folder, data=options.data, device=options.device, told=_shown if live else None
    )
    if live:
        print("\r\033[K", end="", file=sys.stderr)
    if options.json:
        _print_json(folder, subject.origin, findings)
    else:
        _print(folder, subject.origin, len(subject.examples), findings)
    return int(any(finding.status == "fails" for finding in findings))


def _shown(name: str) -> None:
    print(f"\r\033[K{name} …", end="", file=sys.stderr, flush=True)


def _print(folder: Path, origin: str, count: int, findings: Sequence[Finding]) -> None:
    print(f"{folder}, on {count} examples: {origin}\n")
    width = max(len(finding.name) for finding in findings)
    print(f"  {'':{width}}  {'largest':>9}  {'allowed':>9}")
    for finding in findings:
        mark = {"holds": "✓", "fails": "✗", "skipped": "·"}[finding.status]
        found = "" if finding.difference is None else f"{finding.difference:.2g}"
        allowed = "" if finding.difference is None else f"{finding.tolerance:.2g}"
        print(f"{mark} {finding.name:{width}}  {found:>9}  {allowed:>9}  {finding.of}")
    for finding in findings:
        if finding.status == "fails":
            print(
                f"regard: {finding.name} does not hold ({finding.difference:.2g}, and "
                f"{finding.tolerance:.2g} are allowed): {finding.remedy}",
                file=sys.stderr,
            )


def _print_json(folder: Path, origin: str, findings: Sequence[Finding]) -> None:
    everything = {
        "folder": str(folder),
        "data": origin,
        "holds": all(finding.status != "fails" for finding in findings),
        "properties": [_plain(finding) for finding in findings],
    }
    print(json.dumps(everything, ensure_ascii=False))


def _plain(finding: Finding) -> dict[str, object]:
    """JSON has no infinity and no NaN."""
    found = asdict(finding)
    if finding.difference is not None and not abs(finding.difference) < float("inf"):
        found["difference"] = str(finding.difference)
    return found
