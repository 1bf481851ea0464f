"""The shared-out warp-specialised template without a GPU: its own code run by simulated warps of several programs."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernelwright.kernels.matmul.stream_k_warp_specialized import STREAM_K_WARP_SPECIALIZED, pieces
from kernelwright.kernels.source import kernel_sources
from tests.kernels.simulated_tiles import WIDTH, Accumulator, Array, Ring, View
from tests.kernels.simulated_warps import Barrier, Machine, Stuck

NAMES = (
    *("ws_load", "tile_of", "sk_start", "sk_program_of", "sk_piece", "ws_halves"),
    *(
        "sk_share",
        "sk_producer",
        "sk_multiply",
        "sk_multiply_held",
        "sk_places",
        "sk_wait",
        "sk_add_parts",
        "sk_finish_part",
        "sk_finish",
        "sk_consumer",
    ),
)
"""Functions of the kernel file that run here as they stand."""


class Tile(np.ndarray[Any, Any]):
    """Finished sums, in registers."""

    type = types.SimpleNamespace(layout=None)

    def permute(self, order: tuple[int, ...]) -> Array:
        return self.transpose(order)


class Simulation:
    """All programs of the kernel, as Python functions over simulated barriers, shared memory and workspace."""

    def __init__(self, a: Array, b: Array, programs: int, stages: int, tile: tuple[int, int], **knobs: Any) -> None:
        self.programs, self.stages, self.tile = programs, stages, tile
        self.held = knobs.get("held", False)
        self.waves, self.subtile, self.steps = knobs.get("waves", 1), knobs.get("subtile", 1), knobs.get("steps", "")
        self.a_row, self.b_row = a.flags.c_contiguous, b.flags.c_contiguous
        self.a, self.b = (a if self.a_row else a.T), (b if self.b_row else b.T)
        (self.m, self.k), self.n = a.shape, b.shape[1]
        self.out: Array = np.full((self.m, self.n), np.nan)
        self.parts: Array = np.full(programs * tile[0] * tile[1], np.nan)
        self.flags = [0] * (2 * programs)
        self.first_runs = 0
        kernel = importlib.import_module(STREAM_K_WARP_SPECIALIZED.kernel_module)
        tiles = -(-self.m // tile[0]) * -(-self.n // tile[1])
        self.stream_tiles = kernel.streamed_tiles(tiles, programs, self.waves) if self.waves else 0
        places = [kernel, *map(importlib.import_module, kernel_sources(STREAM_K_WARP_SPECIALIZED.kernel_module))]
        homes = {name: next(file for file in places if hasattr(file, name)) for name in NAMES}
        self.code = {name: getattr(home, name).fn.__code__ for name, home in homes.items()}

    def run(self, seed: int, patient: bool = True) -> Array:
        """out after all programs, which run side by side. patient: whether they wait for each other's parts."""
        machine = Machine(seed)
        partitions = [part for p in range(self.programs) for part in self._program(machine, p, patient)]
        machine.run(partitions)
        return self.out

    def _program(self, machine: Machine, program: int, patient: bool) -> list[Callable[[], None]]:
        (m, n), stages = self.tile, self.stages
        wide, rest = pieces(n)
        full, empty = [Barrier(1) for _ in range(stages)], [Barrier(2) for _ in range(stages)]
        boxes = (
            (m, m if self.a_row else WIDTH),
            (wide, WIDTH if self.b_row else wide),
            (rest, WIDTH if self.b_row else rest),
        )
        rings = [Ring(np.full(stages * x * WIDTH, np.nan), (stages * x // (y or 1), y, WIDTH)) for x, y in boxes]
        shared = [types.SimpleNamespace(index=x.__getitem__) for x in (full, empty)]
        names = self._names(machine, program, patient)
        shares = divmod(self.stream_tiles * -(-self.k // WIDTH), self.programs)
        sizes = (self.m, self.n, self.k, self.stream_tiles, *shares)
        constants = (m, n, WIDTH, rest, stages, 2, self.a_row, self.b_row)
        c_ring = Ring(np.zeros(0), (1, m // 2, WIDTH))

        def producer() -> None:
            names["sk_producer"](self.a, self.b, self.b, *rings, *shared, *sizes, *constants, self.waves > 0)

        def consumer(which: int) -> None:
            names["sk_consumer"](
                which, None, None, None, None, 0, 0, *rings, c_ring, *shared, *sizes, self.subtile,
                0, 0, *constants, self.held, self.subtile, self.waves > 0, "simulated", self.steps,
            )  # fmt: skip

        return [producer, lambda: consumer(0), lambda: consumer(1)]

    def _names(self, machine: Machine, program: int, patient: bool) -> dict[str, Any]:
        """What the kernel's functions see in place of Gluon."""
        names = {
            "gl": self._language(machine, program, patient),
            "tl": types.SimpleNamespace(
                minimum=min, maximum=max, where=lambda c, x, y: x if c else y,
                program_id=lambda axis: program, num_programs=lambda axis: self.programs,
            ),
            "mbarrier": _barriers(machine),
            "tma_load": lambda *args: _load(machine, *args),
            "gluon_barrier": machine.pause,
            "short_finish": lambda x, operands, batch, rows, cols, m, n, steps: x,
            "sk_prefetch": lambda *args: None,
            "is_long": lambda steps: steps == "gelu",
            "ws_store": self._store,
            **_products(machine),
        }  # fmt: skip
        for name, code in self.code.items():
            names[name] = types.FunctionType(code, names, name)
        return names

    def _store(self, x: Array, c: Any, c_ring: Any, out: Any, row: int, col: int, *rest: Any) -> None:
        part = self.out[row : row + x.shape[0], col : col + x.shape[1]]
        self.first_runs += row >= self.m
        assert np.isnan(part).all(), "a tile was written twice"
        part[:] = x[: part.shape[0], : part.shape[1]]

    def _language(self, machine: Machine, program: int, patient: bool) -> types.SimpleNamespace:
        def store(places: Array, x: Array) -> None:
            machine.pause()
            assert len(np.unique(places)) == x.size, "two numbers have one place"
            self.parts[places] = x

        def load(places: Array, cache_modifier: str) -> Array:
            machine.pause()
            found = self.parts[places]
            self.parts[places] = np.nan
            return found

        def raise_flag(flag: int, value: int, sem: str) -> None:
            machine.pause()
            assert (self.flags[flag], sem) == (0, "release")
            self.flags[flag] = value

        def take_flag(flag: int, wanted: int, value: int, sem: str) -> int:
            assert sem == "acquire"
            machine.pause(lambda: not patient or self.flags[flag] == wanted)
            self.flags[flag] = value
            return wanted

        return types.SimpleNamespace(
            cdiv=lambda x, y: -(-x // y), static_range=range, minimum=min, maximum=max,
            zeros=lambda shape, dtype, layout: Accumulator(*shape), convert_layout=lambda x, layout: x,
            DotOperandLayout=lambda **operand: "registers",
            program_id=lambda axis: program, num_programs=lambda axis: self.programs, float32=None,
            NVMMADistributedLayout=lambda **shape: None, NVMMASharedLayout=lambda *shape: None,
            SliceLayout=lambda dim, layout: None, arange=lambda start, end, layout: np.arange(start, end),
            split=lambda x: (x[..., 0].view(Tile), x[..., 1].view(Tile)),
            store=store, load=load, atomic_xchg=raise_flag, atomic_cas=take_flag,
        )  # fmt: skip


def _barriers(machine: Machine) -> types.SimpleNamespace:
    def expect(barrier: Barrier, count: int) -> None:
        machine.pause()
        barrier.bytes += count
        barrier.arrive()

    def arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        machine.pause()
        if pred:
            barrier.arrive(count)

    return types.SimpleNamespace(
        wait=lambda barrier, parity: machine.pause(lambda: barrier.passed(parity)), expect=expect, arrive=arrive
    )


def _load(machine: Machine, matrix: Array, place: list[int], barrier: Barrier, slot: View) -> None:
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


def _products(machine: Machine) -> dict[str, Any]:
    def multiply(x: View, y: View, acc: Accumulator, use_acc: bool, is_async: bool) -> Accumulator:
        machine.pause()
        acc.multiply(x, y, use_acc)
        return acc

    def settle(left: int, deps: tuple[Accumulator, ...]) -> Any:
        machine.pause()
        # products are started by turns
        assert left % len(deps) == 0
        for acc in deps:
            acc.finish(left // len(deps))
        done = deps if left else tuple(acc.value.view(Tile) for acc in deps)
        return done if len(deps) > 1 else done[0]

    def resume(acc: Accumulator | Tile) -> Accumulator:
        if isinstance(acc, Accumulator):
            return acc
        again = Accumulator(*acc.shape)
        again.value = np.asarray(acc)
        return again

    return {"warpgroup_mma": multiply, "warpgroup_mma_wait": settle, "warpgroup_mma_init": resume}


def integers(rows: int, columns: int, order: str, seed: int) -> Array:
    """Small whole numbers, so that products are exact, in C ("row") or Fortran order."""
    x = np.random.default_rng(seed).integers(-3, 4, (rows, columns)).astype(float)
    return np.ascontiguousarray(x) if order == "row" else np.asfortranarray(x)


def result(
    sizes: tuple[int, int, int], programs: int, stages: int, tile: tuple[int, int], seed: int, **knobs: Any
) -> tuple[Simulation, bool]:
    """A simulation that has run, and whether its result is right."""
    m, n, k = sizes
    order = knobs.pop("order", ("row", "col"))
    patient = knobs.pop("patient", True)
    a, b = integers(m, k, order[0], 0), integers(k, n, order[1], 1)
    sim = Simulation(a, b, programs, stages, tile, **knobs)
    return sim, np.array_equal(sim.run(seed, patient), a @ b)


@pytest.mark.parametrize(
    ("sizes", "programs", "stages", "tile", "waves"),
    [
        ((128, 128, 700), 4, 3, (128, 128), 1),
        ((200, 300, 330), 4, 4, (128, 144), 1),
        ((250, 380, 200), 5, 3, (128, 160), 2),
        ((300, 128, 64), 4, 3, (128, 64), 1),
        ((256, 330, 130), 2, 5, (128, 192), 0),
    ],
    ids=["one tile for all", "two pieces", "a whole wave too", "one step a tile", "whole tiles only"],
)
def test_no_order_of_events_deadlocks_or_loses_a_part(
    sizes: tuple[int, int, int], programs: int, stages: int, tile: tuple[int, int], waves: int
) -> None:
    sim, right = result(sizes, programs, stages, tile, programs, waves=waves)
    assert right
    assert not any(sim.flags), "a flag is still up"
    assert np.isnan(sim.parts).all(), "a part was left and never taken"


@pytest.mark.parametrize("order", [("row", "col"), ("row", "row"), ("col", "row"), ("col", "col")])
def test_tiles_are_put_together_right_in_every_layout(order: tuple[str, str]) -> None:
    _, right = result((200, 400, 136), 3, 3, (128, 192), 0, order=order, subtile=2)
    assert right


@pytest.mark.parametrize("waves", [0, 1, 2])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("steps", ["", "gelu"])
@pytest.mark.parametrize("order", [("row", "col"), ("row", "row")])
def test_both_pieces_take_a_from_registers_fetched_a_stage_ahead(
    waves: int, stages: int, steps: str, order: tuple[str, str]
) -> None:
    tile = (128, 160 if order[1] == "col" else 192)
    sim, right = result((250, 430, 330), 4, stages, tile, waves, waves=waves, steps=steps, order=order, held=True)
    assert right
    assert np.isnan(sim.parts).all() and not any(sim.flags)


@pytest.mark.parametrize(
    ("sizes", "tile", "waves"), [((250, 380, 200), (128, 160), 2), ((256, 330, 130), (128, 192), 0)], ids=str
)
@pytest.mark.parametrize("subtile", [1, 2, 4])
def test_a_first_run_of_a_long_epilogue_writes_nothing_and_leaves_the_ring_alone(
    sizes: tuple[int, int, int], tile: tuple[int, int], waves: int, subtile: int
) -> None:
    sim, right = result(sizes, 3, 3, tile, subtile, waves=waves, subtile=subtile, steps="gelu")
    assert right
    assert sim.first_runs == 2 * 3 * 2, "each warpgroup of each program, for each of the two pieces of a tile"


def test_parts_of_tiles_of_256_rows_meet_again_subtile_by_subtile() -> None:
    _, right = result((300, 100, 200), 3, 3, (256, 128), 0, subtile=4)
    assert right


@pytest.mark.parametrize(("tiles", "k_steps"), [(64, 16), (80, 128), (1, 700), (131, 8), (132, 8), (300, 71), (3, 1)])
def test_no_more_programs_share_tiles_out_than_the_longest_share_needs(tiles: int, k_steps: int) -> None:
    kernel = importlib.import_module(STREAM_K_WARP_SPECIALIZED.kernel_module)
    most = min(132, tiles * k_steps)
    programs = kernel.sharing_programs(tiles, k_steps, most)
    assert 1 <= programs <= most
    assert programs == most or tiles < most
    longest = -(-tiles * k_steps // programs)
    assert tiles >= most or longest == -(-tiles * k_steps // most)


def test_two_programs_share_each_tile_where_that_comes_out_even() -> None:
    kernel = importlib.import_module(STREAM_K_WARP_SPECIALIZED.kernel_module)
    assert kernel.sharing_programs(64, 16, 132) == 128


def test_the_simulation_finds_programs_that_do_not_wait() -> None:
    outcomes = []
    for seed in range(3):
        try:
            outcomes.append(result((128, 128, 500), 3, 3, (128, 128), seed, patient=False)[1])
        except (AssertionError, Stuck):
            outcomes.append(False)
    assert not all(outcomes)
