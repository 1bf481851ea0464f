"""One step of a model as it is timed and compared: inference, or forward and backward of a scalar loss."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

LEAST_SHARE = 1e-3
"""A gradient smaller than this share of the largest one is compared as if it had that size: a bias in front of a batch
norm, for one, has a gradient of zero, which rounding makes to something."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A model and its inputs. One in training whose weights take gradients gives a loss, and is run backward too."""

    model: torch.nn.Module
    inputs: Sequence[torch.Tensor]

    @property
    def trains(self) -> bool:
        """Whether gradients belong to a step."""
        return self.model.training and bool(self.weights)

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """What gradients are taken of."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def run(self, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """What the model, or something made of it, gives: its output, or its loss and a gradient of each weight."""
        with torch.set_grad_enabled(self.trains):
            out = call(*self.inputs)
            if not self.trains:
                return [out]
            found = torch.autograd.grad(out, self.weights, allow_unused=True)
        given = [torch.zeros_like(w) if g is None else g for g, w in zip(found, self.weights, strict=True)]
        return [out.detach(), *given]

    def precise(self) -> list[torch.Tensor]:
        """The step by torch alone in fp32; the model is as it was afterwards."""
        with self._in_fp32() as wide, torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return wide.run(self.model)

    @contextlib.contextmanager
    def _in_fp32(self) -> Iterator[Step]:
        kind = next(self.model.parameters()).dtype
        self.model.float()
        try:
            yield Step(self.model, [x.float() if x.is_floating_point() else x for x in self.inputs])
        finally:
            self.model.to(kind)


def errors(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> dict[str, float]:
    """`error` of the output or the loss and, where there are gradients, `gradient_error` of all of them as one vector,
    and `worst_gradient`, the largest of a single weight."""
    told: dict[str, Any] = {"error": relative_error(found[0], want[0])}
    if len(want) > 1:
        off = [_norm(got.float() - exact.float()) for got, exact in zip(found[1:], want[1:], strict=True)]
        sizes = [_norm(exact) for exact in want[1:]]
        told["gradient_error"] = _together(off) / _together(sizes)
        least = LEAST_SHARE * max(sizes)
        told["worst_gradient"] = max(one / max(size, least) for one, size in zip(off, sizes, strict=True))
    return {name: float(f"{value:.3g}") for name, value in told.items()}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """In the Frobenius norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _together(norms: Sequence[float]) -> float:
    return float(torch.tensor(norms, dtype=torch.float64).norm())
