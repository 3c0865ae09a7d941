"""The result of a check: one finding for each property, printed as a table."""

import html
from collections.abc import Iterator
from dataclasses import dataclass

from regard.checks.finding import Finding


@dataclass(frozen=True, repr=False)
class Report:
    """The findings of a check; it prints as a table, and is true if every property holds."""

    subject: str
    """The model or its folder."""
    examples: int
    """The number of examples that the model was checked on."""
    origin: str
    """Where the examples come from."""
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """True if no property fails; skipped ones do not count."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings whose difference exceeds the tolerance."""
        return tuple(finding for finding in self.findings if finding.status == "fails")

    def table(self) -> str:
        """One line for each property: the largest difference, the tolerance, what they are of."""
        width = max((len(finding.name) for finding in self.findings), default=0)
        lines = [f"{self.subject}, on {self.examples} examples: {self.origin}", ""]
        lines.append(f"  {'':{width}}  {'largest':>9}  {'allowed':>9}")
        for finding in self.findings:
            mark = {"holds": "✓", "fails": "✗", "skipped": "·"}[finding.status]
            largest, allowed = (
                "" if finding.difference is None else f"{value:.2g}"
                for value in (finding.difference, finding.tolerance)
            )
            lines.append(f"{mark} {finding.name:{width}}  {largest:>9}  {allowed:>9}  {finding.of}")
        return "\n".join(lines)

    def remedies(self) -> list[str]:
        """One line for each property that fails."""
        return [
            f"{finding.name} does not hold ({finding.difference:.2g}, and {finding.tolerance:.2g} "
            f"are allowed): {finding.remedy}"
            for finding in self.failures
        ]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __bool__(self) -> bool:
        return self.holds

    def __repr__(self) -> str:
        return "\n".join([self.table(), *(f"\n{remedy}" for remedy in self.remedies())])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"
