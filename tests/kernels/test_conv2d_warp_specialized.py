"""The warp-specialised convolution without a GPU: its own code run by simulated warps over simulated copies."""

from __future__ import annotations

import importlib
import itertools
import types
from typing import Any

import numpy as np
import pytest
import torch

from kernelwright.kernels.conv2d import warp_specialized_store_kernel as store
from kernelwright.kernels.conv2d.implicit_gemm_warp_specialized import IMPLICIT_GEMM_WARP_SPECIALIZED
from kernelwright.kernels.conv2d.inputs import strided
from kernelwright.kernels.conv2d.layout import parse_layout
from kernelwright.kernels.conv2d.tma_view_kernel import conv_geometry, image_view
from kernelwright.kernels.conv2d.workload import DEFAULTS
from tests.kernels.simulated_tiles import WIDTH, Accumulator, Array, Ring, View
from tests.kernels.simulated_warps import Barrier, Machine

KERNEL_FUNCTIONS = (
    *("conv_ws_items", "conv_ws_place", "conv_ws_steps", "conv_ws_producer", "conv_ws_consumer"),
    *("ws_load", "ws_multiply", "class_of_axis", "class_of_unit", "met_by"),
)
STAGES, BLOCK_N = 3, 64


class Boxes:
    """A tensor of which boxes are copied; what lies outside of it reads as zero."""

    def __init__(self, values: Array, box: tuple[int, ...]) -> None:
        self.values, self.box = values, box

    def at(self, place: list[int]) -> Array:
        tile = np.zeros(self.box)
        spans = [
            (max(start, 0), min(start + length, size))
            for start, length, size in zip(place, self.box, self.values.shape, strict=True)
        ]
        if all(first < last for first, last in spans):
            source = tuple(slice(first, last) for first, last in spans)
            target = tuple(slice(first - at, last - at) for (first, last), at in zip(spans, place, strict=True))
            tile[target] = self.values[source]
        return tile


class ConvSimulation:
    """Producer and consumers of the kernel file as Python functions."""

    def __init__(self, image: torch.Tensor, weight: torch.Tensor, out: tuple[int, ...], tile: tuple[int, int, int],
                 mode: str, attributes: dict[str, Any], turned: bool = False) -> None:  # fmt: skip
        self.tile, self.pingpong, self.groups = tile, mode == "pingpong", attributes["groups"]
        self.geometry = conv_geometry(weight, attributes)
        sizes, strides, viewed = image_view(image, self.geometry)
        box = (*tile, WIDTH) if len(sizes) == 4 else (tile[0], tile[1], 1, tile[2], WIDTH)
        self.x = Boxes(torch.as_strided(viewed, sizes, strides, viewed.storage_offset()).numpy(), box)
        self.across = self.geometry["SCATTERS"] and not turned
        lines = weight.permute(0, 2, 3, 1).flatten(1)
        if turned:
            lines = weight.unflatten(0, (self.groups, -1)).permute(0, 2, 3, 4, 1).flatten(0, 1).flatten(1)
        self.w = Boxes(lines.numpy(), (WIDTH if self.across else BLOCK_N, WIDTH))
        self.remainder = image.stride(3)
        self.out = np.full(out, np.nan)
        self.cols, self.channels = out[1] // self.groups, image.shape[1] // self.groups
        step = self.geometry["OUT_STEP_H"], self.geometry["OUT_STEP_W"]
        self.grid = [-(-size // apart) for size, apart in zip(out[2:], step, strict=True)]

    def run(self, seed: int, programs: int) -> Array:
        for program in range(programs):
            self._run_program(program, programs, seed)
        return self.out

    def _run_program(self, program: int, programs: int, seed: int) -> None:
        machine, rows = Machine(seed), self.tile[0] * self.tile[1] * self.tile[2]
        full = [Barrier(1) for _ in range(STAGES)]
        empty = [Barrier(1 if self.pingpong else 2) for _ in range(STAGES)]
        barriers = [types.SimpleNamespace(index=x.__getitem__) for x in (full, empty, [Barrier(1), Barrier(1)])]
        x_ring = Ring(np.full(STAGES * rows * WIDTH, np.nan), (STAGES, rows, WIDTH))
        w_rows = self.w.box[0]
        w_ring = Ring(np.full(STAGES * BLOCK_N * WIDTH, np.nan), (STAGES * BLOCK_N // w_rows, w_rows, WIDTH))
        names = self._names(machine, program, programs)
        values = self.geometry
        front = ("SCATTERS", "R", "S", "STRIDE_H", "STRIDE_W", "PAD_H", "PAD_W", "DILATION_H", "DILATION_W")
        back = ("OUT_STEP_H", "OUT_STEP_W", "W_STEP_H", "W_STEP_W")
        n, _, height, width = self.out.shape

        def producer() -> None:
            names["conv_ws_producer"](
                self.x, self.w, x_ring, w_ring, *barriers[:2], n, *self.grid, self.cols, self.channels, self.remainder,
                self.groups, *values.values(), *self.tile, BLOCK_N, WIDTH, STAGES,
                self.across,
            )  # fmt: skip

        def consumer(which: int) -> None:
            names["conv_ws_consumer"](
                which, None, None, None, None, x_ring, w_ring, None, *barriers, n, height, width, *self.grid,
                self.cols, self.channels, self.groups, *(values[name] for name in (*front, *back)), *self.tile,
                BLOCK_N, WIDTH, STAGES, self.across, self.pingpong, 1, "simulated", 1, "",
            )  # fmt: skip

        machine.run([producer, lambda: consumer(0), lambda: consumer(1)])

    def _epilogue(self, acc: Accumulator, *rest: Any) -> None:
        n, i, j, first_h, first_w, first_row, col, group = rest[5:13]
        step_h, step_w = self.geometry["OUT_STEP_H"], self.geometry["OUT_STEP_W"]
        places = itertools.product(*(range(size) for size in self.tile))
        for row, (image, line, column) in enumerate(places):
            p, q = first_h + (i + line) * step_h, first_w + (j + column) * step_w
            mine = first_row <= row < first_row + len(acc.value)
            if not mine or n + image >= self.out.shape[0] or p >= self.out.shape[2] or q >= self.out.shape[3]:
                continue
            kept = min(acc.value.shape[1], self.cols - col)
            first = group * self.cols + col
            part = self.out[n + image, first : first + kept, p, q]
            assert np.isnan(part).all(), "a pixel was written twice"
            part[:] = acc.value[row - first_row, :kept]

    def _names(self, machine: Machine, program: int, programs: int) -> dict[str, Any]:
        """What the kernel's functions see in place of Gluon."""

        def load(source: Boxes, place: list[int], barrier: Barrier, slot: View) -> None:
            machine.pause()
            tile = source.at(place)

            def land() -> None:
                slot.memory[:] = tile.reshape(slot.memory.shape)
                barrier.bytes -= tile.size * 2
                barrier.settle()

            machine.copies.append(land)

        def multiply(x: View, y: View, acc: Accumulator, use_acc: bool, is_async: bool) -> Accumulator:
            machine.pause()
            acc.multiply(x, y, use_acc)
            return acc

        def settle(left: int, deps: tuple[Accumulator]) -> Accumulator:
            machine.pause()
            deps[0].finish(left)
            return deps[0]

        def expect(barrier: Barrier, count: int) -> None:
            machine.pause()
            barrier.bytes += count
            barrier.arrive()

        def arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
            machine.pause()
            if pred:
                barrier.arrive(count)

        wait = types.SimpleNamespace(
            wait=lambda barrier, parity: machine.pause(lambda: barrier.passed(parity)), expect=expect, arrive=arrive
        )
        names = {
            **language(program, programs), "range": range, "mbarrier": wait, "tma_load": load,
            "warpgroup_mma": multiply,
            "warpgroup_mma_wait": settle, "warpgroup_mma_init": lambda acc: acc, "conv_ws_epilogue": self._epilogue,
        }  # fmt: skip
        kernel = importlib.import_module(IMPLICIT_GEMM_WARP_SPECIALIZED.kernel_module)
        for name in KERNEL_FUNCTIONS:
            names[name] = types.FunctionType(getattr(kernel, name).fn.__code__, names, name)
        return names


def language(program: int, programs: int) -> dict[str, Any]:
    """The parts of Gluon that have no side effects, for one of several programs."""
    gl = types.SimpleNamespace(
        cdiv=lambda x, y: -(-x // y), static_range=range, NVMMADistributedLayout=lambda **shape: None,
        NVMMASharedLayout=lambda *shape: None, program_id=lambda axis: program,
        num_programs=lambda axis: programs, zeros=lambda shape, dtype, layout: Accumulator(*shape), float32=None,
    )  # fmt: skip
    tl = types.SimpleNamespace(static_range=range, minimum=min, where=lambda which, x, y: x if which else y)
    return {"gl": gl, "tl": tl}


def whole_numbers(sizes: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers in NHWC memory, so that sums are exact."""
    values = torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, sizes).astype(float))
    return values.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


FORWARD: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int], dict[str, int]]] = [
    ((1, 72, 9, 17), (70, 72, 3, 3), (1, 8, 16), {"pad_h": 1, "pad_w": 1}),
    ((3, 64, 8, 8), (64, 64, 3, 3), (2, 8, 8), {"pad_h": 1, "pad_w": 1, "stride_h": 2, "stride_w": 2}),
    ((2, 64, 7, 9), (96, 64, 1, 1), (2, 4, 16), {"stride_h": 2, "stride_w": 2}),
    ((1, 128, 9, 11), (128, 64, 3, 2), (1, 16, 8), {"pad_h": 2, "dilation_h": 2, "groups": 2}),
]


@pytest.mark.parametrize("mode", ["cooperative", "pingpong"])
@pytest.mark.parametrize(("image", "weight", "tile", "given"), FORWARD)
def test_forward(
    image: tuple[int, ...], weight: tuple[int, ...], tile: tuple[int, int, int], given: dict[str, int], mode: str,
) -> None:  # fmt: skip
    attributes = {**DEFAULTS, **given}
    x, w = whole_numbers(image, 0), whole_numbers(weight, 1)
    stride, padding, dilation = (
        [attributes[f"{name}_{axis}"] for axis in "hw"] for name in ("stride", "pad", "dilation")
    )
    wanted = torch.nn.functional.conv2d(x, w, None, stride, padding, dilation, attributes["groups"]).numpy()  # type: ignore[arg-type]
    simulation = ConvSimulation(x, w, wanted.shape, tile, mode, attributes)
    assert np.array_equal(simulation.run(3, 2), wanted)


@pytest.mark.parametrize("mode", ["cooperative", "pingpong"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("taps", "stride", "pad", "groups"),
    [((3, 3), 1, 1, 1), ((3, 3), 2, 1, 1), ((1, 1), 2, 0, 1), ((4, 4), 2, 1, 2)],
    ids=["plain", "classes", "empty class", "groups"],
)
def test_gradient_of_the_input(
    taps: tuple[int, int], stride: int, pad: int, groups: int, turned: bool, mode: str
) -> None:
    sizes = {"stride_h": stride, "stride_w": stride, "pad_h": pad, "pad_w": pad, "groups": groups}
    attributes = {**DEFAULTS, **sizes, "direction": "input_gradient"}
    channels, filters = (72, 80) if groups == 1 else (128, 128)
    x = whole_numbers((2, channels, 9, 10), 0).requires_grad_()
    w = whole_numbers((filters, channels // groups, *taps), 1)
    y = torch.nn.functional.conv2d(x, w, None, stride, pad, 1, groups)
    d_out = whole_numbers(tuple(y.shape), 2)
    y.backward(d_out)
    assert x.grad is not None
    simulation = ConvSimulation(d_out, w, tuple(x.shape), (1, 8, 16), mode, attributes, turned)
    assert np.array_equal(simulation.run(3, 2), x.grad.numpy())


def test_rows_of_a_tile_are_pixels_of_their_class() -> None:
    tile, step = (2, 4, 8), (2, 3)
    rows = np.arange(16, 64)
    found = store.conv_ws_pixels.fn(rows, 5, 8, 16, 1, 2, *step, *tile[1:])
    places = list(itertools.product(*(range(size) for size in tile)))[16:]
    wanted = [(5 + n, 1 + (8 + i) * step[0], 2 + (16 + j) * step[1]) for n, i, j in places]
    assert np.array_equal(np.stack(found, axis=1), wanted)


@pytest.mark.parametrize(
    ("layout", "steps", "wanted"),
    [
        ("nhwc", (1, 1), ("tma", 1, 1)),
        ("nhwc", (2, 2), ("tma", 4, 1)),
        ("nhwc", (3, 3), ("pointer", 0, 1)),
        ("nhwc+1", (1, 1), ("pointer", 0, 1)),
        ("nchw", (1, 1), ("pixels", 0, 4)),
        ("nchw", (1, 2), ("pixels", 0, 1)),
        ("nchw+2", (1, 1), ("pixels", 0, 2)),
        ("strided:20480,320,22,1", (1, 1), ("pixels", 0, 2)),
    ],
)
def test_how_results_are_written(layout: str, steps: tuple[int, int], wanted: tuple[str, int, int]) -> None:
    sizes = (3, 64, 12, 20)
    out = strided(sizes, parse_layout("out", layout, sizes), "fp16", "cpu")
    way, descriptors, unit = store.result_stores(out, (1, 4, 16), (1, 4, 16), steps)
    assert (way, len(descriptors), unit) == wanted
    for place, descriptor in enumerate(descriptors):
        first = divmod(place, steps[1])
        assert descriptor.base.data_ptr() == out[:, :, first[0] :, first[1] :].data_ptr()
        assert list(descriptor.shape) == [3, 12 // steps[0], 20 // steps[1], 64]
