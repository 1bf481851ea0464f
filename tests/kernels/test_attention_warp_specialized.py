"""The warp-specialised attention without a GPU: its own code run by simulated warps over simulated barriers."""

from __future__ import annotations

import importlib
import threading
import types
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.types import Workload
from tests.kernels.simulated_warps import Barrier, Machine, Stuck

MODULES = ("forward_warp_specialized_kernel", "warpgroup_kernel")
LOG2E = 1.4426950408889634

Array = npt.NDArray[Any]


class Tensor(np.ndarray[Any, Any]):
    """A tensor in registers; layouts say nothing here."""

    @property
    def type(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Tensor:
        return self.astype(dtype)


def tensor(x: Any) -> Tensor:
    return np.asarray(x).view(Tensor)


class Pointer:
    """A pointer, or a tensor of pointers, into a result of which each element may be written once."""

    dtype = types.SimpleNamespace(element_ty=np.float64)

    def __init__(self, memory: Array, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def store(self, value: Array, mask: Array) -> None:
        places, wide, inside = np.broadcast_arrays(self.offset, value, mask)
        flat = self.memory.reshape(-1)
        assert np.isnan(flat[places[inside]]).all(), "an element was written twice"
        flat[places[inside]] = wide[inside]


class View:
    """One tile in shared memory."""

    def __init__(self, memory: Array, turned: bool = False) -> None:
        self.memory, self.turned = memory, turned

    def index(self, slot: int) -> View:
        assert 0 <= slot < len(self.memory), "a slot outside of the ring"
        return View(self.memory[slot])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def dtype(self) -> Any:
        return self.memory.dtype

    def reshape(self, shape: tuple[int, int]) -> View:
        return View(self.memory.reshape(shape))

    def permute(self, order: tuple[int, int]) -> View:
        return View(self.memory, True)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> View:
        return View(self.memory.reshape(-1)[: np.prod(shape)].reshape(shape))

    def store(self, x: Array) -> None:
        self.memory[:] = x

    def read(self) -> Array:
        return self.memory.T if self.turned else self.memory


class Flying:
    """A product in flight reads shared memory until it ends, and fails if that has changed since it began."""

    def __init__(self, a: Any, b: View, acc: Any, use_acc: bool) -> None:
        self.views = [(x, x.read().copy()) for x in (a, b) if isinstance(x, View)]
        left = a.read() if isinstance(a, View) else a
        start = acc.value if isinstance(acc, Flying) else acc
        self.value = tensor((start if use_acc else 0) + left @ b.read())
        self.type, self.done = types.SimpleNamespace(layout=None), False

    def finish(self) -> None:
        for view, then in self.views:
            assert np.array_equal(view.read(), then, equal_nan=True), "shared memory changed while it was read"
        self.done = True


class Descriptor:
    """A tensor [B, H, S, D] that is read and written in boxes; what lies outside reads as zeros and is not written."""

    dtype, layout = np.float64, None

    def __init__(self, whole: Array, width: int) -> None:
        self.whole, self.width = whole, width

    def read(self, place: list[int], rows: int) -> Array:
        batch, head, row, column = map(int, place)
        part = self.whole[batch, head, row : row + rows, column : column + self.width]
        box = np.zeros((1, 1, rows, self.width))
        box[0, 0, : part.shape[0], : part.shape[1]] = part
        return box

    def write(self, place: list[int], box: Array) -> None:
        batch, head, row, column = map(int, place)
        part = self.whole[batch, head, row : row + box.shape[2], column : column + self.width]
        assert np.isnan(part).all(), "a tile was written twice"
        part[:] = box[0, 0, : part.shape[0], : part.shape[1]]


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
        rings = [View(np.full((2, 1, 1, 64, d), np.nan)) for d in (d0, d1 or d0)]
        rings += [View(np.full((stages, 1, 1, block_n, d), np.nan)) for d in (d0, d1 or d0, v0, v1 or v0)]
        counts = [(1, 1), (1, 2), (stages, 1), (stages, 2), (stages, 1), (stages, 2), (2, 1)]
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


def copies(machine: Machine) -> dict[str, Any]:
    """The copy engine: copies land when they will, and a reader that must not be too early waits for them."""
    saving: list[Any] = []

    def load(source: Descriptor, place: list[int], barrier: Barrier, slot: View) -> None:
        machine.pause()
        box = source.read(place, slot.shape[2])

        def land() -> None:
            slot.store(box)
            barrier.bytes -= box.size * 2
            barrier.settle()

        machine.copies.append(land)

    def save(target: Descriptor, place: list[int], source: View) -> None:
        machine.pause()
        then, key = source.read().copy(), object()
        saving.append(key)

        def land() -> None:
            assert np.array_equal(source.read(), then), "a result was overwritten before it was saved"
            target.write(place, then)
            saving.remove(key)

        machine.copies.append(land)

    store = types.SimpleNamespace(store_wait=lambda left: machine.pause(lambda: not saving))
    return {"fa_load": load, "fa_save": save, "tma": store}


def products(machine: Machine) -> dict[str, Any]:
    """The tensor cores: products of one partition end in order."""
    flying: dict[int, list[Flying]] = {}

    def multiply(a: Any, b: View, acc: Any, use_acc: bool = True, is_async: bool = False) -> Flying:
        machine.pause()
        product = Flying(a, b, acc, use_acc)
        flying.setdefault(machine_thread(), []).append(product)
        return product

    def settle(left: int, deps: tuple[Flying, ...]) -> Any:
        machine.pause()
        mine = flying[machine_thread()]
        while len(mine) > left:
            mine.pop(0).finish()
        assert all(x.done for x in deps), "a product is used before it has ended"
        return deps[0].value if len(deps) == 1 else tuple(x.value for x in deps)

    return {"warpgroup_mma": multiply, "warpgroup_mma_wait": settle}


def machine_thread() -> int:
    """Which partition runs."""
    return threading.get_ident()


def language(program: int, programs: int) -> types.SimpleNamespace:
    """The parts of Gluon that have no side effects."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return types.SimpleNamespace(
        program_id=lambda axis: tensor(program), num_programs=lambda axis: programs, static_range=range,
        cdiv=lambda x, y: -(-x // y), minimum=lambda x, y: tensor(np.minimum(x, y)),
        maximum=lambda x, y: tensor(np.maximum(x, y)), where=lambda c, x, y: tensor(np.where(c, x, y)),
        exp2=np.exp2, log2=np.log2, max=lambda x, axis: x.max(axis), sum=lambda x, axis: x.sum(axis),
        zeros=lambda shape, dtype, layout: tensor(np.zeros(shape)),
        full=lambda shape, value, dtype, layout: tensor(np.full(shape, value)),
        arange=lambda start, end, layout: tensor(np.arange(start, end)), convert_layout=lambda x, layout: x,
        store=lambda pointer, value, mask: pointer.store(value, mask), float32=np.float64, int64=np.int64,
        int32=np.int64, SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
    )  # fmt: skip


USUAL: dict[str, Any] = {
    "stages": 2,
    "block_n": 64,
    "section": 1,
    "pingpong": True,
    "tma_store": True,
    "d_parts": (16, 0),
    "v_parts": (16, 0),
}

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "one tile, one block": ((1, 1, 100, 50), {}, {}),
    "many blocks": ((1, 2, 140, 300), {}, {"stages": 3}),
    "one stage": ((1, 1, 140, 200), {}, {"stages": 1}),
    "causal": ((1, 3, 300, 300), {"causal": "bottom_right"}, {"section": 4}),
    "causal, wide blocks": ((1, 1, 300, 300), {"causal": "bottom_right"}, {"block_n": 128, "pingpong": False}),
    "top left": ((1, 2, 300, 130), {"causal": "top_left"}, {}),
    "rows without keys": ((1, 1, 300, 130), {"causal": "bottom_right"}, {}),
    "chunked prefill": ((2, 2, 130, 400), {"causal": "bottom_right", "kv_heads": 1}, {"section": 4}),
    "window": ((1, 1, 300, 300), {"causal": "bottom_right", "window": 100}, {}),
    "window past the keys": ((1, 1, 400, 100), {"causal": "top_left", "window": 30}, {}),
    "window alone": ((1, 1, 200, 300), {"window": 150}, {}),
    "soft cap": ((1, 1, 200, 200), {"causal": "bottom_right", "softcap": 2.0}, {"tma_store": False}),
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
