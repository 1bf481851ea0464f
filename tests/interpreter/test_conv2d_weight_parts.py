"""The second pass of a weight's gradient, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernelwright.kernels.conv2d.conv_reduce_kernel import conv_parts
from kernelwright.kernels.conv2d.weight_gradient_warp_specialized_kernel import plan_packed
from kernelwright.kernels.conv2d.weight_parts_kernel import sum_weight_parts_launch
from kernelwright.kernels.conv2d.workload import DEFAULTS


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


@pytest.mark.parametrize(
    ("image", "kernel", "stride", "padding", "order"),
    [
        ((2, 3, 11, 9), (7, 7), (2, 2), (3, 3), torch.channels_last),
        ((1, 4, 12, 12), (4, 4), (4, 4), (0, 0), torch.contiguous_format),
        ((2, 1, 7, 10), (3, 2), (1, 3), (2, 1), torch.channels_last),
    ],
)
def test_few_channels_are_packed_and_unpacked(
    image: tuple[int, ...], kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
    order: torch.memory_format,
) -> None:  # fmt: skip
    """The plan's first and last launches, with torch in the place of the one between them."""
    torch.manual_seed(0)
    x = torch.randn(image).half().contiguous(memory_format=order)
    w = torch.randn(6, image[1], *kernel, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(x.double(), w, None, stride, padding)
    d_out = torch.randn(y.shape).half()
    y.backward(d_out.double())
    knobs = {"block_k": 32, "tile_h": 1, "tile_w": 32, "block_m": 64, "block_n": 64, "column_blocks": 2,
             "split_k": 3, "num_stages": 2, "repack": 1, "span": 0}  # fmt: skip
    attributes = {**DEFAULTS, "stride_h": stride[0], "stride_w": stride[1], "pad_h": padding[0], "pad_w": padding[1]}
    out = torch.full(w.shape, torch.nan, dtype=torch.float16).contiguous(memory_format=order)
    launches = plan_packed(x, d_out, out, knobs, {**attributes, "direction": "weight_gradient"})
    (pack, grid, args, _), *_, main, (total, total_grid, total_args, _) = launches
    pack[grid](*args)
    given = dict(zip(main[0].arg_names, main[2], strict=True))
    viewed, parts = given["x"], given["out"]
    lines = torch.as_strided(viewed.base, viewed.shape, viewed.strides, viewed.base.storage_offset())
    width, channels, rows = d_out.shape[3], lines.shape[3], given["R"]
    lines = lines.reshape(d_out.shape[0], -1, width, channels)
    sums = torch.nn.grad.conv2d_weight(lines.permute(0, 3, 1, 2).double(), (6, channels, rows, 1), d_out.double())
    parts.zero_()
    parts[1] = sums.permute(0, 2, 3, 1).reshape(parts.shape[1:])
    total[total_grid](*total_args)
    assert w.grad is not None
    assert torch.allclose(out.double(), w.grad, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("groups", "span"), [(4, 2), (6, 1), (8, 8)])
def test_groups_keep_their_own_products(groups: int, span: int) -> None:
    torch.manual_seed(0)
    k, c = 3 * groups, 2
    out = torch.full((k, c, 2, 3), torch.nan).contiguous(memory_format=torch.channels_last)
    partial = torch.randn(5, k * 6, span * c)
    kernel, grid, args, _ = sum_weight_parts_launch(partial, out, span=span, each=3)
    kernel[grid](*args)
    wide = partial.double().sum(0).reshape(k, 2, 3, span, c)
    wanted = torch.stack([wide[row, :, :, row // 3 % span] for row in range(k)]).permute(0, 3, 1, 2)
    assert torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-5)
