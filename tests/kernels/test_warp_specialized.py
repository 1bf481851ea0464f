"""The warp-specialised template without a GPU: its own barrier code run by simulated warps."""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np
import pytest

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.warp_specialized import WARP_SPECIALIZED
from kernelwright.types import Scalar
from tests.kernels.simulated_tiles import WIDTH, Accumulator, Array, Ring, View
from tests.kernels.simulated_warps import Barrier, Machine, Stuck

H100 = named_device("h100")
KNOBS: dict[str, Scalar] = {
    "mode": "cooperative",
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "num_warps": 8,
    "num_stages": 3,
    "group_m": 8,
    "split_k": 1,
    "subtile": 1,
    "repack": 0,
    "precision": "bf16",
}


class Simulation:
    """The producer and the consumers of the kernel file, as Python functions over simulated barriers and memory."""

    def __init__(self, a: Array, b: Array, knobs: dict[str, Any], programs: int, paired: bool = False) -> None:
        self.knobs, self.programs, self.paired = knobs, programs, paired
        self.a_row, self.b_row = a.flags.c_contiguous, b.flags.c_contiguous
        self.a, self.b = (a if self.a_row else a.T), (b if self.b_row else b.T)
        (self.m, self.k), self.n = a.shape, b.shape[1] // (2 if paired else 1)
        self.out: Array = np.full((2 if paired else 1, self.m, self.n), np.nan)

    def run(self, seed: int, ordered: bool = True) -> Array:
        """out after all programs (both halves of a gated product). ordered: whether consumers wait for their turn."""
        for program in range(self.programs):
            self._run_program(program, seed, ordered)
        return self.out

    def _run_program(self, program: int, seed: int, ordered: bool) -> None:
        pingpong, stages = self.knobs["mode"] == "pingpong", self.knobs["num_stages"]
        m, n = self.knobs["block_m"], self.knobs["block_n"] * (2 if self.paired else 1)
        machine = Machine(seed)
        full = [Barrier(1) for _ in range(stages)]
        empty = [Barrier(1 if pingpong else 2) for _ in range(stages)]
        order = [Barrier(1), Barrier(1)]
        boxes = ((m, m if self.a_row else WIDTH), (n, WIDTH if self.b_row else self.knobs["block_n"]))
        rings = [Ring(np.full(stages * x * WIDTH, np.nan), (stages * x // box, box, WIDTH)) for x, box in boxes]
        names = self._names(machine, program, None if ordered else order)
        shared = [types.SimpleNamespace(index=x.__getitem__) for x in (full, empty, order)]
        sizes = (self.m, self.n, self.k)
        constants = (m, n, WIDTH, stages, self.knobs["group_m"], self.a_row, self.b_row)

        def producer() -> None:
            names["ws_producer"](self.a, self.b, *rings, *shared[:2], *sizes, *constants, self.paired)

        def consumer(which: int) -> None:
            names["ws_consumer"](
                which, None, None, None, *rings, None, *shared, *sizes, 0, 0, *constants, pingpong, 1, self.paired,
                "simulated", "",
            )  # fmt: skip

        machine.run([producer, lambda: consumer(0), lambda: consumer(1)])

    def _names(self, machine: Machine, program: int, passed_by: list[Barrier] | None) -> dict[str, Any]:
        """What the kernel's functions see in place of Gluon."""

        def load(matrix: Array, place: list[int], barrier: Barrier, slot: View) -> None:
            machine.pause()
            (row, column), (rows, columns) = place, slot.shape
            part = matrix[row : row + rows, column : column + columns]
            # what lies outside of the tensor is filled with zeros
            tile = np.zeros(slot.shape)
            tile[: part.shape[0], : part.shape[1]] = part

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

        def epilogue(acc: Accumulator, *rest: Any) -> None:
            row, column = rest[4:6]
            for _ in range(machine.rng.randrange(20)):
                machine.pause()
            for half, tile in enumerate(np.split(acc.value, len(self.out), axis=1)):
                part = self.out[half, row : row + tile.shape[0], column : column + tile.shape[1]]
                assert np.isnan(part).all(), "a tile was written twice"
                part[:] = tile[: part.shape[0], : part.shape[1]]

        names = self._language(program) | {
            "mbarrier": self._barriers(machine, passed_by),
            "tma_load": load,
            "warpgroup_mma": multiply,
            "warpgroup_mma_wait": settle,
            "ws_epilogue": epilogue,
        }
        kernel = importlib.import_module(WARP_SPECIALIZED.kernel_module)
        for name in ("ws_load", "ws_producer", "ws_multiply", "ws_consumer", "tile_of"):
            names[name] = types.FunctionType(getattr(kernel, name).fn.__code__, names, name)
        return names

    def _barriers(self, machine: Machine, passed_by: list[Barrier] | None) -> types.SimpleNamespace:
        def wait(barrier: Barrier, parity: int) -> None:
            if passed_by is None or barrier not in passed_by:
                machine.pause(lambda: barrier.passed(parity))

        def expect(barrier: Barrier, count: int) -> None:
            machine.pause()
            barrier.bytes += count
            barrier.arrive()

        def arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
            machine.pause()
            if pred:
                barrier.arrive(count)

        return types.SimpleNamespace(wait=wait, expect=expect, arrive=arrive)

    def _language(self, program: int) -> dict[str, Any]:
        """The parts of Gluon that have no side effects."""
        gl = types.SimpleNamespace(
            cdiv=lambda x, y: -(-x // y), static_range=range, NVMMADistributedLayout=lambda **shape: None,
            program_id=lambda axis: program, num_programs=lambda axis: self.programs,
            zeros=lambda shape, dtype, layout: Accumulator(*shape), float32=None,
        )  # fmt: skip
        plain = {"tl": types.SimpleNamespace(minimum=min), "warpgroup_mma_init": lambda acc: acc, "range": range}
        return {"gl": gl, **plain}


def integers(rows: int, columns: int, order: str, seed: int) -> Array:
    """Small whole numbers, so that products are exact, in C ("row") or Fortran order."""
    x = np.random.default_rng(seed).integers(-3, 4, (rows, columns)).astype(float)
    return np.ascontiguousarray(x) if order == "row" else np.asfortranarray(x)


def simulation(m: int, n: int, k: int, layouts: tuple[str, str], programs: int, paired: bool, **knobs: Scalar) -> Any:
    """(the simulation, what it must give)."""
    a, b = integers(m, k, layouts[0], 0), integers(k, n, layouts[1], 1)
    halves = np.stack(np.split(a @ b, 2 if paired else 1, axis=1))
    return Simulation(a, b, {**KNOBS, **knobs}, programs, paired), halves


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", ["cooperative", "pingpong"])
@pytest.mark.parametrize(
    ("sizes", "stages", "programs"),
    [((300, 300, 100), 4, 2), ((200, 260, 330), 3, 2), ((130, 500, 200), 5, 1), ((300, 130, 64), 3, 4)],
    ids=["fewer steps than stages", "more steps than stages", "one program", "one step, tiles for some programs only"],
)
def test_no_order_of_events_deadlocks_or_spoils_a_tile(
    sizes: tuple[int, int, int], stages: int, programs: int, mode: str, seed: int
) -> None:
    sim, wanted = simulation(*sizes, ("row", "col"), programs, False, mode=mode, num_stages=stages)
    assert np.array_equal(sim.run(seed), wanted)


@pytest.mark.parametrize("mode", ["cooperative", "pingpong"])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("layouts", [("row", "col"), ("row", "row"), ("col", "row"), ("col", "col")])
def test_tiles_are_put_together_right_in_every_layout(layouts: tuple[str, str], paired: bool, mode: str) -> None:
    # the right half of b's columns begins where out's columns end, here inside a tile
    sim, wanted = simulation(200, 400, 136, layouts, 2, paired, mode=mode, block_n=64 if paired else 128)
    assert np.array_equal(sim.run(0), wanted)


def test_the_simulation_finds_consumers_that_do_not_take_turns() -> None:
    outcomes = []
    for seed in range(6):
        sim, wanted = simulation(300, 400, 200, ("row", "col"), 1, False, mode="pingpong", num_stages=3)
        try:
            outcomes.append(np.array_equal(sim.run(seed, ordered=False), wanted))
        except (AssertionError, Stuck):
            outcomes.append(False)
    assert not all(outcomes)
