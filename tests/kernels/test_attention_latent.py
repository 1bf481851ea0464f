"""The warp-specialised absorbed decode without a GPU: its own code run by simulated warps over simulated barriers."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from kernelwright.kernels.attention import decode_warp_specialized_kernel
from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.device import named_device
from kernelwright.types import Schedule, Workload
from tests.kernels.simulated_attention import Descriptor, Pointer, Tensor, View, copies, language, products, tensor
from tests.kernels.simulated_warps import Barrier, Machine, Stuck

LOG2E = 1.4426950408889634
H100 = named_device("h100")
ABSORBED: dict[str, Any] = {"kv_heads": 1, "v_dim": 512, "kv_shared": True}


class Shared(View):
    """A tile that registers are stored to and loaded from."""

    def reshape(self, shape: tuple[int, int]) -> Shared:
        return Shared(self.memory.reshape(shape))

    def index(self, slot: int) -> Shared:
        return Shared(super().index(slot).memory)

    def load(self, layout: Any) -> Tensor:
        return tensor(self.memory.copy())


class Simulation:
    """The partitions of one workload as Python functions, on numbers in fp64."""

    def __init__(self, workload: Workload, **knobs: Any) -> None:
        self.workload, self.knobs = workload, knobs
        self.inputs = ATTENTION.make_inputs(workload, 3, "cpu")
        dims = workload.dims
        self.half, self.rest = dims["Dv"] // 2, dims["D"] - dims["Dv"]
        self.rows = dims["B"] * dims["Hq"] * dims["Sq"]
        self.parts = np.full((knobs["splits"], self.rows, dims["Dv"]), np.nan)
        self.logs = np.full((knobs["splits"], self.rows), np.nan)
        self.group = dims["Hq"] // dims["Hkv"]
        self.tiles = -(-dims["Sq"] * self.group // 64)

    def error(self, seed: int) -> float:
        """The largest error of the result after all programs, put together from its parts."""
        dims = self.workload.dims
        for program in range(dims["B"] * dims["Hkv"] * self.tiles):
            for split in range(self.knobs["splits"]):
                self._run_program(program, split, seed)
        weights = np.exp2(self.logs - self.logs.max(0))
        found = (weights[:, :, None] * self.parts).sum(0) / weights.sum(0)[:, None]
        found = found.reshape(dims["B"], dims["Sq"], dims["Hq"], dims["Dv"]).transpose(0, 2, 1, 3)
        wanted = ATTENTION.reference(self.workload, self.inputs)
        assert not isinstance(wanted, tuple)
        return float(np.abs(found - wanted.numpy()).max())

    def _run_program(self, program: int, split: int, seed: int) -> None:
        dims, knobs = self.workload.dims, self.knobs
        machine, stages, block_n, half, rest = Machine(seed), knobs["stages"], knobs["block_n"], self.half, self.rest
        page, sq = dims.get("page", 0), dims["Sq"]
        q = np.ascontiguousarray(self.inputs["q"].double().numpy())
        k = self.inputs["k"].double().numpy()
        k = k.transpose(0, 2, 1, 3) if page else k
        sources = [Descriptor(k, half), Descriptor(k[..., half:], half), Descriptor(k[..., 2 * half :], rest)]
        sources = [Moved(source, n * half) for n, source in enumerate(sources)]
        rings = [Shared(np.full((stages, 1, 1, block_n, width), np.nan)) for width in (half, half, rest)]
        tiles = [Shared(np.full((64, width), np.nan)) for width in (half, half, rest)]
        p_tile, shrink = Shared(np.full((64, block_n), np.nan)), Shared(np.full((64,), np.nan))
        groups = [[Barrier(count) for _ in range(many)] for many, count in ((stages, 1), (1, 1), (1, 2))]
        barriers = [types.SimpleNamespace(index=group.__getitem__) for group in groups]
        names = self._names(machine, program, split)
        table, lengths = (Pointer(self.inputs[n].numpy()) if page else None for n in ("block_table", "lengths"))
        len_k = self.inputs["block_table"].shape[1] * page if page else dims["Skv"]
        sizes = (len_k, dims["Hkv"], self.tiles)
        factor = dims["D"] ** -0.5 * LOG2E
        strides = decode_warp_specialized_kernel.part_strides
        out_strides = (*strides(dims["Hq"], self.group, sq, dims["Dv"]), 1, self.rows * dims["Dv"])
        log_strides = (*strides(dims["Hq"], self.group, sq, 1), self.rows)
        cut = (block_n, stages, knobs["splits"])

        def scores() -> None:
            names["latent_scores"](
                Pointer(q), *sources, *tiles, *rings, p_tile, shrink, *barriers, table, lengths, Pointer(self.logs),
                *sizes, self.inputs["block_table"].shape[1] if page else 0, factor, 1.0,
                *(step // 8 for step in q.strides), *log_strides, *cut, page, sq, self.group,
                bool(self.workload.attributes.get("causal")),
            )  # fmt: skip

        def sums(which: int) -> None:
            names["latent_sums"](
                which, Pointer(self.parts), rings[which], p_tile, shrink, *barriers, lengths, *sizes, *out_strides,
                *cut, sq, self.group,
            )  # fmt: skip

        machine.run([scores, lambda: sums(0), lambda: sums(1)])

    def _names(self, machine: Machine, program: int, split: int) -> dict[str, Any]:
        """What the kernel's functions see in place of Gluon."""
        gl = language(program, 1)
        gl.program_id = lambda axis: tensor((program, split)[axis])
        gl.load = load
        gl.BlockedLayout = lambda *_: None
        loads = copies(machine)
        names = {
            "gl": gl,
            "mbarrier": self._barriers(machine),
            "fa_barrier": machine.pause,
            "fence_async_shared": machine.pause,
            "latent_load": loads["fa_load"],
            "range": range,
            "float": float,
            **products(machine),
        }
        for name, value in vars(decode_warp_specialized_kernel).items():
            if name.startswith("latent_") and hasattr(value, "fn"):
                names[name] = types.FunctionType(value.fn.__code__, names, name)
        return names

    def _barriers(self, machine: Machine) -> types.SimpleNamespace:
        def expect(barrier: Barrier, count: int) -> None:
            machine.pause()
            barrier.bytes += count
            barrier.arrive()

        def arrive(barrier: Barrier, count: int = 1) -> None:
            machine.pause()
            barrier.arrive(count)

        def wait(barrier: Barrier, parity: int) -> None:
            machine.pause(lambda: barrier.passed(int(parity)))

        return types.SimpleNamespace(wait=wait, expect=expect, arrive=arrive)


class Moved(Descriptor):
    """Columns of the keys from `first` on, which boxes name by their place in the whole."""

    def __init__(self, part: Descriptor, first: int) -> None:
        super().__init__(part.whole, part.width)
        self.first = first

    def read(self, place: list[int], rows: int) -> Any:
        assert place[3] == self.first, "a box that no descriptor of these columns has"
        return super().read([*place[:3], 0], rows)


def load(pointer: Pointer, mask: Any = True, other: Any = None) -> Tensor:
    """What lies there; outside of the mask nothing is read."""
    places, inside = np.broadcast_arrays(pointer.offset, mask)
    flat = pointer.memory.reshape(-1)
    assert (places[inside] < flat.size).all() and (places[inside] >= 0).all(), "read outside of a tensor"
    return tensor(np.where(inside, flat[np.where(inside, places, 0)], 0 if other is None else other))


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "one block": ((1, 5, 1, 30), {}, {}),
    "many blocks": ((2, 16, 1, 200), {}, {}),
    "three stages": ((1, 16, 1, 230), {}, {"stages": 3}),
    "two tiles of rows": ((1, 70, 1, 100), {}, {"splits": 2}),
    "splits, one of them empty": ((1, 8, 1, 100), {}, {"splits": 3}),
    "queries see their own past": ((2, 20, 4, 100), {"causal": "bottom_right"}, {"splits": 2}),
    "several key heads": ((2, 8, 1, 90), {"kv_heads": 2}, {"splits": 2}),
    "pages": ((3, 16, 1, 150), {"page": 32}, {"splits": 2}),
    "pages, many blocks in one": ((2, 10, 2, 150), {"page": 64, "causal": "bottom_right"}, {"splits": 1, "stages": 3}),
}


def simulation(case: str) -> Simulation:
    (batch, heads, queries, keys), options, knobs = CASES[case]
    shared = {"kv_heads": 1, "v_dim": 32, "kv_shared": True} | options
    workload = attention_workload(batch, heads, queries, keys, 48, "fp16", **shared)
    return Simulation(workload, **({"stages": 2, "block_n": 32, "splits": 1} | knobs))


@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_no_order_of_events_deadlocks_or_spoils_a_tile(case: str) -> None:
    for seed in (0, 1):
        assert simulation(case).error(seed) < 1e-9


def test_the_simulation_finds_copies_that_come_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Simulation._barriers

    def blind(self: Simulation, machine: Machine) -> types.SimpleNamespace:
        """Nobody waits for a barrier of two arrivals: that of weights that have been read."""
        barriers = found(self, machine)
        wait = barriers.wait
        barriers.wait = lambda barrier, parity: machine.pause() if barrier.count == 2 else wait(barrier, parity)
        return barriers

    monkeypatch.setattr(Simulation, "_barriers", blind)
    outcomes = []
    for seed in range(3):
        try:
            outcomes.append(simulation("many blocks").error(seed) < 1e-9)
        except (AssertionError, Stuck):
            outcomes.append(False)
    assert not any(outcomes)


def test_it_builds_for_hopper_without_spills(pool: BuildPool) -> None:
    workload = attention_workload(32, 128, 2, 4096, 576, page=64, causal="bottom_right", lse=True, **ABSORBED)
    template = ATTENTION.templates["decode_warp_specialized"]
    wanted = {"block_n": 64, "num_stages": 2, "split_kv": 1}
    schedule = next(s for s in template.space(workload, H100) if wanted.items() <= dict(s.knobs).items())
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    assert report.spills == 0 and report.shared_bytes <= 232448
    assert abs(report.shared_bytes - template.shared_bytes(workload, schedule)) <= 256
    assert "m64n256k16" in str(report.artifact["attention_decode_latent.ptx"])


def test_its_space_says_why_it_is_empty() -> None:
    def why(device: str = "h100", **options: Any) -> str:
        usual = {"batch": 4, "heads": 64, "q_length": 1, "kv_length": 512, "head_dim": 576, **ABSORBED}
        space = ATTENTION.templates["decode_warp_specialized"].space(
            attention_workload(**(usual | options)), named_device(device)
        )
        knobs = {name: knob.values[-1] for name, knob in space.knobs.items()}
        schedule = Schedule("decode_warp_specialized", knobs)  # type: ignore[arg-type]
        return "" if len(space) else " ".join(space.why_illegal(schedule))

    assert why() == ""
    assert "sm_90" in why("a100")
    assert "first 256 or 512 columns" in why(kv_shared=False)
    assert "columns more" in why(head_dim=600)
    assert "sinks" in why(sinks=True)
    assert "one page of 16" in why(page=16)
    assert "several queries" in why(kv_heads=2, q_length=2)
    assert "scale above 0" in why(scale=-1.0)
