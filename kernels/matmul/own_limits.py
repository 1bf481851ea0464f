"""Templates whose tiles follow other rules than those of a large single product."""

from __future__ import annotations

import dataclasses
import functools

from kernelwright.kernels.matmul.template import MatmulTemplate
from kernelwright.kernels.space import KnobSpace
from kernelwright.types import DeviceSpec, Workload

COMMON = frozenset({"workspace", "accumulator", "oversize", "pipeline", "tiny_tiles"})
"""Constraints of every other template; those made for experts, vectors and small matrices state their own."""


@dataclasses.dataclass(frozen=True)
class OwnLimits(MatmulTemplate):
    """A template whose space has no constraints but its own and the device's shared memory."""

    def space(self, workload: Workload, device: DeviceSpec) -> KnobSpace:
        """The legal schedules; empty where this template cannot run the workload."""
        return _own_space(self, workload, device)


@functools.lru_cache(maxsize=512)
def _own_space(template: OwnLimits, workload: Workload, device: DeviceSpec) -> KnobSpace:
    space = MatmulTemplate.space(template, workload, device)
    kept = [constraint for constraint in space.constraints if constraint.name not in COMMON]
    return KnobSpace(template.name, list(space.knobs.values()), kept)
