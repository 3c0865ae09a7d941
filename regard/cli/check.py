"""The command `check`: numerical checks of a model on its training data or yours.

regard check RUN
regard check RUN --data test.en
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from regard.checks import Finding, Report
from regard.checks import check as check_model
from regard.cli.arguments import with_folder
from regard.machine.device import use


@dataclass(frozen=True)
class Check:
    """Checks that all ways to compute a model agree: fused and by the formula, packed
    and padded, cached and not, in every engine, exported, saved, resumed. Prints the largest
    difference of each. The exit code is 1 where one is beyond its tolerance."""

    data: tuple[str, ...] = ()
    """Files to check the model on: lines of text, or images. By default the training data, or
    random inputs if that is gone."""
    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1."""
    json: bool = False
    """Print one JSON object, for programs."""


def check(words: Sequence[str]) -> int:
    """`regard check RUN …`."""
    folder, options = with_folder("check", Check, Check(), words)
    live = sys.stderr.isatty() and not options.json
    use(options.device)
    report = check_model(
        folder,
        data=options.data,
        device=options.device,
        progress=_print_progress if live else None,
    )
    if live:
        print("\r\033[K", end="", file=sys.stderr)
    if options.json:
        _print_json(report)
    else:
        print(report.table())
        for remedy in report.remedies():
            print(f"regard: {remedy}", file=sys.stderr)
    return int(not report.holds)


def _print_progress(name: str) -> None:
    print(f"\r\033[K{name} …", end="", file=sys.stderr, flush=True)


def _print_json(report: Report) -> None:
    everything = {
        "folder": report.subject,
        "data": report.origin,
        "holds": report.holds,
        "properties": [_plain(finding) for finding in report],
    }
    print(json.dumps(everything, ensure_ascii=False))


def _plain(finding: Finding) -> dict[str, object]:
    """JSON has no infinity and no NaN."""
    properties = asdict(finding)
    if finding.difference is not None and not abs(finding.difference) < float("inf"):
        properties["difference"] = str(finding.difference)
    return properties
