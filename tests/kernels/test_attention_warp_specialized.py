"""The warp-specialised attention without a GPU: its own code run by simulated warps over simulated barriers."""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np
import pytest

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.types import Workload
from tests.kernels.simulated_attention import Array, Descriptor, Pointer, View, copies, language, products
from tests.kernels.simulated_warps import Barrier, Machine, Stuck

MODULES = ("forward_warp_specialized_kernel", "warpgroup_kernel")
LOG2E = 1.4426950408889634


class Simulation:
    """The producer and the consumers of one workload as Python functions; q, k, v in fp64."""

    def __init__(self, workload: Workload, programs: int, **knobs: Any) -> None:
        self.workload, self.programs, self.knobs = workload, programs, knobs
        self.inputs = ATTENTION.make_inputs(workload, 3, "cpu")
        dims = workload.dims
        self.out: Array = np.full((dims["B"], dims["Hq"], dims["Sq"], dims["Dv"]), np.nan)
        self.lse: Array = np.full(self.out.shape[:3], np.nan)

    def error(self, seed: int, ordered: bool = True) -> float:
        """The largest error of out and lse after all programs. ordered: whether consumers wait for their turn."""
        for program in range(self.programs):
            self._run_program(program, seed, ordered)
        found = ATTENTION.reference(self.workload, self.inputs)
        assert isinstance(found, tuple)
        out, lse = (x.numpy() for x in found)
        hidden = np.isinf(lse)
        assert np.array_equal(self.lse[hidden], lse[hidden]), "a row without keys must have -inf"
        return float(max(np.abs(self.out - out).max(), np.abs(self.lse[~hidden] - lse[~hidden]).max(initial=0)))

    def _run_program(self, program: int, seed: int, ordered: bool) -> None:
        dims, attributes, knobs = self.workload.dims, self.workload.attributes, self.knobs
        machine, stages, block_n = Machine(seed), knobs["stages"], knobs["block_n"]
        (d0, d1), (v0, v1) = knobs["d_parts"], knobs["v_parts"]
        q, k, v = (self.inputs[name].double().numpy() for name in ("q", "k", "v"))
        sources = [Descriptor(x, w) for x, w in ((q, d0), (q, d1), (k, d0), (k, d1), (v, v0), (v, v1))]
        slots = knobs["slots"]
        rings = [View(np.full((2 * slots, 1, 1, 64, d), np.nan)) for d in (d0, d1 or d0)]
        rings += [View(np.full((stages, 1, 1, block_n, d), np.nan)) for d in (d0, d1 or d0, v0, v1 or v0)]
        counts = [(slots, 1), (slots, 2), (stages, 1), (stages, 2), (stages, 1), (stages, 2), (2, 1)]
        barriers = [[Barrier(count) for _ in range(many)] for many, count in counts]
        shared = [types.SimpleNamespace(index=group.__getitem__) for group in barriers]
        names = self._names(machine, program, None if ordered else barriers[-1])
        causal, window = attributes.get("causal", ""), attributes.get("window", 0)
        cap, scale = attributes.get("softcap", 0.0), dims["D"] ** -0.5
        len_q, len_k, heads = dims["Sq"], dims["Skv"], dims["Hq"]
        shift = 0 if causal == "top_left" else len_k - len_q
        pairs = dims["B"] * heads
        sizes = (len_q, len_k, shift, heads, pairs, min(knobs["section"], pairs))
        outs = [Descriptor(self.out, v0), Descriptor(self.out, v1)]
        results = (*outs, Pointer(self.out), Pointer(self.lse))
        factor = 2 * LOG2E * scale / cap if cap else scale * LOG2E
        strides = [stride // 8 for stride in (*self.out.strides, *self.lse.strides[:2])]
        flags = (bool(causal), window, cap > 0, d1, v1, knobs["pingpong"], knobs["tma_store"], True)

        def producer() -> None:
            group = heads // dims["Hkv"]
            names["fa_producer"](
                *sources, *rings, *shared[:6], *sizes, block_n, stages, group, bool(causal), window, d1, v1
            )  # fmt: skip

        def consumer(which: int) -> None:
            names["fa_consumer"](
                which, *results, *rings, *shared, *sizes, dims["Dv"], factor, cap * LOG2E, *strides, block_n, stages,
                *flags,
            )  # fmt: skip

        machine.run([producer, lambda: consumer(0), lambda: consumer(1)])

    def _names(self, machine: Machine, program: int, passed_by: list[Barrier] | None) -> dict[str, Any]:
        """What the kernel's functions see in place of Gluon."""
        names = {
            "gl": language(program, self.programs),
            "mbarrier": self._barriers(machine, passed_by),
            "fa_barrier": machine.pause,
            "fence_async_shared": machine.pause,
            "range": range,
            "float": float,
            **copies(machine),
            **products(machine),
        }
        for module in (importlib.import_module(f"kernelwright.kernels.attention.{name}") for name in MODULES):
            for name, value in vars(module).items():
                if name.startswith("fa_") and name not in names:
                    names[name] = types.FunctionType(value.fn.__code__, names, name)
        return names

    def _barriers(self, machine: Machine, passed_by: list[Barrier] | None) -> types.SimpleNamespace:
        def wait(barrier: Barrier, parity: int) -> None:
            if passed_by is None or barrier not in passed_by:
                machine.pause(lambda: barrier.passed(int(parity)))

        def expect(barrier: Barrier, count: int) -> None:
            machine.pause()
            barrier.bytes += count
            barrier.arrive()

        def arrive(barrier: Barrier, count: int = 1) -> None:
            machine.pause()
            barrier.arrive(count)

        return types.SimpleNamespace(wait=wait, expect=expect, arrive=arrive)


USUAL: dict[str, Any] = {
    "stages": 2,
    "slots": 2,
    "block_n": 64,
    "section": 1,
    "pingpong": True,
    "tma_store": True,
    "d_parts": (16, 0),
    "v_parts": (16, 0),
}

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "one tile, one block": ((1, 1, 100, 50), {}, {}),
    "many tiles of one block": ((2, 3, 300, 50), {}, {}),
    "many tiles, one in memory": ((2, 3, 300, 50), {}, {"slots": 1}),
    "many tiles, plain stores": ((2, 3, 300, 50), {}, {"tma_store": False}),
    "many blocks": ((1, 2, 140, 300), {}, {"stages": 3}),
    "one stage": ((1, 1, 140, 200), {}, {"stages": 1}),
    "causal": ((1, 3, 300, 300), {"causal": "bottom_right"}, {"section": 4}),
    "causal, one tile in memory": ((1, 3, 300, 300), {"causal": "bottom_right"}, {"section": 4, "slots": 1}),
    "causal, wide blocks": ((1, 1, 300, 300), {"causal": "bottom_right"}, {"block_n": 128, "pingpong": False}),
    "top left": ((1, 2, 300, 130), {"causal": "top_left"}, {}),
    "rows without keys": ((1, 1, 300, 130), {"causal": "bottom_right"}, {}),
    "chunked prefill": ((2, 2, 130, 400), {"causal": "bottom_right", "kv_heads": 1}, {"section": 4}),
    "window": ((1, 1, 300, 300), {"causal": "bottom_right", "window": 100}, {}),
    "window past the keys": ((1, 1, 400, 100), {"causal": "top_left", "window": 30}, {}),
    "window alone": ((1, 1, 200, 300), {"window": 150}, {}),
    "soft cap": ((1, 1, 200, 200), {"causal": "bottom_right", "softcap": 2.0}, {"tma_store": False, "slots": 1}),
    "two parts": ((1, 2, 200, 200, 24, 40), {}, {"d_parts": (16, 16), "v_parts": (32, 16), "tma_store": False}),
    "two parts of keys": ((1, 1, 200, 200, 48, 20), {}, {"d_parts": (32, 16), "v_parts": (16, 16)}),
}


def simulation(case: str, programs: int) -> Simulation:
    (batch, heads, queries, keys, *dims), attributes, knobs = CASES[case]
    head_dim, v_dim = dims or (12, 16)
    workload = attention_workload(batch, heads, queries, keys, head_dim, "fp16", v_dim=v_dim, lse=True, **attributes)
    return Simulation(workload, programs, **(USUAL | knobs))


@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_no_order_of_events_deadlocks_or_spoils_a_tile(case: str) -> None:
    # one program has many tiles; three have some, and the last turn is not for all
    for programs, seed in ((1, 0), (3, 1)):
        assert simulation(case, programs).error(seed) < 1e-9


def test_every_tile_has_one_program() -> None:
    warpgroup = importlib.import_module("kernelwright.kernels.attention.warpgroup_kernel")
    for tiles, pairs, section, programs in ((5, 7, 4, 6), (1, 1, 1, 1), (3, 10, 1, 132), (16, 32, 8, 132)):
        found = []
        for program in range(programs):
            names = {"gl": language(program, programs)}
            turns, tile = (types.FunctionType(f.fn.__code__, names) for f in (warpgroup.fa_turns, warpgroup.fa_tile))
            found += [tuple(map(int, tile(turn, tiles, pairs, section))) for turn in range(turns(tiles, pairs))]
        assert sorted(found) == [(t, p) for t in range(tiles) for p in range(pairs)]


def test_the_simulation_finds_products_that_are_not_waited_for() -> None:
    outcomes = []
    for seed in range(4):
        sim = simulation("many blocks", 1)
        names = sim._barriers

        def blind(machine: Machine, passed_by: list[Barrier] | None, names: Any = names) -> types.SimpleNamespace:
            found = names(machine, passed_by)
            found.wait = lambda barrier, parity: machine.pause()
            return found

        sim._barriers = blind  # type: ignore[method-assign]
        try:
            outcomes.append(sim.error(seed) < 1e-9)
        except (AssertionError, Stuck):
            outcomes.append(False)
    assert not any(outcomes)
