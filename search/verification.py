"""Whether a result is right: compared with an fp64 reference, in a metric scaled to what the precision can do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelwright.kernels.operator import Result

WORST_ELEMENT = 40.0
"""The worst element may be off by this many times the tolerance, in units of the reference's root mean square and the
element's own size together.

Rounding moves an element by its own size, which under a causal mask is a hundred root mean squares for a query that
sees few keys. A single element that was never written, or belongs elsewhere, is off by about half of these units.
"""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """error: relative error (Frobenius norm). worst: the worst element's error over the root mean square
    plus its own size.

    reason: why the result is wrong; "" when it is right.
    """

    error: float
    worst: float
    reason: str = ""

    @property
    def right(self) -> bool:
        """Whether the result passed."""
        return not self.reason


def verify(out: Result, reference: Result, tolerance: float) -> Verdict:
    """Compare a result with its fp64 reference of the same shapes, on either's device; empty results are right.

    Of a result of several tensors the first wrong one is told, or the largest errors. An infinite element of the
    reference (the logarithm of an empty sum) must be met exactly.
    """
    if isinstance(out, tuple) or isinstance(reference, tuple):
        return _verify_all(out, reference, tolerance)
    if out.shape != reference.shape:
        return Verdict(float("inf"), float("inf"), f"shape must be {tuple(reference.shape)}, got {tuple(out.shape)}")
    if reference.numel() == 0:
        return Verdict(0.0, 0.0)
    met = reference.isinf() & (out == reference)
    difference = (out.double() - reference).masked_fill_(met, 0.0)
    scale = (reference.square().masked_fill_(met, 0.0).sum().item() / reference.numel()) ** 0.5
    off = (difference.square().sum().item() / reference.numel()) ** 0.5
    worst = (difference.abs() / (reference.abs() + scale)).max().item()
    if not off < float("inf"):
        bad = int((~difference.isfinite()).sum().item())
        return Verdict(
            float("inf"), float("inf"), f"{bad} of {reference.numel()} elements are not finite or not written"
        )
    # a reference of zeros has no scale: then errors count as they are
    error, worst = (off / scale, worst) if scale else (off, difference.abs().max().item())
    if error > tolerance:
        return Verdict(error, worst, f"relative error {error:.2e} is over {tolerance:.2e}")
    if worst > max(WORST_ELEMENT * tolerance, 1e-30):
        return Verdict(
            error,
            worst,
            f"one element is off by {worst:.2e} of its size and the usual one, over {WORST_ELEMENT * tolerance:.2e}",
        )
    return Verdict(error, worst)


def _verify_all(out: Result, reference: Result, tolerance: float) -> Verdict:
    ours, right = (part if isinstance(part, tuple) else (part,) for part in (out, reference))
    if len(ours) != len(right):
        return Verdict(float("inf"), float("inf"), f"result must have {len(right)} tensors, got {len(ours)}")
    verdicts = [verify(one, other, tolerance) for one, other in zip(ours, right, strict=True)]
    for place, verdict in enumerate(verdicts):
        if not verdict.right:
            return dataclasses.replace(verdict, reason=f"tensor {place} of the result: {verdict.reason}")
    return Verdict(max(verdict.error for verdict in verdicts), max(verdict.worst for verdict in verdicts))
