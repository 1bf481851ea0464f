"""Copies of fp32 tensors in parts, by numbers, run on the CPU by triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernelwright.kernels.conv2d.inputs import fill_random, strided
from kernelwright.kernels.conv2d.layout import parse_layout
from kernelwright.kernels.conv2d.parts_copy_kernel import image_parts, weight_parts
from kernelwright.kernels.operator import launch_all

# what the parts lose: the interpreter cuts the last of them instead of rounding it
LOST = {(torch.bfloat16, 2): 2.0**-15, (torch.bfloat16, 3): 2.0**-23, (torch.float32, 2): 0.0}


def tensor(sizes: tuple[int, int, int, int], layout: str) -> torch.Tensor:
    """Random numbers, with NaN in gaps and around."""
    found = strided(sizes, parse_layout("x", layout, sizes), "fp32", "cpu")
    return fill_random(found, torch.Generator().manual_seed(1))


def near(parts: torch.Tensor, whole: torch.Tensor) -> None:
    """Parts [parts, ..] add up to the whole, and each is small beside the one before."""
    lost = LOST[parts.dtype, len(parts)]
    assert bool(((parts.double().sum(0) - whole.double()).abs() <= lost * whole.double().abs()).all())
    bits = 2.0**-7 if parts.dtype == torch.bfloat16 else 2.0**-10
    assert bool((parts[1:].float().abs() <= bits * parts[:-1].float().abs()).all())


@pytest.mark.parametrize(("dtype", "count"), LOST)
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [((2, 72, 7, 9), "nchw"), ((2, 40, 4, 6), "nhwc"), ((3, 64, 3, 4), "strided:0,12,4,1"), ((1, 1, 1, 1), "nchw")],
)
def test_images(sizes: tuple[int, int, int, int], layout: str, dtype: torch.dtype, count: int) -> None:
    x = tensor(sizes, layout)
    copy, launch = image_parts(x, dtype, count, 32, (1, 2))
    copy.fill_(float("nan"))
    launch_all([launch])
    n, channels, height, width = sizes
    each = -(-channels // 32) * 32
    assert copy.shape == (n, count * each, height, width + width % 2) and copy.stride(1) == 1
    parts = copy.unflatten(1, (count, each)).movedim(1, 0)
    near(parts[:, :, :channels, :, :width], x)
    assert not parts[:, :, channels:].any() and not parts[..., width:].any()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(("groups", "scatters"), [(1, False), (1, True), (2, True)])
def test_weights(layout: str, groups: int, scatters: bool) -> None:
    w = tensor((48, 20, 3, 2), layout)
    lines, launch = weight_parts(w, groups, scatters, torch.bfloat16, 3, 64)
    lines.fill_(float("nan"))
    launch_all([launch])
    wanted = w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1) if scatters else w
    columns, channels = wanted.shape[:2]
    parts = lines.view(columns, 3, 2, 3, 64).permute(3, 0, 4, 1, 2)
    near(parts[:, :, :channels], wanted)
    assert not parts[:, :, channels:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_that_are_not_finite_and_the_largest(dtype: torch.dtype) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), largest, -largest, 0.0]).view(1, 6, 1, 1)
    copy, launch = image_parts(x, dtype, 2, 32, (1, 1))
    launch_all([launch])
    first, second = copy.float().view(2, 32)[:, :6]
    assert torch.equal(first.isfinite(), x.flatten().isfinite()) and bool(first[2].isnan())
    assert first[0] == float("inf") and first[1] == -float("inf")
    assert bool(second.isfinite().all()) and not second[:3].any()
