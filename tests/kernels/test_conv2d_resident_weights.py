"""Convolution with resident weights without a GPU: its own code run by simulated warps, and built for sm_90."""

from __future__ import annotations

import importlib
import math
import types
from typing import Any

import numpy as np
import pytest
import torch

from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.resident_weights import RESIDENT_WEIGHTS
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.types import Scalar, Workload
from tests.kernels.simulated_tiles import Accumulator, Array
from tests.kernels.simulated_warps import Barrier, Machine

H100 = named_device("h100")
FUNCTIONS = ("resident_share", "resident_place", "resident_producer", "resident_consumer", "resident_multiply")
STAGES, BLOCK_N = 2, 64


class Lines:
    """Shared memory as lines of 64 elements, eight to an index; a view may be longer than what it was taken from."""

    dtype = types.SimpleNamespace(primitive_bitwidth=16)

    def __init__(self, memory: Array, first: int = 0, shape: tuple[int, ...] = (), turned: bool = False) -> None:
        self.memory, self.first, self.shape, self.turned = memory, first, shape, turned

    def index(self, slot: int) -> Lines:
        return Lines(self.memory, slot * 8, (8, 64))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Lines:
        return Lines(self.memory, self.first, tuple(shape))

    def permute(self, order: tuple[int, int]) -> Lines:
        return Lines(self.memory, self.first, self.shape, not self.turned)

    @property
    def mine(self) -> Array:
        count = math.prod(self.shape) // 64
        assert self.first >= 0 and self.first + count <= len(self.memory), "lines outside of the buffer"
        return self.memory[self.first : self.first + count]

    def read(self) -> Array:
        return self.mine.T if self.turned else self.mine


class Source:
    """A tensor of which boxes are copied; what lies outside of it reads as zero."""

    dtype, layout = Lines.dtype, None

    def __init__(self, values: Array, box: tuple[int, ...]) -> None:
        self.values, self.box = values, box
        self.block_type = types.SimpleNamespace(shape=list(box))

    def at(self, place: list[int]) -> Array:
        spans = zip(place, self.box, self.values.shape, strict=True)
        grids = np.ix_(*(np.arange(start, start + length) for start, length, _ in spans))
        inside = np.logical_and.reduce(
            np.broadcast_arrays(*((g >= 0) & (g < size) for g, size in zip(grids, self.values.shape, strict=True)))
        )
        held = tuple(np.clip(g, 0, size - 1) for g, size in zip(grids, self.values.shape, strict=True))
        return np.where(inside, self.values[held], 0.0).reshape(-1, 64)


class Simulation:
    """Both producers and both consumers of one program after the other. x [N, H, W, C], w [K, taps, channels]."""

    def __init__(self, x: Array, w: Array, out: tuple[int, ...], taps: tuple[int, int], pad: tuple[int, int],
                 tile: tuple[int, int], groups: int) -> None:  # fmt: skip
        self.taps, self.pad, self.tile, self.groups = taps, pad, tile, groups
        self.tail = 2 ** math.ceil(math.log2(taps[0] - 1)) if taps[0] > 1 else 0
        self.x, self.x_tail = (Source(x, (1, rows, tile[1], 64)) for rows in (tile[0], max(self.tail, 1)))
        self.w, self.blocks = Source(w, (BLOCK_N, 1, 64)), math.ceil(w.shape[2] / 64)
        self.channels, self.out = w.shape[2], np.full(out, np.nan)
        self.cols = out[3] // groups

    def run(self, seed: int, programs: int) -> Array:
        for program in range(programs):
            self._run_program(program, programs, Machine(seed))
        return self.out

    def _run_program(self, program: int, programs: int, machine: Machine) -> None:
        lines = (self.tile[0] + self.tail) * self.tile[1]
        rings = [Lines(np.full((STAGES * lines, 64), np.nan)) for _ in range(2)]
        places = self.taps[0] * self.taps[1] * self.blocks
        w_lines = Lines(np.full((places * BLOCK_N, 64), np.nan))
        full, empty = ([[Barrier(1) for _ in range(STAGES)] for _ in range(2)] for _ in range(2))
        w_full, w_empty = Barrier(1), Barrier(2)
        names = self._names(machine, program, programs)
        sizes = (*self.out.shape[:3], self.cols)
        tiling = (*self.tile, self.tail, BLOCK_N, self.blocks, STAGES)

        def ring_of(which: int) -> tuple[Any, Any]:
            return tuple(types.SimpleNamespace(index=x[which].__getitem__) for x in (full, empty))  # type: ignore[return-value]

        def producer(which: int) -> None:
            names["resident_producer"](
                which, self.x, self.x_tail, self.w, rings[which], w_lines, *ring_of(which), w_full, w_empty, *sizes,
                self.channels, self.groups, *self.taps, *self.pad, *tiling,
            )  # fmt: skip

        def consumer(which: int) -> None:
            names["resident_consumer"](
                which, None, None, None, None, rings[which], w_lines, None, *ring_of(which), w_full, w_empty, *sizes,
                self.groups, *self.taps, *tiling, 1, "simulated", "",
            )  # fmt: skip

        machine.run([lambda: producer(0), lambda: producer(1), lambda: consumer(0), lambda: consumer(1)])

    def _finish(self, acc: Accumulator, *rest: Any) -> None:
        n, i, j, k = rest[5:9]
        last = rest[11]
        for row in range(self.tile[0] * self.tile[1]):
            p, q = i + row // self.tile[1], j + row % self.tile[1]
            if p < self.out.shape[1] and q < self.out.shape[2]:
                part = self.out[n, p, q, k : min(k + BLOCK_N, last)]
                assert np.isnan(part).all(), "a pixel was written twice"
                part[:] = acc.value[row, : len(part)]

    def _names(self, machine: Machine, program: int, programs: int) -> dict[str, Any]:
        """What the kernel's functions see in place of Gluon."""

        def load(source: Source, place: list[int], barrier: Barrier, slot: Lines) -> None:
            machine.pause()
            box = source.at(place)

            def land() -> None:
                slot.mine[:] = box
                barrier.bytes -= box.size * 2
                barrier.settle()

            machine.copies.append(land)

        def multiply(x: Lines, y: Lines, acc: Accumulator, use_acc: bool, is_async: bool) -> Accumulator:
            machine.pause()
            acc.multiply(x, y, use_acc)  # type: ignore[arg-type]
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
        )  # fmt: skip
        names: dict[str, Any] = {
            **language(program, programs), "mbarrier": wait, "tma_load": load,
            "warpgroup_mma": multiply, "warpgroup_mma_wait": settle, "warpgroup_mma_init": lambda acc: acc,
            "resident_finish": self._finish,
        }  # fmt: skip
        kernel = importlib.import_module(RESIDENT_WEIGHTS.kernel_module)
        for name in FUNCTIONS:
            names[name] = types.FunctionType(getattr(kernel, name).fn.__code__, names, name)
        return names


class Number(int):
    """A program's number, whose comparisons can be turned into numbers as Gluon's can."""

    def __lt__(self, other: int) -> Any:
        less = int(self) < other
        return types.SimpleNamespace(to=lambda kind: kind(less))


def language(program: int, programs: int) -> dict[str, Any]:
    """The parts of Gluon that have no side effects, for one of several programs."""
    gl = types.SimpleNamespace(
        cdiv=lambda x, y: -(-x // y), static_range=range, NVMMADistributedLayout=lambda **shape: None,
        NVMMASharedLayout=lambda *shape: None, program_id=lambda axis: Number(program), int32=int,
        num_programs=lambda axis: programs, zeros=lambda shape, dtype, layout: Accumulator(*shape), float32=None,
    )  # fmt: skip
    return {"gl": gl, "range": range, "min": min, "max": max}


def whole_numbers(sizes: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, sizes).astype(float))


CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int], tuple[int, int], int, int]] = [
    # image, weight [K, C/groups, R, S], pad, tile, groups, programs
    ((2, 64, 9, 10), (64, 64, 3, 3), (1, 1), (8, 8), 1, 3),
    ((3, 128, 7, 7), (128, 64, 3, 3), (1, 1), (8, 8), 2, 4),
    ((1, 72, 11, 17), (70, 72, 4, 1), (0, 0), (4, 16), 1, 2),
    ((1, 64, 9, 9), (192, 64, 1, 2), (0, 1), (8, 8), 1, 1),
]


@pytest.mark.parametrize(("image", "weight", "pad", "tile", "groups", "programs"), CASES)
def test_simulated_warps_compute_convolutions(
    image: tuple[int, ...], weight: tuple[int, ...], pad: tuple[int, int], tile: tuple[int, int], groups: int,
    programs: int,
) -> None:  # fmt: skip
    x, w = whole_numbers(image, 0), whole_numbers(weight, 1)
    wanted = torch.nn.functional.conv2d(x, w, None, 1, pad, 1, groups).permute(0, 2, 3, 1)
    wide = w.permute(0, 2, 3, 1).reshape(weight[0], weight[2] * weight[3], weight[1])
    lines = x.permute(0, 2, 3, 1).contiguous()
    simulation = Simulation(lines.numpy(), wide.numpy(), wanted.shape, weight[2:], pad, tile, groups)  # type: ignore[arg-type]
    assert np.array_equal(simulation.run(5, programs), wanted.numpy())


BN = ("scale_vec", "bias", "relu")
BUILDS: dict[str, tuple[Workload, dict[str, Scalar]]] = {
    "grouped": (
        conv2d_workload((32, 128, 56, 56), 128, 3, epilogue=BN, padding=1, groups=32),
        {"span": 16, "tile_h": 8, "tile_w": 8, "num_stages": 3},
    ),
    "grouped gradient": (
        conv2d_workload((32, 1024, 7, 7), 1024, 3, padding=1, groups=32, direction="input_gradient"),
        {"span": 2, "tile_h": 8, "tile_w": 8, "num_stages": 3},
    ),
    "first layer": (
        conv2d_workload((32, 3, 224, 224), 64, 7, "fp16", epilogue=BN, stride=2, padding=3),
        {"span": 0, "tile_h": 8, "tile_w": 16, "num_stages": 3},
    ),
}


@pytest.mark.parametrize("case", BUILDS)
def test_good_schedules_build_without_spills(pool: BuildPool, case: str) -> None:
    workload, wanted = BUILDS[case]
    space = RESIDENT_WEIGHTS.space(workload, H100)
    schedule = next(s for s in space if all(s.knobs[name] == value for name, value in wanted.items()))
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    assert report.spills == 0
    assert report.shared_bytes <= CONV2D.templates["resident_weights"].shared_bytes(workload, schedule) + 1024
    code = " ".join(str(text) for name, text in report.artifact.items() if name.endswith(".ptx"))
    assert "wgmma.mma_async" in code and "cp.async.bulk.tensor" in code


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"groups": 2, "stride": 2}, "stride 1"),
        ({"groups": 2, "dilation": 2}, "neighbours"),
        ({"groups": 64}, "by themselves"),
        ({"groups": 2, "attributes": {"workspace_bytes": 64}}, "workspace"),
    ],
)
def test_what_it_cannot_run(given: dict[str, Any], words: str) -> None:
    space = RESIDENT_WEIGHTS.space(conv2d_workload((2, 64, 16, 16), 64, 3, "fp16", **given), H100)
    assert not len(space)
    fitting = RESIDENT_WEIGHTS.space(conv2d_workload((2, 64, 16, 16), 64, 3, "fp16"), H100)
    reasons = space.why_illegal(next(iter(fitting)))
    assert any(words in reason for reason in reasons), reasons
