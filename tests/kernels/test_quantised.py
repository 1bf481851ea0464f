"""Quantised operands: what bytes and scales stand for, by numbers made by hand; shapes of random ones."""

from __future__ import annotations

import pytest
import torch

from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.quantised import dequantised, random_packed, random_scales
from kernelwright.kernels.matmul.workload import matmul_workload, problem_of


def test_the_low_half_of_a_byte_is_the_even_k() -> None:
    packed = torch.tensor([[0x80, 0xF7]], dtype=torch.uint8)
    assert dequantised(packed, None, "int4", "", "row").tolist() == [[-8.0, 0.0, -1.0, 7.0]]
    assert dequantised(packed.T, None, "int4", "", "col").tolist() == [[-8.0], [0.0], [-1.0], [7.0]]


def test_every_fp4_number() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert dequantised(packed, None, "fp4", "", "row").tolist() == [magnitudes + [-x for x in magnitudes]]


def test_group_scales_lie_along_k_first() -> None:
    packed = torch.full((2, 32), 0x99, dtype=torch.uint8)
    scale = torch.tensor([[0.5, 2.0], [4.0, 8.0]], dtype=torch.float16)
    numbers = dequantised(packed.T, scale, "int4", "group:32", "col")
    assert numbers.shape == (64, 2)
    assert numbers[[0, 31, 32, 63]].tolist() == [[0.5, 2.0], [0.5, 2.0], [4.0, 8.0], [4.0, 8.0]]


def test_mx_scales_are_powers_of_two() -> None:
    packed = torch.full((1, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[126, 129]], dtype=torch.uint8)
    for numbers in (
        dequantised(packed, scale, "fp4", "mx", "row"),
        dequantised(packed.T, scale, "fp4", "mx", "col").T,
    ):
        assert numbers[0, [0, 31, 32, 63]].tolist() == [0.5, 0.5, 4.0, 4.0]


@pytest.mark.parametrize("along", ["row", "col"])
def test_mx_scales_mean_what_torchs_own_e8m0_does(along: str) -> None:
    """Of all bytes, on both sides: 0 is the least power of two, 255 is NaN, for zeros as well (OCP microscaling)."""
    scale = torch.arange(256, dtype=torch.uint8)[None]
    want = scale.view(torch.float8_e8m0fnu).float().double()[0]
    assert want[0] == 2.0**-127 and want[254] == 2.0**127 and want[255].isnan()
    for nibbles, times in ((0x22, 1.0), (0x00, 0.0), (0x99, -0.5)):
        packed = torch.full((1, 256 * 16), nibbles, dtype=torch.uint8)
        numbers = dequantised(packed if along == "row" else packed.T, scale, "fp4", "mx", along).reshape(256, 32)
        torch.testing.assert_close(numbers, (want * times)[:, None].expand(256, 32), rtol=0, atol=0, equal_nan=True)


def test_a_nan_scale_of_weights_spoils_its_column_and_no_other() -> None:
    """What a kernel for 4-bit weights is compared with; it must not come out as a large number that looks right."""
    workload = matmul_workload(4, 8, 64, "bf16", b_dtype="fp4", scaling="mx")
    inputs = MATMUL.make_inputs(workload, 0, "cpu")
    clean = MATMUL.reference(workload, inputs)
    inputs["b_scale"][5, 1] = 255
    spoilt = MATMUL.reference(workload, inputs)
    assert spoilt[:, 5].isnan().all()
    others = [column for column in range(8) if column != 5]
    assert clean.isfinite().all() and torch.equal(spoilt[:, others], clean[:, others])


def test_nvfp4_scales_are_fp8() -> None:
    packed = torch.full((1, 16), 0x33, dtype=torch.uint8)
    scale = torch.tensor([[0.5, 1.75]]).to(torch.float8_e4m3fn)
    assert dequantised(packed, scale, "fp4", "nvfp4", "row")[0, [15, 16]].tolist() == [0.75, 2.625]


def test_blocks_of_128_ragged_along_n() -> None:
    a, b = (torch.ones(size, dtype=torch.float8_e4m3fn) for size in ((2, 256), (256, 130)))
    a_scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    b_scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = dequantised(a, a_scale, "fp8e4m3", "block128", "row")
    assert rows[:, [0, 127, 128]].tolist() == [[1.0, 1.0, 2.0], [3.0, 3.0, 4.0]]
    columns = dequantised(b, b_scale, "fp8e4m3", "block128", "col")
    assert columns[[0, 128]][:, [0, 127, 128]].tolist() == [[1.0, 1.0, 2.0], [3.0, 3.0, 4.0]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("a", "b", "scaling", "shapes", "dtype"),
    [
        ("fp8e4m3", "fp8e4m3", "block128", {"a_scale": (3, 2), "b_scale": (2, 2)}, torch.float32),
        ("bf16", "int4", "group:64", {"b_scale": (4, 130)}, torch.bfloat16),
        ("bf16", "fp4", "mx", {"b_scale": (130, 8)}, torch.uint8),
        ("fp8e4m3", "fp4", "mx", {"a_scale": (3, 8), "b_scale": (130, 8)}, torch.uint8),
        ("fp16", "fp4", "nvfp4", {"b_scale": (130, 16)}, torch.float8_e4m3fn),
        ("fp4", "fp4", "nvfp4", {"a_scale": (3, 16), "b_scale": (130, 16)}, torch.float8_e4m3fn),
    ],
)
def test_random_scales(
    a: str, b: str, scaling: str, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str
) -> None:
    problem = problem_of(matmul_workload(3, 130, 256, a, b_dtype=b, scaling=scaling))
    scales = random_scales(problem, torch.Generator().manual_seed(0), device)
    assert {name: tuple(scale.shape) for name, scale in scales.items()} == shapes
    assert all(scale.dtype == dtype for scale in scales.values())
    assert random_packed(5, 64, "fp4", torch.Generator(), device).shape == (5, 32)
