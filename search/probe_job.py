"""The probe: the same two pieces of work on every machine, a large product and a large copy, timed by the common timer.

Two GPUs of one kind that differ in it are not cooled, powered or configured alike, and their times do not compare.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelwright.search.timing import Timer

SIZE = 4096
COPY_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class ProbeJob:
    """Time the probe."""


def probe_times(timer: Timer) -> tuple[float, float]:
    """Microseconds of a bf16 product of two SIZE x SIZE matrices by the vendor library, and of a copy of COPY_BYTES."""
    # Late, because it is the GPU stack.
    import torch

    from kernelwright.search.timing import SCREEN, median

    a = torch.randn(SIZE, SIZE, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(a)
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    calls = [lambda: torch.mm(a, a, out=out), lambda: target.copy_(source)]
    product, copy = timer.samples(calls, SCREEN)
    return median(product), median(copy)
