"""Sibling products as one wider product: which are found, that the numbers stay, and that nothing is copied."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch._inductor.virtualized import V

from kernelwright.compiler import merged_call
from kernelwright.compiler.merged_call import MERGED
from kernelwright.compiler.passes import siblings as siblings_module
from kernelwright.compiler.passes.forms import GATED, ONE, Option
from kernelwright.compiler.passes.forms import MERGED as AS_ONE
from kernelwright.compiler.piece_job import PieceJob, PieceReply, measure
from kernelwright.compiler.pieces import KnownPieces, MissingTimed, WantedPiece, timed
from kernelwright.compiler.side_by_side import beside, lay_side_by_side
from kernelwright.db import Store
from kernelwright.kernels.device import named_device
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.timing import TIMER_VERSION, Effort

H100, TOOLCHAIN = named_device("h100"), current_toolchain(TIMER_VERSION)


class Attention(torch.nn.Module):
    """Queries, keys and values of different widths, rotated, and an attention."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, width, bias=bias) for width in (32, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = q * q.cos() + torch.cat([-q[..., 4:], q[..., :4]], -1)
        found = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return found.transpose(1, 2).reshape(*x.shape[:2], -1)


class Gated(torch.nn.Module):
    """The first half of a SwiGLU."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(16, 24, bias=bias), torch.nn.Linear(16, 24, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.gate(x)) * self.up(x)


class Meter:
    """Times by kind of option."""

    def __init__(self, **us: float) -> None:
        self.device, self.toolchain = H100, TOOLCHAIN
        self.wanted: list[WantedPiece] = []
        self._us = us

    def __call__(self, wanted: WantedPiece, timeout_s: float) -> PieceReply:
        self.wanted.append(wanted)
        return PieceReply(10.0, {key: self._of(option) for key, option in wanted.options.items()}, {}, 0.01)

    @property
    def groups(self) -> list[WantedPiece]:
        """What was wanted of siblings."""
        return [one for one in self.wanted if any(option.kind != ONE for option in one.options.values())]

    def _of(self, option: Option) -> float:
        kind = "library" if option.kind == AS_ONE and option.schedule is None else option.kind
        return self._us.get(kind, 50.0)


@pytest.fixture
def run(tried_with: Any, tmp_path: Path) -> Callable[..., Any]:
    """Runs a model with these times; only wider products have kernels of ours unless all are wanted."""

    def run(model: torch.nn.Module, meter: Meter, accepts: Any = lambda workload: False, **inputs: Any) -> Any:
        tried = tried_with(accepts)
        x = inputs.get("x", torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)))
        with Store.open(f"sqlite:///{tmp_path / 'pieces.db'}") as store, torch.no_grad():
            tried._pass._in_place._pieces = MissingTimed(
                lambda: KnownPieces(store.pieces(H100.key, TOOLCHAIN.key)),
                lambda wanted: list(timed(wanted, meter, store)),
            )
            compiled = tried.compile(model)
            got, want = compiled(x), model(x)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert got.stride() == want.stride()
            tried.again = compiled
        assert tried.report.warnings == []
        return tried

    return run


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["library", AS_ONE])
def test_queries_keys_and_values_are_one_product(run: Any, bias: bool, kind: str) -> None:
    model = Attention(bias)
    assert lay_side_by_side(model) == 1
    tried = run(model, Meter(**{kind: 5.0}))
    assert tried.targets().count(MERGED) == 1
    assert not [target for target in tried.targets() if target in siblings_module.PRODUCTS]
    (decision,) = tried.report.replaced
    assert dict(decision.workload.dims) == {"M": 12, "N": 64, "K": 16}
    assert decision.workload.epilogue == (("bias",) if bias else ())
    assert (decision.schedule is None) == (kind == "library") and "one wider product" in decision.reason


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["library", AS_ONE, GATED])
def test_gate_and_up_are_one_product(run: Any, bias: bool, kind: str) -> None:
    model = Gated(bias)
    lay_side_by_side(model)
    tried = run(model, Meter(**{kind: 5.0}))
    assert tried.targets().count(MERGED) == 1
    (decision,) = tried.report.replaced
    assert ("swiglu" in decision.workload.epilogue) == (kind == GATED)
    assert (torch.ops.aten.slice.Tensor in tried.targets()) == (kind != GATED)


def test_gate_comes_first_in_the_swiglu(run: Any) -> None:
    class Swapped(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.silu(self.up(x)) * self.gate(x)

    model = Swapped()
    lay_side_by_side(model)
    meter = Meter(**{GATED: 5.0})
    run(model, meter)
    assert {option.kind for one in meter.groups for option in one.options.values()} == {AS_ONE}


def test_changes_of_weights_in_place_are_seen(run: Any) -> None:
    model = Attention()
    lay_side_by_side(model)
    tried = run(model, Meter(library=5.0))
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(0.1)
        torch.testing.assert_close(tried.again(x), model(x), rtol=1e-4, atol=1e-4)


def test_weights_that_no_longer_lie_side_by_side_are_copied(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Attention()
    lay_side_by_side(model)
    tried = run(model, Meter(library=5.0))
    assert caplog.records == []
    merged_call._warned.clear()
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)
        for _ in range(2):
            torch.testing.assert_close(tried.again(x), model(x), rtol=1e-4, atol=1e-4)
    assert len([record for record in caplog.records if "side by side" in record.message]) == 1


@pytest.mark.parametrize("times", [{}, {"library": 9.95}])
def test_what_is_not_faster_stays_apart(run: Any, times: dict[str, float]) -> None:
    model = Attention()
    lay_side_by_side(model)
    meter = Meter(**times)
    tried = run(model, meter)
    assert MERGED not in tried.targets() and meter.groups


def test_merging_must_save_more_than_kernels_for_each(run: Any) -> None:
    """Each product by itself saves 10 us by its record."""
    for us, merges in ((5.0, False), (1.0, False)):
        model = Attention()
        lay_side_by_side(model)
        tried = run(model, Meter(library=us), lambda workload: True)
        assert (MERGED in tried.targets()) == merges and len(tried.report.replaced) == 4


def test_weights_that_lie_apart_are_only_merged_for_many_rows(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The copies were measured and chosen: nothing to warn of."""
    meter = Meter(library=5.0)
    monkeypatch.setattr(merged_call, "_warned", [])
    assert MERGED not in run(Attention(), meter).targets() and meter.groups == []
    monkeypatch.setattr(siblings_module, "COPIED_ROWS", 12)
    assert run(Attention(), meter).targets().count(MERGED) == 1
    assert caplog.records == []


class Leaves(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.gate(x), self.gate(x) + self.up(x)])


class Visible(Gated):
    def forward(self, x: torch.Tensor) -> Any:
        return self.gate(x), self.up(x)


class Apart(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x) + self.up(torch.relu(x))


class Computed(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.gate.weight * 2) + self.up(x)


@pytest.mark.parametrize("kind", [Apart, Computed])
def test_products_that_are_no_siblings_stay_apart(run: Any, kind: type[Gated]) -> None:
    model = kind()
    lay_side_by_side(model)
    meter = Meter(library=5.0)
    assert MERGED not in run(model, meter).targets() and meter.groups == []


def test_results_that_leave_the_graph_stay_apart(tried_with: Any) -> None:
    tried, model = tried_with(lambda workload: False), Visible()
    lay_side_by_side(model)
    merge_all(tried)
    x = torch.randn(3, 16)
    with torch.no_grad():
        for got, want in zip(tried.compile(model)(x), model(x), strict=True):
            torch.testing.assert_close(got, want)
            assert got.is_contiguous()
    assert MERGED not in tried.targets()


class Everything:
    """Every piece is faster with anything in it."""

    state = ""

    class Times:
        theirs_us, noise, text = 10.0, 0.0, "mm+mm"

        class ours_us:
            @staticmethod
            def get(key: str) -> float:
                return 1.0

            def __class_getitem__(cls, key: str) -> float:
                return 1.0

        def wins(self, option: str) -> bool:
            return True

        knows = wins

    def __call__(self, key: str) -> Any:
        return self.Times()

    def measure(self, wanted: Any) -> None:
        pass


def merge_all(tried: Any) -> None:
    """Merge whatever may be merged."""
    tried._pass._in_place._pieces = Everything()
    tried._pass._saved_us = lambda product: 0.0


def test_all_that_may_be_is_merged_here(tried_with: Any) -> None:
    tried, model = tried_with(lambda workload: False), Gated()
    lay_side_by_side(model)
    merge_all(tried)
    with torch.no_grad():
        tried.compile(model)(torch.randn(3, 16))
    assert MERGED in tried.targets()


class UsedTwice(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        return functional.silu(gate) * up + up.sum()


class FormUsedTwice(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x).view(-1)
        return functional.silu(gate).view(-1) * up + up.sum()


class GateUsedTwice(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = functional.silu(self.gate(x))
        return gate * self.up(x) + gate.sum()


class Rounded(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.gate(x)) * self.up(x).to(torch.int32)


class RoundedTo8Bits(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.gate(x)) * self.up(x).to(torch.float8_e4m3fn).to(torch.float32)


class GateRoundedTo8Bits(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.gate(x)).to(torch.float8_e4m3fn).to(torch.float32) * self.up(x)


@pytest.mark.parametrize("kind", [UsedTwice, FormUsedTwice, GateUsedTwice, Rounded, RoundedTo8Bits, GateRoundedTo8Bits])
def test_a_swiglu_of_which_more_is_seen_is_none(run: Any, kind: type[Gated]) -> None:
    model, meter = kind(), Meter(**{GATED: 5.0})
    lay_side_by_side(model)
    run(model, meter)
    assert {option.kind for one in meter.groups for option in one.options.values()} == {AS_ONE}


class ReadByAddress(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).as_strided((3, 12), (24, 2), 1) + self.up(x)[:, :12]


class RowReadByAddress(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x)[:1, :12] + self.up(x)[:1].view(24).as_strided((12,), (2,), 1)


class Branched(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        return torch.cond(x.sum() > 0, lambda a, b: a.sin() + b, lambda a, b: a.cos() + b, (gate, up))


@pytest.mark.parametrize("kind", [ReadByAddress, RowReadByAddress, Branched])
def test_columns_are_only_given_to_who_can_take_them(run: Any, kind: type[Gated]) -> None:
    model, meter = kind(), Meter(library=5.0)
    lay_side_by_side(model)
    x = torch.randn(1 if kind is RowReadByAddress else 3, 16, generator=torch.Generator().manual_seed(0))
    assert MERGED not in run(model, meter, x=x).targets() and meter.groups


def test_training_is_left_alone(tried_with: Any) -> None:
    tried, model = tried_with(lambda workload: False), Gated()
    lay_side_by_side(model)
    merge_all(tried)
    tried.compile(model)(torch.randn(3, 16)).sum().backward()
    assert MERGED not in tried.targets() and tried.report.warnings == []


@pytest.mark.parametrize("how", ["freezing", "a package"])
def test_what_inductor_merges_or_packs_is_left_to_it(tried_with: Any, how: str) -> None:
    tried, model = tried_with(lambda workload: False), Gated()
    lay_side_by_side(model)
    merge_all(tried)
    settings = torch._inductor.config.patch(freezing=how == "freezing")
    with torch.no_grad(), settings, V.set_aot_compilation(how == "a package"):
        tried.compile(model)(torch.randn(3, 16))
    assert MERGED not in tried.targets()


class FakeTimer:
    def __init__(self, *times: float) -> None:
        self._times = times

    def samples(self, calls: Sequence[Callable[[], Any]], effort: Effort) -> list[list[float]]:
        return [[time] * effort.rounds for time in self._times[: len(calls)]]


@pytest.mark.parametrize("kind", [Attention, Gated])
def test_piece_of_siblings_is_timed_as_a_whole(run: Any, kind: type[torch.nn.Module]) -> None:
    model = kind()
    lay_side_by_side(model)
    meter = Meter()
    run(model, meter)
    (wanted,) = meter.groups
    inputs, places = wanted.piece.inputs("cpu", 0), json.loads(wanted.piece.text)["beside"]
    assert len(places) > 1 and beside([inputs[place] for place in places])
    reply = measure(PieceJob(wanted.piece.text, wanted.options), FakeTimer(9, 9, 5, 4, 3), "cpu")
    assert reply.failures == {} and set(reply.ours_us) == set(wanted.options)
