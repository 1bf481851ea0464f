"""The second pass of a weight's gradient, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernelwright.kernels.conv2d.conv_reduce_kernel import conv_parts
from kernelwright.kernels.conv2d.weight_parts_kernel import sum_weight_parts_launch


@pytest.mark.parametrize(
    ("sizes", "parts", "order"),
    [
        ((5, 7, 3, 2), 1, torch.channels_last),
        ((16, 24, 1, 1), 3, torch.contiguous_format),
        ((9, 40, 3, 3), 45, torch.contiguous_format),
    ],
)
def test_parts_are_added_up(sizes: tuple[int, int, int, int], parts: int, order: torch.memory_format) -> None:
    torch.manual_seed(0)
    out = torch.full(sizes, torch.nan, dtype=torch.float16).contiguous(memory_format=order)
    partial = conv_parts(out, parts, torch.float32)
    partial.copy_(torch.randn(partial.shape))
    kernel, grid, args, _ = sum_weight_parts_launch(partial, out)
    kernel[grid](*args)
    k, c, r, s = sizes
    wanted = partial.double().sum(0).reshape(k, r, s, c).permute(0, 3, 1, 2)
    assert torch.allclose(out.double(), wanted, rtol=1e-3, atol=1e-3)
