"""fp32 convolutions in parts without a GPU: the plan's own numbers, run by simulated warps over simulated copies."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.grad import conv2d_input

from kernelwright.kernels.conv2d.implicit_gemm_parts import IMPLICIT_GEMM_PARTS
from kernelwright.kernels.conv2d.workload import DEFAULTS, conv2d_workload
from kernelwright.kernels.device import named_device
from tests.kernels.simulated_warps import Machine
from tests.kernels.test_conv2d_warp_specialized import BLOCK_N, STAGES, Boxes, ConvSimulation, whole_numbers

H100 = named_device("h100")

KERNEL: Any = importlib.import_module(IMPLICIT_GEMM_PARTS.kernel_module)

PAIRS = {
    "bf16x3": [(0, 1), (1, 0), (0, 0)],
    "bf16x6": [(0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0)],
}


class PartsSimulation(ConvSimulation):
    """The kernel with the arguments of a plan; parts of image and weight are given, and lie as the plan copies them."""

    def __init__(self, parts: dict[str, list[torch.Tensor]], out: torch.Tensor, tile: tuple[int, int, int],
                 knobs: dict[str, Any], attributes: dict[str, Any]) -> None:  # fmt: skip
        image = "d_out" if attributes["direction"] == "input_gradient" else "x"
        inputs = {name: values[0].float() for name, values in parts.items()}
        image_copy, weight_copy, main = KERNEL.plan(inputs, out, knobs, attributes, ())
        groups = attributes["groups"]
        for (kernel, _, args, _), values in ((image_copy, parts[image]), (weight_copy, parts["w"])):
            fill(dict(zip(kernel.arg_names, args, strict=True)), values, groups)
        self.given = dict(zip(main[0].arg_names, main[2], strict=True))
        super().__init__(parts[image][0], parts["w"][0], tuple(out.shape), tile, knobs["mode"], attributes)
        self.across, self.remainder = False, self.given["stride_remainder"]
        self.channels = -(-self.given["CHANNELS"] // 64) * 64 * self.given["PAIRS"]
        for name in "xw":
            source = self.given[name]
            viewed = torch.as_strided(source.base, source.shape, source.strides, source.base.storage_offset())
            setattr(self, name, Boxes(viewed.double().numpy(), tuple(source.block_shape)))

    def _names(self, machine: Machine, program: int, programs: int) -> dict[str, Any]:
        names = super()._names(machine, program, programs)
        producer = types.FunctionType(KERNEL.conv_parts_producer.fn.__code__, names, "conv_parts_producer")
        own = ("CHANNELS", "x_part", "w_part", "stride_remainder", "PARTS", "PAIRS", "X_PARTS", "W_PARTS")

        def adapted(*args: Any) -> None:
            # in place of `channels` and `remainder`, and without the last, which says how the weight lies
            producer(*args[:10], *(self.given[name] for name in own), *args[12:-1])

        return {**names, "conv_ws_producer": adapted}


def fill(copy: dict[str, Any], values: list[torch.Tensor], groups: int) -> None:
    """What a copy writes, with these numbers as its parts."""
    target = copy["dst_ptr"]
    for part, value in enumerate(values):
        place = target.storage_offset() + part * copy["stride_part"]
        lies = torch.as_strided(target, target.shape, target.stride(), place)
        lies.zero_()
        source = value if value.dim() == target.dim() else value.unflatten(0, (groups, -1))
        lies[tuple(slice(size) for size in source.shape)] = source.to(target.dtype)


def sum_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The products of all pairs of parts, added up."""
    return torch.stack(list(tensors)).sum(0)


def knobs_for(mode: str, precision: str, tile: tuple[int, int, int]) -> dict[str, Any]:
    images, height, width = tile
    return {
        "mode": mode, "block_m": images * height * width, "tile_h": height, "tile_w": width, "block_n": BLOCK_N,
        "block_k": 64, "num_warps": 8, "num_stages": STAGES, "subtile": 1, "repack": 1, "store": "direct",
        "precision": precision,
    }  # fmt: skip


FORWARD: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int], dict[str, int]]] = [
    ((1, 72, 9, 17), (70, 72, 3, 3), (1, 8, 16), {"pad_h": 1, "pad_w": 1}),
    ((3, 64, 7, 8), (64, 64, 3, 3), (2, 8, 8), {"pad_h": 1, "pad_w": 1, "stride_h": 2, "stride_w": 2}),
    ((1, 128, 9, 11), (128, 64, 3, 2), (1, 16, 8), {"pad_h": 2, "groups": 2}),
]


@pytest.mark.parametrize(("mode", "precision"), [("cooperative", "bf16x6"), ("pingpong", "bf16x3")])
@pytest.mark.parametrize(("image", "weight", "tile", "given"), FORWARD)
def test_forward(
    image: tuple[int, ...], weight: tuple[int, ...], tile: tuple[int, int, int], given: dict[str, int], mode: str,
    precision: str,
) -> None:  # fmt: skip
    attributes = {**DEFAULTS, **given}
    count = 3 if precision == "bf16x6" else 2
    parts = {
        "x": [whole_numbers(image, i) for i in range(count)],
        "w": [whole_numbers(weight, 9 + i) for i in range(3)],
    }
    parts["w"] = parts["w"][:count]
    stride, padding = ([int(attributes[f"{name}_{axis}"]) for axis in "hw"] for name in ("stride", "pad"))
    groups = int(attributes["groups"])
    wanted = sum_of(
        torch.nn.functional.conv2d(parts["x"][i], parts["w"][j], None, stride, padding, 1, groups)
        for i, j in PAIRS[precision]
    )
    simulation = PartsSimulation(
        parts, torch.empty(wanted.shape), tile, knobs_for(mode, precision, tile), attributes
    )  # fmt: skip
    assert np.array_equal(simulation.run(3, 2), wanted.numpy())


@pytest.mark.parametrize(("mode", "precision"), [("cooperative", "bf16x3"), ("pingpong", "bf16x6")])
@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 2)])
def test_gradient_of_the_input(stride: int, groups: int, mode: str, precision: str) -> None:
    sizes = {"stride_h": stride, "stride_w": stride, "pad_h": 1, "pad_w": 1, "groups": groups}
    attributes = {**DEFAULTS, **sizes, "direction": "input_gradient"}
    channels, filters = (72, 80) if groups == 1 else (128, 128)
    image, count, tile = (1, channels, 9, 10), 3 if precision == "bf16x6" else 2, (1, 8, 16)
    w = [whole_numbers((filters, channels // groups, 3, 3), 9 + i) for i in range(count)]
    shape = torch.nn.functional.conv2d(torch.empty(image).double(), w[0], None, stride, 1, 1, groups).shape
    d_out = [whole_numbers(tuple(shape), i) for i in range(count)]
    wanted = sum_of(conv2d_input(image, w[j], d_out[i], stride, 1, 1, groups) for i, j in PAIRS[precision])
    knobs = knobs_for(mode, precision, tile)
    simulation = PartsSimulation({"d_out": d_out, "w": w}, torch.empty(image), tile, knobs, attributes)
    assert np.array_equal(simulation.run(3, 2), wanted.numpy())


def test_spaces_and_workspaces() -> None:
    sizes: dict[str, Any] = {"image": (256, 128, 28, 28), "k": 128, "kernel": 3, "layout": "nchw", "padding": 1}
    exact = IMPLICIT_GEMM_PARTS.space(conv2d_workload(**sizes, dtype="fp32"), H100)
    assert {s.knobs["precision"] for s in exact} == {"bf16x6", "tf32x3"}
    near = IMPLICIT_GEMM_PARTS.space(conv2d_workload(**sizes, dtype="fp32", error_budget=1e-4), H100)
    assert {s.knobs["precision"] for s in near} == {"bf16x3", "bf16x6", "tf32x3"}
    assert not len(IMPLICIT_GEMM_PARTS.space(conv2d_workload(**sizes, dtype="bf16"), H100))
    # three parts of two bytes for every number of both operands, and no more for a copied result
    pixels, taps = 256 * 28 * 28 * 128, 128 * 128 * 9
    limited = conv2d_workload(**sizes, dtype="fp32", attributes={"workspace_bytes": 6 * (pixels + taps)})
    found = {(s.knobs["precision"], s.knobs["store"]) for s in IMPLICIT_GEMM_PARTS.space(limited, H100)}
    assert found == {("bf16x6", "direct")}
    less = conv2d_workload(**sizes, dtype="fp32", attributes={"workspace_bytes": 6 * (pixels + taps) - 1})
    assert not len(IMPLICIT_GEMM_PARTS.space(less, H100))
