"""Times of pieces of graphs: what a compiler makes of a piece, beside the same piece with kernels of ours in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from kernelwright.types import digest


@dataclasses.dataclass(frozen=True)
class PieceTimes:
    """One piece on one device with one toolchain.

    piece: digest of its operators, sizes, strides and types. text: what it is, in words. theirs_us: by Inductor alone.
    ours_us: by the key of what was put in (see `option_key`); one that gave wrong results or could not run is missing.
    failures: why, by the same keys. noise: relative band inside which two times count as equal.
    """

    piece: str
    device_key: str
    toolchain_key: str
    text: str
    theirs_us: float
    ours_us: Mapping[str, float]
    failures: Mapping[str, str]
    noise: float

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary of JSON values."""
        return dataclasses.asdict(self) | {"ours_us": dict(self.ours_us), "failures": dict(self.failures)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The value that `to_json` wrote; TypeError for other fields."""
        return cls(**data)

    def knows(self, option: str) -> bool:
        """Whether this was put in and tried."""
        return option in self.ours_us or option in self.failures

    def wins(self, option: str) -> bool:
        """Whether the piece is faster with this in it, by more than the noise."""
        return option in self.ours_us and self.ours_us[option] < self.theirs_us * (1 - self.noise)


def option_key(kind: str, workload_key: str, schedule_key: str) -> str:
    """The key of putting a schedule of a workload into a piece. kind: what was done to the graph for it."""
    return digest([kind, workload_key, schedule_key])
