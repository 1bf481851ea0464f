"""What the backend did with each product, convolution and attention, and why: options={"report": Report()}."""

from __future__ import annotations

import dataclasses
from typing import Any

from kernelwright.types import Schedule, Workload


@dataclasses.dataclass(frozen=True)
class Decision:
    """One product, convolution or attention of a compiled graph.

    node: its name in the graph. workload: what was looked up last, None if it never came to that.
    replaced: whether our kernel stands there now. reason: why, or why not.
    schedule, expected_us, vendor_us: the answer's, where there was one; times in microseconds.
    """

    node: str
    workload: Workload | None
    replaced: bool
    reason: str
    schedule: Schedule | None = None
    expected_us: float | None = None
    vendor_us: float | None = None


@dataclasses.dataclass
class Report:
    """Collects decisions over all graphs of a compiled model.

    inductor_options: the Inductor settings that `mode` and `options` changed, by name.
    warnings: what went wrong on our side and was left to Inductor.
    A graph taken from a cache is not decided again, so a compile with a report does not use Inductor's graph cache
    unless the options say fx_graph_cache=True; then it tells nothing of graphs that come from there.
    """

    decisions: list[Decision] = dataclasses.field(default_factory=list)
    inductor_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def replaced(self) -> list[Decision]:
        """The products that our kernels compute now."""
        return [decision for decision in self.decisions if decision.replaced]

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} of {len(self.decisions)} products replaced"]
        lines += [f"  {_mark(d)} {d.workload or d.node}: {d.reason}" for d in self.decisions]
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.warnings)])


def _mark(decision: Decision) -> str:
    return "+" if decision.replaced else "-"
