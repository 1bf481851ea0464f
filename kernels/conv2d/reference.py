"""The right answer of a convolution, in fp64, checked by another way of computing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kernelwright.kernels.conv2d.inputs import operand_name
from kernelwright.kernels.conv2d.workload import OPERANDS, Problem

if TYPE_CHECKING:
    import torch

LARGEST_PART = 2**27
"""Elements of an image that are widened to fp64 at a time, about 1 GB of them."""

SAMPLES = 48


@functools.cache
def activations() -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Each activation of an epilogue as torch computes it."""
    import torch
    import torch.nn.functional as functional

    return {
        "relu": torch.relu,
        "relu6": functional.relu6,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "hardswish": functional.hardswish,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }


def finished(out: torch.Tensor, inputs: Mapping[str, torch.Tensor], epilogue: tuple[str, ...]) -> torch.Tensor:
    """The epilogue on out [N, K, P, Q], in its own type; operands are cast to it."""
    for position, step in enumerate(epilogue):
        if step not in OPERANDS:
            out = activations()[step](out)
            continue
        value = inputs[operand_name(epilogue, position)].to(out.dtype)
        value = value.view(-1, 1, 1) if OPERANDS[step] == "k" else value
        out = out + value if step in ("bias", "residual") else out * value
    return out


def convolve(problem: Problem, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The result without its epilogue, in fp64, by torch's own fp64 convolution; operands as Problem.operands names
    them. Images are widened part by part."""
    import torch

    p = problem
    most = max(first[:1].numel(), second[:1].numel() if p.result == "w" else 0, 1)
    step = max(1, LARGEST_PART // most)
    if p.result == "w":
        total = torch.zeros(p.shapes["w"], dtype=torch.float64, device=first.device)
        for x, d_out in zip(first.split(step), second.split(step), strict=True):
            if len(x):
                total += _one_call(p, x.double(), d_out.double())
        return total
    weight = second.double()
    parts = [_one_call(p, image.double(), weight) for image in first.split(step) if len(image)]
    return torch.cat(parts) if parts else torch.empty(p.shapes[p.result], dtype=torch.float64, device=first.device)


def _one_call(p: Problem, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    import torch.nn.functional as functional
    from torch.nn import grad

    rest: dict[str, Any] = {
        "stride": p.stride,
        "padding": p.padding,
        "dilation": p.dilation,
        "groups": p.groups,
    }
    found: torch.Tensor
    if p.transposed:
        found = functional.conv_transpose2d(first, second, output_padding=p.output_padding, **rest)
    elif p.result == "out":
        found = functional.conv2d(first, second, **rest)
    elif p.result == "x":
        found = grad.conv2d_input((len(first), *p.shapes["x"][1:]), second, first, **rest)
    else:
        found = grad.conv2d_weight(first, p.shapes["w"], second, **rest)
    return found


def sampled_error(problem: Problem, first: torch.Tensor, second: torch.Tensor, found: torch.Tensor) -> float:
    """Relative error of `found` at random places, where the sum is written out tap by tap: a library that drops part of
    a sum, or takes a wrong pixel, is seen here. 0.0 for empty results."""
    import torch

    if found.numel() == 0:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    sampled = _weight_sums if problem.result == "w" else _pixel_sums
    want, got = sampled(problem, first, second, found, generator)
    scale = want.norm().item()
    return float((got - want).norm().item() / scale if scale else got.norm().item())


def _places(sizes: tuple[int, ...], count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random index tuples [count, dimensions], the last element's place among them."""
    import torch

    columns = [torch.randint(0, size, (count,), generator=generator) for size in sizes]
    places = torch.stack(columns, 1)
    places[0] = torch.tensor(sizes) - 1
    return places


def _taps(p: Problem, at: torch.Tensor, axis: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, whether there is one) [places, taps] of the operand's pixels that meet at the result's pixels `at`."""
    import torch

    taps = torch.arange((p.r, p.s)[axis], device=at.device) * p.dilation[axis]
    if p.scatters:
        apart = at[:, None] + p.padding[axis] - taps
        index, whole = apart.div(p.stride[axis], rounding_mode="floor"), apart % p.stride[axis] == 0
    else:
        index = at[:, None] * p.stride[axis] - p.padding[axis] + taps
        whole = torch.ones_like(index, dtype=torch.bool)
    return index.clamp(0, size - 1), whole & (index >= 0) & (index < size)


def _pixel_sums(
    p: Problem, image: torch.Tensor, weight: torch.Tensor, found: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(all channels at sampled pixels computed here, those found) [places, channels]."""
    import torch

    n, _, height, width = found.shape
    at = _places((n, height, width), SAMPLES, generator).to(found.device)
    rows, row_there = _taps(p, at[:, 1], 0, image.shape[2])
    columns, column_there = _taps(p, at[:, 2], 1, image.shape[3])
    patch = image[at[:, 0, None, None], :, rows[:, :, None], columns[:, None, :]].double()
    # what is outside the image may be anything, so that it is left out and not multiplied by zero
    there = (row_there[:, :, None] & column_there[:, None, :])[..., None]
    patch = torch.where(there, patch, 0.0).unflatten(3, (p.groups, -1))
    by_group = weight.double().unflatten(0, (p.groups, -1))
    rule = "lrsga,gabrs->lgb" if p.scatters else "lrsgb,gabrs->lga"
    want = torch.einsum(rule, patch, by_group).flatten(1)
    return want, found[at[:, 0], :, at[:, 1], at[:, 2]]


def _weight_sums(
    p: Problem, x: torch.Tensor, d_out: torch.Tensor, found: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sampled weights' gradients computed here, those found) [places]."""
    import torch

    places = _places(tuple(found.shape), SAMPLES // 2, generator)
    channels_out, channels_in = found.shape[0] // p.groups, found.shape[1]
    sums = []
    for k, c, r, s in places.tolist():
        kept = []
        for axis, tap in ((0, r), (1, s)):
            at = torch.arange(d_out.shape[2 + axis], device=x.device)
            index = at * p.stride[axis] - p.padding[axis] + tap * p.dilation[axis]
            there = (index >= 0) & (index < x.shape[2 + axis])
            kept.append((at[there], index[there]))
        (p_at, h_at), (q_at, w_at) = kept
        seen = x[:, k // channels_out * channels_in + c][:, h_at][:, :, w_at].double()
        sums.append((d_out[:, k][:, p_at][:, :, q_at].double() * seen).sum())
    k, c, r, s = places.to(found.device).unbind(1)
    return torch.stack(sums), found[k, c, r, s]
