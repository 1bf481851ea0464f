"""The weight's gradient by specialised warps without a GPU: its own code run by simulated warps over simulated copies,
what the compiler makes of it, and its space."""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np
import pytest
import torch

from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.tma_view_kernel import conv_geometry, image_view
from kernelwright.kernels.conv2d.weight_gradient_warp_specialized import (
    WEIGHT_GRADIENT_WARP_SPECIALIZED,
    computed_problem,
    offered_boxes,
)
from kernelwright.kernels.conv2d.workload import DEFAULTS, conv2d_workload, problem_of
from kernelwright.kernels.device import named_device
from kernelwright.types import FrozenMap, Schedule, Workload
from tests.kernels.simulated_tiles import WIDTH, Accumulator, Array, Ring, View
from tests.kernels.simulated_warps import Barrier, Machine
from tests.kernels.test_conv2d_warp_specialized import Boxes, language, whole_numbers

H100 = named_device("h100")
KERNEL = importlib.import_module(WEIGHT_GRADIENT_WARP_SPECIALIZED.kernel_module)
KERNEL_FUNCTIONS = (
    *("wgrad_tiles", "wgrad_place", "wgrad_boxes", "wgrad_producer", "wgrad_accumulators", "wgrad_waited"),
    *("wgrad_multiply", "wgrad_sums", "wgrad_consumer", "met_by"),
)
STAGES = 3


class Simulation:
    """Producer and consumers of the kernel file as Python functions. tile: (block_m, block_n, column_blocks). divided:
    parts of a number, pairs of them (count and packed places), steps after which sums are added up."""

    def __init__(self, x: torch.Tensor, d_out: torch.Tensor, weight: tuple[int, ...], box: tuple[int, int, int],
                 tile: tuple[int, int, int], parts: int, attributes: dict[str, Any],
                 divided: tuple[int, int, int, int, int] = (1, 1, 0, 0, 0)) -> None:  # fmt: skip
        self.divided = divided
        self.box, self.tile, self.parts, self.groups = box, tile, parts, attributes["groups"]
        self.geometry = conv_geometry(torch.empty(weight, device="meta"), attributes)
        if divided[0] == 1:
            x, d_out = KERNEL.pixel_lines(x, d_out, self.geometry)
        sizes, strides, viewed = image_view(x, self.geometry)
        shape = (*box, WIDTH) if len(sizes) == 4 else (box[0], box[1], 1, box[2], WIDTH)
        self.x = Boxes(torch.as_strided(viewed, sizes, strides, viewed.storage_offset()).numpy(), shape)
        self.d = Boxes(d_out.permute(0, 2, 3, 1).numpy(), (*box, WIDTH))
        self.pixels, self.remainder = d_out.permute(0, 2, 3, 1).shape[:3], x.stride(3)
        self.out = np.full((parts, *weight), np.nan)
        self.rows, self.channels = weight[0] // self.groups, weight[1]

    def run(self, seed: int, programs: int) -> Array:
        for program in range(programs):
            self._run_program(program, programs, seed)
        return self.out

    def _run_program(self, program: int, programs: int, seed: int) -> None:
        machine, pixels = Machine(seed), int(np.prod(self.box))
        full, empty = [Barrier(1) for _ in range(STAGES)], [Barrier(2) for _ in range(STAGES)]
        barriers = [types.SimpleNamespace(index=x.__getitem__) for x in (full, empty)]
        block_m, block_n, blocks = self.tile
        rings = []
        numbers = STAGES * self.divided[0]
        for panels in (numbers * block_m // WIDTH, numbers * blocks * block_n // WIDTH):
            rings.append(Ring(np.full(panels * pixels * WIDTH, np.nan), (panels, pixels, WIDTH)))
        names = self._names(machine, program, programs)
        values = self.geometry
        sizes = (self.pixels[0] // self.divided[0], *self.pixels[1:], self.rows, self.channels, self.parts)
        shape = (*self.box, *self.tile, STAGES)

        def producer() -> None:
            names["wgrad_producer"](
                self.d, self.x, *rings, *barriers, *sizes, self.remainder, blocks, self.groups,
                *(values[name] for name in KERNEL.KNOWN), *shape, self.divided[0],
            )  # fmt: skip

        def consumer(which: int) -> None:
            taps = values["R"], values["S"]
            names["wgrad_consumer"](which, None, None, None, *rings, *barriers, *sizes, self.groups, *taps, *shape,
                                    *self.divided)  # fmt: skip

        machine.run([producer, lambda: consumer(0), lambda: consumer(1)])

    def _store(self, acc: Accumulator, *rest: Any) -> None:
        part, group, row, tap, col = rest[3:8]
        taps = self.geometry["S"]
        kept_rows, kept = min(acc.value.shape[0], self.rows - row), min(acc.value.shape[1], self.channels - col)
        if tap >= self.geometry["R"] * taps or kept_rows <= 0 or kept <= 0:
            return
        first = group * self.rows + row
        target = self.out[part, first : first + kept_rows, col : col + kept, tap // taps, tap % taps]
        assert np.isnan(target).all(), "an element was written twice"
        target[:] = acc.value[:kept_rows, :kept]

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

        def settle(left: int, deps: tuple[Accumulator, ...]) -> Any:
            machine.pause()
            for acc in deps:
                # products end in the order in which they began, one of each sum in turn
                acc.finish(left // len(deps))
            return deps[0] if len(deps) == 1 else deps

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
            **language(program, programs), "range": range, "mbarrier": wait, "wgrad_load": load,
            "warpgroup_mma": multiply, "warpgroup_mma_wait": settle, "warpgroup_mma_init": lambda acc: acc,
            "wgrad_store": self._store,
        }  # fmt: skip
        names["gl"].minimum = min
        for name in KERNEL_FUNCTIONS:
            names[name] = types.FunctionType(getattr(KERNEL, name).fn.__code__, names, name)
        return names


CASES: dict[str, tuple[Any, ...]] = {
    # image, weight, box of pixels, tile, parts of the sum, attributes
    "taps shared out": ((2, 40, 6, 9), (48, 40, 3, 3), (1, 4, 8), (64, 64, 10), 3, {"pad_h": 1, "pad_w": 1}),
    "rows shared out": ((1, 136, 5, 11), (136, 136, 2, 2), (1, 2, 16), (128, 64, 3), 1, {"dilation_w": 3}),
    "wide blocks": ((3, 72, 7, 7), (300, 72, 1, 3), (16, 2, 1), (256, 128, 1), 4, {"pad_w": 1}),
    "split strides": ((2, 24, 8, 12), (16, 24, 3, 3), (2, 4, 4), (64, 64, 4), 2,
                      {"pad_h": 1, "pad_w": 1, "stride_h": 2, "stride_w": 2}),
    "one tap, strided": ((2, 64, 7, 9), (80, 64, 1, 1), (2, 4, 4), (128, 64, 1), 2, {"stride_h": 2, "stride_w": 2}),
    "one tap, a line": ((3, 64, 5, 7), (64, 64, 1, 1), (1, 1, 32), (64, 64, 2), 7, {}),
    "groups": ((1, 96, 6, 6), (64, 48, 3, 1), (1, 4, 8), (64, 64, 2), 2, {"pad_h": 2, "dilation_h": 2, "groups": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sums_by_simulated_warps(name: str) -> None:
    image, weight, box, tile, parts, given = CASES[name]
    attributes = {**DEFAULTS, **given, "direction": "weight_gradient"}
    x, w = whole_numbers(image, 0), whole_numbers(weight, 1).requires_grad_()
    stride, padding, dilation = (
        [attributes[f"{name}_{axis}"] for axis in "hw"] for name in ("stride", "pad", "dilation")
    )
    y = torch.nn.functional.conv2d(x, w, None, stride, padding, dilation, attributes["groups"])
    d_out = whole_numbers(tuple(y.shape), 2)
    y.backward(d_out)
    assert w.grad is not None
    found = Simulation(x, d_out, weight, box, tile, parts, attributes).run(3, 2)
    assert np.array_equal(found.sum(0), w.grad.numpy())


PARTED = ("taps shared out", "rows shared out", "split strides", "groups")


@pytest.mark.parametrize("name", PARTED)
@pytest.mark.parametrize(("precision", "chunk"), [("bf16x3", 1), ("bf16x6", 2)])
def test_sums_of_numbers_in_parts(name: str, precision: str, chunk: int) -> None:
    """Each pair of parts is multiplied once; images of one part never meet those of another."""
    image, weight, box, tile, parts, given = CASES[name]
    attributes = {**DEFAULTS, **given, "direction": "weight_gradient"}
    _, count, pairs = KERNEL.parts_of(precision)
    stride, padding, dilation = (
        [int(attributes[f"{name}_{axis}"]) for axis in "hw"] for name in ("stride", "pad", "dilation")
    )
    groups = int(attributes["groups"])
    x = [whole_numbers(image, part) for part in range(count)]
    size = torch.nn.functional.conv2d(x[0], whole_numbers(weight, 9), None, stride, padding, dilation, groups).shape
    d_out = [whole_numbers(tuple(size), 20 + part) for part in range(count)]
    wanted = np.zeros(weight)
    for pair in range(pairs[0]):
        first, second = (d_out[pairs[1] >> 2 * pair & 3], x[pairs[2] >> 2 * pair & 3])
        wanted += torch.nn.grad.conv2d_weight(second, weight, first, stride, padding, dilation, groups).numpy()
    stacked = [torch.cat([part.permute(0, 2, 3, 1) for part in each]).permute(0, 3, 1, 2) for each in (x, d_out)]
    box = (1, box[0] * box[1], box[2])
    simulation = Simulation(*stacked, weight, box, tile, parts, attributes, (count, *pairs, chunk))
    assert np.array_equal(simulation.run(3, 2).sum(0), wanted)


@pytest.mark.parametrize(
    ("image", "kernel", "stride", "padding", "box"),
    [((2, 3, 13, 19), 7, 2, 3, (1, 2, 16)), ((3, 3, 12, 16), 4, 4, 0, (1, 1, 32)), ((1, 1, 9, 9), 3, 1, 1, (1, 4, 8))],
)
def test_sums_over_packed_images(
    image: tuple[int, ...], kernel: int, stride: int, padding: int, box: tuple[int, int, int]
) -> None:
    """Lines of a packed image overlap in memory; what the space takes for the problem is what the plan computes."""
    workload = gradient((image[0], image[1], image[2], image[3]), 48, kernel, padding=padding, stride=stride)
    problem = problem_of(workload)
    packed = computed_problem(problem)
    base = whole_numbers((1, packed.layouts["x"].strides[0] * packed.n, 1, 1), 0).flatten()
    x = base.as_strided(packed.shapes["x"], packed.layouts["x"].strides)
    d_out = whole_numbers(packed.shapes["out"], 1)
    wanted = torch.nn.grad.conv2d_weight(x.contiguous(), packed.shapes["w"], d_out)
    attributes = {**DEFAULTS, "direction": "weight_gradient"}
    found = Simulation(x, d_out, packed.shapes["w"], box, (64, 64, 2), 3, attributes).run(3, 2)
    assert np.array_equal(found.sum(0), wanted.numpy())
    knobs = next(iter(WEIGHT_GRADIENT_WARP_SPECIALIZED.space(workload, H100))).knobs
    *_, main, _ = plan_of(workload, Schedule("weight_gradient_warp_specialized", knobs))
    given = dict(zip(main[0].arg_names, main[2], strict=True))
    assert (given["ROWS"], given["CHANNELS"], given["R"], given["S"]) == (48, *packed.shapes["w"][1:])
    assert given["x"].base.stride()[2:] == x.stride()[2:] or given["R"] == 1


def gradient(image: tuple[int, int, int, int], k: int, kernel: int, **given: Any) -> Workload:
    return conv2d_workload(image, k, kernel, direction="weight_gradient", **given)


NARROW = gradient((32, 64, 56, 56), 64, 3, padding=1)
DEEP = gradient((32, 256, 14, 14), 256, 3, padding=1)
STRIDED = gradient((256, 128, 56, 56), 128, 3, padding=1, stride=2)
POINTS = gradient((32, 64, 56, 56), 256, 1)

FIRST = gradient((32, 3, 224, 224), 64, 7, padding=3, stride=2)
PATCHES = gradient((32, 3, 224, 224), 128, 4, stride=4)

EXACT = gradient((256, 128, 28, 28), 128, 3, dtype="fp32", layout="nchw", padding=1)
THIN = gradient((1, 64, 56, 56), 64, 3, dtype="fp32", layout="nchw", padding=1)

GROUPED = gradient((32, 128, 56, 56), 128, 3, padding=1, groups=32)

BUILDS: dict[str, tuple[Workload, dict[str, int]]] = {
    "merged groups": (GROUPED, {"block_m": 64, "block_n": 64, "column_blocks": 10, "span": 16}),
    "parts": (EXACT, {"block_m": 128, "block_n": 128, "column_blocks": 1, "block_k": 32}),
    "parts, blocks shared out": (THIN, {"block_m": 64, "block_n": 64, "column_blocks": 4}),
    "few channels": (FIRST, {"block_m": 64, "block_n": 64, "column_blocks": 4, "block_k": 64, "span": 0}),
    "patches": (PATCHES, {"block_m": 128, "block_n": 64, "block_k": 64, "span": 0}),
    "all taps": (NARROW, {"block_m": 64, "block_n": 64, "column_blocks": 10, "block_k": 32, "num_stages": 5}),
    "wide": (DEEP, {"block_m": 128, "block_n": 256, "column_blocks": 1, "block_k": 64}),
    "strided": (STRIDED, {"block_m": 128, "block_n": 128, "column_blocks": 2, "block_k": 64}),
    "high": (POINTS, {"block_m": 256, "block_n": 64, "column_blocks": 1, "block_k": 128}),
}


def members(workload: Workload, **wanted: int) -> list[Schedule]:
    space = WEIGHT_GRADIENT_WARP_SPECIALIZED.space(workload, H100)
    return [s for s in space if all(s.knobs[name] == value for name, value in wanted.items())]


@pytest.mark.parametrize("name", BUILDS)
def test_schedules_build_without_spills(pool: BuildPool, name: str) -> None:
    workload, wanted = BUILDS[name]
    schedule = members(workload, **wanted)[0]
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    assert report.spills == 0
    estimate = WEIGHT_GRADIENT_WARP_SPECIALIZED.shared_bytes(workload, schedule)
    assert report.shared_bytes <= min(estimate + 1024, H100.shared_memory_bytes)
    code = " ".join(str(text) for name, text in report.artifact.items() if name.endswith(".ptx"))
    assert "wgmma.mma_async" in code and "cp.async.bulk.tensor" in code


@pytest.mark.parametrize("workload", [NARROW, DEEP, STRIDED, POINTS])
def test_parts_of_the_sum_fill_the_device(workload: Workload) -> None:
    schedules = members(workload)
    assert 3 <= len(schedules) <= 1000
    for schedule in schedules:
        launches = plan_of(workload, schedule)
        knobs = schedule.knobs
        rows, columns = -(-workload.dims["K"] // int(knobs["block_m"])), -(-workload.dims["C"] // int(knobs["block_n"]))
        tiles = rows * -(-workload.dims["R"] * workload.dims["S"] * columns // int(knobs["column_blocks"]))
        # half of the multiprocessors at least, unless one tile more would already be a second round
        assert tiles * int(knobs["split_k"]) * 2 > H100.multiprocessors - 2 * tiles
        assert len(launches) == (2 if int(knobs["split_k"]) > 1 else 1)


def plan_of(workload: Workload, schedule: Schedule) -> list[Any]:
    inputs, out = CONV2D.make_inputs(workload, 0, "meta"), CONV2D.empty_output(workload, "meta")
    launches: list[Any] = CONV2D.plan(workload, schedule, inputs, out)
    return launches


def test_fp32_is_divided_into_parts_whose_boxes_hold_whole_images() -> None:
    image = (6, 24, 7, 7)
    workload = gradient(image, 32, 3, dtype="fp32", padding=1)
    for schedule in members(workload):
        pixels = int(schedule.knobs["tile_h"]) * int(schedule.knobs["tile_w"])
        assert image[0] % max(1, int(schedule.knobs["block_k"]) // pixels) == 0
        x, d_out, main, *_ = plan_of(workload, schedule)
        assert x[0].fn.__name__ == d_out[0].fn.__name__ == "conv_copy_parts"
        given = dict(zip(main[0].arg_names, main[2], strict=True))
        assert (given["N"], given["PARTS"], given["PAIRS"]) == (6, 3, 6)
        assert given["x"].shape[0] == given["d"].shape[0] == 18
        # a cut sum has few products
        assert 0 < given["CHUNK"] * int(schedule.knobs["block_k"]) * given["PAIRS"] <= 1024


@pytest.mark.parametrize("budget", [None, 1e-2, 1e-3, 1e-4, 1e-5])
def test_every_budget_of_fp32_has_parts(budget: float | None) -> None:
    found = members(gradient((8, 64, 28, 28), 64, 3, dtype="fp32", error_budget=budget))
    assert found and {schedule.knobs["precision"] for schedule in found} <= {"bf16x3", "bf16x6"}


@pytest.mark.parametrize(
    ("channels", "k", "groups", "span"),
    [(128, 128, 32, 16), (1024, 1024, 32, 2), (96, 192, 12, 4), (64, 64, 1, 1), (240, 240, 3, 1), (512, 512, 128, 16)],
)
def test_small_groups_are_merged_up_to_a_line(channels: int, k: int, groups: int, span: int) -> None:
    workload = gradient((32, channels, 14, 14), k, 3, padding=1, groups=groups)
    schedule = members(workload)[0]
    assert {s.knobs["span"] for s in members(workload)} == {span}
    *_, main, total = plan_of(workload, schedule)
    given = dict(zip(main[0].arg_names, main[2], strict=True))
    assert (given["GROUPS"], given["ROWS"]) == (groups // span, k * span // groups)
    assert given["CHANNELS"] == channels * span // groups
    summed = dict(zip(total[0].arg_names, total[2], strict=True))
    assert (summed["SPAN"], summed["EACH"], summed["STEP"]) == (span, k // groups, 0)


def test_boxes_hold_few_pixels_that_are_not_there() -> None:
    assert offered_boxes(problem_of(POINTS)) == {(32, 1, 32), (64, 1, 64), (128, 1, 128)}
    assert (64, 2, 2) in offered_boxes(problem_of(DEEP)) and (64, 8, 8) not in offered_boxes(problem_of(DEEP))


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (conv2d_workload((8, 64, 28, 28), 64, 3, padding=1), "computes weight_gradient, not forward"),
        (gradient((8, 5, 28, 28), 32, 3), "only 3.5% of the smallest tiles"),
        (gradient((8, 60, 28, 28), 60, 3, groups=3), "groups of whole 16 bytes"),
        (gradient((8, 64, 1, 28), 64, 1, stride=2, padding=1), "no tap meets a pixel along H"),
        (gradient((0, 64, 28, 28), 64, 3), "at least one image"),
    ],
)
def test_what_it_cannot_run_is_told(workload: Workload, words: str) -> None:
    space = WEIGHT_GRADIENT_WARP_SPECIALIZED.space(workload, H100)
    assert not len(space)
    knobs = {name: knob.values[0] for name, knob in space.knobs.items()}
    assert any(words in reason for reason in space.why_illegal(Schedule(space.template, FrozenMap(knobs))))


@pytest.mark.parametrize(
    ("workload", "copies"),
    [
        (gradient((2, 64, 28, 28), 64, 3), 0),
        (gradient((2, 64, 28, 28), 64, 3, layouts={"x": "nchw"}), 1),
        (gradient((2, 64, 28, 27), 64, 3, stride=2), 1),
        (gradient((2, 60, 28, 28), 60, 1, layout="nchw"), 2),
        (gradient((2, 64, 28, 28), 64, 3, layouts={"x": "strided:0,1,1792,64"}), 1),
    ],
)
def test_images_that_the_engine_cannot_read_are_copied(workload: Workload, copies: int) -> None:
    schedule = members(workload)[0]
    *first, main = [x for x in plan_of(workload, schedule) if x[0].fn.__name__ != "sum_weight_parts"]
    assert [launch[0].fn.__name__ for launch in first] == ["conv_copy_tiles"] * copies
    names = dict(zip(main[0].arg_names, main[2], strict=True))
    for name in ("d", "x"):
        descriptor = names[name]
        assert all(stride % 8 == 0 for stride in descriptor.strides[:-1]) and min(descriptor.shape) > 0
    if problem_of(workload).r == 1:
        # copies are dense, so that all pixels are one row
        assert names["OUT_W"] == 2 * 28 * 28


def test_it_is_written_for_one_architecture() -> None:
    assert not len(WEIGHT_GRADIENT_WARP_SPECIALIZED.space(NARROW, named_device("b200")))


def test_little_memory_and_long_sums_are_kept_to() -> None:
    small = gradient((32, 64, 56, 56), 64, 3, padding=1, attributes={"workspace_bytes": 2**23})
    assert members(small)
    assert max(int(s.knobs["split_k"]) for s in members(small)) * 4 * 64 * 64 * 9 <= 2**23
    long = gradient((1, 128, 1024, 1024), 128, 3, padding=1)
    assert min(int(s.knobs["split_k"]) for s in members(long)) >= 16
