"""The warp-specialised gradients without a GPU: their own code run by simulated warps, and what they need of a GPU."""

from __future__ import annotations

import importlib
import math
import types
from typing import Any

import numpy as np
import pytest

from kernelwright.kernels.attention import reference
from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload, problem_of
from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.device import named_device
from kernelwright.types import FrozenMap, Schedule, Workload
from tests.kernels.simulated_attention import Array, Descriptor, Pointer, View, language, machine_thread, products
from tests.kernels.simulated_warps import Barrier, Machine, Stuck

MODULES = ("backward_warp_specialized_kernel", "backward_warpgroup_kernel")
LOG2E = 1.4426950408889634
M = 64


class Lines:
    """Numbers of queries in fp32, [B * H, S], that are read a block at a time."""

    bytes = 4

    def __init__(self, whole: Array) -> None:
        self.whole = whole

    def read(self, place: list[int], box: tuple[int, ...]) -> Array:
        line, row = map(int, place)
        return self.whole[line : line + 1, row : row + box[-1]]


class Boxes(Descriptor):
    """A tensor in 16 bits that is read in boxes, or sums to which boxes are added."""

    bytes = 2

    def read(self, place: list[int], box: Any) -> Array:
        return super().read(place, box[2])

    def add(self, place: list[int], box: Array) -> None:
        batch, head, row, column = map(int, place)
        part = self.whole[batch, head, row : row + box.shape[2], column : column + self.width]
        part += box[0, 0, : part.shape[0], : part.shape[1]]


class Simulation:
    """All programs of one workload, in fp64."""

    def __init__(self, workload: Workload, stages: int, section: int, splits: int) -> None:
        self.workload, self.stages, self.section, self.splits = workload, stages, section, splits
        self.problem = problem_of(workload)
        inputs = ATTENTION.make_inputs(workload, 3, "cpu")
        self.wanted = [x.numpy() for x in ATTENTION.reference(workload, inputs)]
        out, lse = (x.double().numpy() for x in reference.forward(self.problem, inputs))
        self.operands = {name: inputs[name].double().numpy() for name in ("q", "k", "v", "d_out")}
        batch, heads, queries = lse.shape
        self.rows = -(-queries // M) * M
        logs = np.full((batch * heads, self.rows), np.inf)
        logs[:, :queries] = np.where(np.isinf(lse), 0.0, lse * LOG2E).reshape(-1, queries)
        deltas = np.zeros_like(logs)
        deltas[:, :queries] = (out * self.operands["d_out"]).sum(-1).reshape(-1, queries)
        self.facts = Lines(logs), Lines(deltas)
        self.widths = [max(16, 1 << (size - 1).bit_length()) for size in (self.problem.head_dim, self.problem.v_dim)]
        self.sums = np.zeros((batch, heads, self.rows, self.widths[0]))
        self.dk, self.dv = (np.full((splits, *self.operands[name].shape), np.nan) for name in ("k", "v"))

    def error(self, seed: int) -> float:
        """The largest error of all gradients."""
        p = self.problem
        tiles = -(-p.kv_length // 128) * p.batch * p.kv_heads
        for program in range(tiles * self.splits):
            self._run_program(program, tiles * self.splits, seed + program)
        dq = self.sums[:, :, : p.q_length, : p.head_dim] * p.scale
        found = (dq, self.dk.sum(0), self.dv.sum(0))
        return float(max(np.abs(x - y).max() for x, y in zip(found, self.wanted, strict=True)))

    def _run_program(self, program: int, programs: int, seed: int) -> None:
        p, machine, stages, (d, dv) = self.problem, Machine(seed), self.stages, self.widths
        q, k, v, g = (self.operands[name] for name in ("q", "k", "v", "d_out"))
        sources = (*(Boxes(x, w) for x, w in ((q, d), (g, dv), (k, d), (k, d // 2), (v, dv))), *self.facts)
        shapes: list[tuple[int, ...]] = [
            (stages, 1, 1, M, d),
            (stages, 1, 1, M, dv),
            (2, 1, 1, 64, d),
            (2, 1, 1, 128, d // 2),
        ]
        shapes += [(2, 1, 1, 64, dv), (2, 128, M), (2, 1, 1, M, d // 2), (stages, 1, M), (stages, 1, M)]
        memory = [View(np.full(shape, np.nan)) for shape in shapes]
        counts = [(1, 1), (stages, 1), (stages, 2), (stages, 1), (stages, 2), (2, 2), (2, 2)]
        barriers = [[Barrier(count) for _ in range(many)] for many, count in counts]
        shared = [types.SimpleNamespace(index=group.__getitem__) for group in barriers]
        names = self._names(machine, program, programs)
        shift = 0 if p.causal == "top_left" else p.kv_length - p.q_length
        pairs = p.batch * p.kv_heads
        sizes = (p.q_length, p.kv_length, shift, p.heads, p.kv_heads, pairs, min(self.section, pairs))
        factor = 2 * LOG2E * p.scale / p.softcap if p.softcap else p.scale * LOG2E
        strides = [stride // 8 for stride in (*self.dk.strides[1:], *self.dv.strides[1:])]
        scalars = (p.head_dim, p.v_dim, p.scale, factor, p.softcap * LOG2E)
        flags = (M, stages, bool(p.causal), p.window)

        def producer() -> None:
            names["fb_producer"](*sources, *memory[:5], *memory[7:], *shared[:5], *sizes, *flags, self.splits)

        def consumer(which: int) -> None:
            names["fb_consumer"](
                which, Pointer(self.dk), Pointer(self.dv), Boxes(self.sums, d // 2), *memory, *shared, *sizes,
                *scalars, *strides, *flags, p.softcap > 0, p.kv_length % 128 != 0, self.splits,
            )  # fmt: skip

        machine.run([producer, lambda: consumer(0), lambda: consumer(1)])

    def _names(self, machine: Machine, program: int, programs: int) -> dict[str, Any]:
        """What the kernel's functions see in place of Gluon."""
        names = {
            "gl": language(program, programs),
            "mbarrier": self._barriers(machine),
            "fb_barrier": machine.pause,
            "fence_async_shared": machine.pause,
            "range": range,
            "float": float,
            **copies(machine),
            **products(machine),
        }
        for module in (importlib.import_module(f"kernelwright.kernels.attention.{name}") for name in MODULES):
            for name, value in vars(module).items():
                if name.startswith("fb_") and name not in names:
                    names[name] = types.FunctionType(value.fn.__code__, names, name)
        return names

    def _barriers(self, machine: Machine) -> types.SimpleNamespace:
        def wait(barrier: Barrier, parity: int) -> None:
            machine.pause(lambda: barrier.passed(int(parity)))

        def expect(barrier: Barrier, count: int) -> None:
            machine.pause()
            barrier.bytes += count
            barrier.arrive()

        def arrive(barrier: Barrier, count: int = 1) -> None:
            machine.pause()
            barrier.arrive(count)

        return types.SimpleNamespace(wait=wait, expect=expect, arrive=arrive)


def copies(machine: Machine) -> dict[str, Any]:
    """The copy engine: copies and additions happen when they will; a partition can wait for its own additions."""
    adding: list[tuple[int, object]] = []

    def load(source: Any, place: list[int], barrier: Barrier, slot: View) -> None:
        machine.pause()
        box = source.read(place, slot.shape)

        def land() -> None:
            slot.store(box)
            barrier.bytes -= box.size * source.bytes
            barrier.settle()

        machine.copies.append(land)

    def add(target: Boxes, place: list[int], source: View) -> None:
        machine.pause()
        then, key = source.read().copy(), (machine_thread(), object())
        adding.append(key)

        def land() -> None:
            assert np.array_equal(source.read(), then), "a tile of dq was overwritten before it was added"
            target.add(place, then)
            adding.remove(key)

        machine.copies.append(land)

    def store_wait(left: int) -> None:
        me = machine_thread()
        machine.pause(lambda: all(who != me for who, _ in adding))

    return {"fb_load": load, "fb_add": add, "tma": types.SimpleNamespace(store_wait=store_wait)}


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], int]] = {
    "one block": ((1, 1, 50, 128), {}, 2),
    "one stage": ((1, 1, 200, 130), {}, 1),
    "three stages": ((1, 2, 300, 128), {}, 3),
    "causal": ((1, 2, 300, 300), {"causal": "bottom_right"}, 2),
    "shared heads": ((2, 4, 130, 256), {"causal": "bottom_right", "kv_heads": 2}, 2),
    "top left": ((1, 1, 130, 300), {"causal": "top_left"}, 2),
    "rows without keys": ((1, 1, 300, 130), {"causal": "bottom_right"}, 2),
    "window": ((1, 1, 400, 400), {"causal": "bottom_right", "window": 100}, 2),
    "window alone": ((1, 1, 300, 200), {"window": 60}, 2),
    "soft cap": ((1, 1, 150, 200), {"causal": "bottom_right", "softcap": 2.0}, 2),
    "wide values": ((1, 1, 100, 140, 12, 30), {}, 2),
}


def simulation(case: str, splits: int = 1) -> Simulation:
    (batch, heads, queries, keys, *dims), attributes, stages = CASES[case]
    d, dv = dims or (12, 16)
    workload = attention_workload(batch, heads, queries, keys, d, "fp16", v_dim=dv, direction="backward", **attributes)
    return Simulation(workload, stages, 1 if batch == 1 else 4, splits)


@pytest.mark.parametrize("case", CASES)
def test_no_order_of_events_deadlocks_or_spoils_a_gradient(case: str) -> None:
    assert simulation(case).error(len(case)) < 1e-9


@pytest.mark.parametrize("case", ["one block", "three stages", "causal", "shared heads", "window", "rows without keys"])
def test_parts_of_the_queries_add_up(case: str) -> None:
    assert simulation(case, splits=3).error(len(case)) < 1e-9


def test_the_simulation_finds_barriers_that_are_not_waited_for() -> None:
    outcomes = []
    for seed in range(3):
        sim = simulation("three stages")
        barriers = sim._barriers

        def blind(machine: Machine, barriers: Any = barriers) -> types.SimpleNamespace:
            found = barriers(machine)
            found.wait = lambda barrier, parity: machine.pause()
            return found  # type: ignore[no-any-return]

        sim._barriers = blind  # type: ignore[method-assign]
        try:
            error = sim.error(seed)
            outcomes.append(not math.isnan(error) and error < 1e-9)
        except (AssertionError, Stuck):
            outcomes.append(False)
    assert not any(outcomes)


@pytest.mark.parametrize(
    ("head_dim", "block_m", "spills", "options"),
    [
        (64, 64, 0, {"causal": "bottom_right"}),
        (64, 64, 0, {"softcap": 20.0}),
        (64, 64, 0, {"window": 100, "kv_length": 4000}),
        (64, 128, 250, {"causal": "bottom_right"}),
        (128, 64, 250, {"causal": "bottom_right"}),
        (64, 64, 0, {"kv_length": 77}),
    ],
)
def test_warpgroups_build(pool: BuildPool, head_dim: int, block_m: int, spills: int, options: dict[str, Any]) -> None:
    device, name = named_device("h100"), "backward_warp_specialized"
    workload = attention_workload(
        **{"batch": 1, "heads": 8, "q_length": 4096, "kv_length": 4096, "head_dim": head_dim, **options},
        direction="backward",
    )
    template = ATTENTION.templates[name]
    schedule = next(s for s in template.space(workload, device) if s.knobs["block_m"] == block_m)
    report = pool.build(workload, schedule, device, keep_artifact=True)
    assert report.spills <= spills
    assert abs(report.shared_bytes - template.shared_bytes(workload, schedule)) <= 512
    text = str(report.artifact[f"{name}.ptx"])
    assert "cp.reduce.async.bulk" in text and "wgmma.mma_async" in text


def test_the_space_says_why_it_cannot() -> None:
    def why(**options: Any) -> str:
        workload = attention_workload(1, 4, 256, 256, 64, **{"direction": "backward", **options})
        space = ATTENTION.templates["backward_warp_specialized"].space(workload, named_device("h100"))
        assert len(space) == 0
        knobs = FrozenMap({knob: values.values[0] for knob, values in space.knobs.items()})
        return " ".join(space.why_illegal(Schedule("backward_warp_specialized", knobs)))

    assert "no fixed order" in why(deterministic=True)
    assert "computes gradients" in why(direction=None)
    assert "a mask tensor" in why(mask="bool")
    assert "16-bit operands" in why(dtype="fp32")
