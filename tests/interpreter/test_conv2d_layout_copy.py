"""Copies between orders of dimensions, by numbers, run on the CPU by triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernelwright.kernels.conv2d.inputs import fill_random, strided
from kernelwright.kernels.conv2d.layout import dense_strides, parse_layout
from kernelwright.kernels.conv2d.layout_copy_kernel import conv_copy_launch, krsc_copy, nhwc_copy, turned_weight_copy
from kernelwright.kernels.operator import launch_all


def image(sizes: tuple[int, int, int, int], layout: str, dtype: str = "fp16") -> torch.Tensor:
    """Random numbers, with NaN in gaps and around."""
    tensor = strided(sizes, parse_layout("x", layout, sizes), dtype, "cpu")
    return fill_random(tensor, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((2, 72, 9, 16), "nchw"),
        ((2, 80, 7, 7), "nchw"),
        ((1, 3, 5, 130), "nchw"),
        ((3, 33, 6, 5), "nhwc"),
        ((2, 16, 4, 6), "nhwc+1"),
        ((2, 5, 4, 6), "strided:200,40,8,1"),
        ((2, 8, 3, 4), "strided:0,12,4,1"),
        ((1, 1, 1, 1), "nchw"),
    ],
)
def test_images_to_nhwc(sizes: tuple[int, int, int, int], layout: str, dtype: str) -> None:
    x = image(sizes, layout, dtype)
    copy, launch = nhwc_copy(x)
    copy.fill_(float("nan"))
    launch_all([launch])
    assert torch.equal(copy, x)
    assert copy.stride(1) == 1 and all(copy.stride(axis) * copy.element_size() % 16 == 0 for axis in (0, 2, 3))


def test_odd_sizes_are_filled_up_with_zeros() -> None:
    x = image((2, 24, 7, 9), "nchw")
    copy, launch = nhwc_copy(x, (2, 2))
    copy.fill_(float("nan"))
    launch_all([launch])
    assert copy.shape == (2, 24, 8, 10)
    assert torch.equal(copy, torch.nn.functional.pad(x, (0, 1, 0, 1)))


def test_results_back_to_nchw() -> None:
    x = image((2, 40, 9, 11), "nhwc")
    out = strided((2, 40, 9, 11), parse_layout("out", "strided:5000,120,13,1", (2, 40, 9, 11)), "fp16", "cpu")
    launch_all([conv_copy_launch(x, out)])
    assert torch.equal(out, x)
    # what lies between the rows is not written
    assert out.as_strided((9, 13), (13, 1), out.storage_offset())[:8, 11:].isnan().all()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("groups", [1, 2])
def test_weights(layout: str, groups: int) -> None:
    sizes = (48, 40, 3, 2)
    w = image(sizes, layout)
    copy, launch = krsc_copy(w)
    launch_all([launch])
    assert torch.equal(copy, w) and copy.stride() == dense_strides("nhwc", sizes)
    turned, launch = turned_weight_copy(w, groups)
    launch_all([launch])
    wanted = w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(turned, wanted) and turned.stride() == dense_strides("nhwc", tuple(wanted.shape))  # type: ignore[arg-type]


def test_bytes_are_copied_as_they_are() -> None:
    x = torch.randn(2, 20, 3, 5).to(torch.float8_e4m3fn)
    copy, launch = nhwc_copy(x)
    launch_all([launch])
    assert torch.equal(copy.float(), x.float())
