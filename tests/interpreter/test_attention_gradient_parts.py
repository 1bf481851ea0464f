"""Parts of gradients are added up right, whatever the layout of the result."""

from __future__ import annotations

import pytest
import torch

from kernelwright.kernels.attention.gradient_parts_kernel import gradient_parts, parts_launch


@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (2, 3, 77, 40), (1, 2, 130, 128)])
@pytest.mark.parametrize("splits", [2, 6])
@pytest.mark.parametrize("turned", [False, True])
def test_parts_add_up(sizes: tuple[int, int, int, int], splits: int, turned: bool) -> None:
    batch, heads, length, width = sizes
    out = torch.full((batch, heads, length, width), float("nan"), dtype=torch.float16)
    if turned:
        out = torch.full((batch, length, heads, width + 3), float("nan"), dtype=torch.float16)[..., :width].transpose(
            1, 2
        )
    parts = gradient_parts(splits, out)
    assert parts.shape == (splits * batch, heads, length, width) and parts.dtype == torch.float32
    parts.copy_(torch.randn(parts.shape, generator=torch.Generator().manual_seed(splits)))
    kernel, grid, args, options = parts_launch(parts, out)
    kernel[grid](*args, **options)
    wanted = parts.double().view(splits, batch, heads, length, width).sum(0)
    assert torch.allclose(out.double(), wanted, rtol=2e-3, atol=2e-3)


def test_one_part_is_the_gradient_itself() -> None:
    out = torch.empty(1, 2, 3, 8)
    assert gradient_parts(1, out) is out
