"""Attention with gradients where torch computes it: the formula, the forms of calls, and who is chosen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from kernelwright.compiler import attention_ops
from kernelwright.compiler.attention import attention
from kernelwright.compiler.attention_choice import Chooser, reads_any_address
from kernelwright.compiler.attention_form import Options, form_of, mask_letters
from kernelwright.compiler.attention_ops import ATTENTION
from kernelwright.compiler.dispatch import RecordedAnswers
from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.errors import InvalidWorkload, UnsupportedDtype, UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.attention.workload import attention_workload, problem_of
from kernelwright.kernels.device import named_device
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import Measurement, Schedule, Status, TuningRecord, Workload

H100 = named_device("h100")

NO_OPTIONS = ("", 0, 0.0, None, 0, 0)


def drawn(*size: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)), dtype=dtype).requires_grad_(grad)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window and cap": {"causal": True, "window": 3, "softcap": 1.5},
    "bool mask": {"mask": torch.rand(1, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.3},
    "slopes and scale": {"alibi": torch.tensor([0.5, 0.1, 0.2, 0.05]), "scale": 0.7},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_finite_differences(case: str) -> None:
    q, k, v = drawn(2, 4, 5, 6), drawn(2, 2, 7, 6), drawn(2, 2, 7, 3)
    assert gradcheck(lambda *x: attention(*x, **CASES[case]), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("sizes", [(1, 4, 5, 5), (2, 1, 1, 5), (5, 5), (1, 1, 1, 1)])
def test_masks_and_sinks_have_gradients(sizes: tuple[int, ...]) -> None:
    q, k, v = drawn(2, 4, 5, 6), drawn(2, 4, 5, 6), drawn(2, 4, 5, 6)
    mask, sinks = drawn(*sizes), drawn(4)
    assert gradcheck(
        lambda q, k, v, m, s: attention(q, k, v, mask=m, sinks=s, causal=True), (q, k, v, mask, sinks), fast_mode=True
    )


def test_an_expanded_mask_gets_a_gradient_for_each_place() -> None:
    q, k, v, mask = drawn(1, 3, 4, 4), drawn(1, 3, 4, 4), drawn(1, 3, 4, 4), drawn(1, 1, 4, 4)
    assert gradcheck(lambda m: attention(q, k, v, mask=m.expand(1, 3, 4, 4)), (mask,))


def test_packed_sequences_have_gradients() -> None:
    bounds = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q, k, v = drawn(8, 2, 4), drawn(8, 1, 4), drawn(8, 1, 4)
    assert gradcheck(lambda q, k, v: attention(q, k, v, cu_q=bounds, cu_k=bounds, causal=True), (q, k, v))
    parts = [attention(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), causal=True) for a, b in ((0, 3), (3, 8))]
    want = torch.cat([part[0].transpose(0, 1) for part in parts])  # type: ignore[index]
    torch.testing.assert_close(attention(q, k, v, cu_q=bounds, cu_k=bounds, causal=True), want)


def test_pages_are_read_by_their_table() -> None:
    k, v, q = drawn(5, 4, 2, 8, grad=False), drawn(5, 4, 2, 8, grad=False), drawn(2, 2, 1, 8, grad=False)
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    out = attention(q, k, v, block_table=table, lengths=lengths)
    for i in range(2):
        keys, values = (x[table[i].long()].flatten(0, 1)[: lengths[i]].transpose(0, 1)[None] for x in (k, v))
        torch.testing.assert_close(out[i : i + 1], attention(q[i : i + 1], keys, values))


def test_logarithms_on_request() -> None:
    q, k, v = drawn(1, 2, 3, 8), drawn(1, 2, 4, 8), drawn(1, 2, 4, 8)
    out, lse = attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT / 8**0.5, -1).detach())
    assert out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_types_and_tokens_first(dtype: torch.dtype) -> None:
    q, k, v = (drawn(2, 9, 3, 16, dtype=dtype).transpose(1, 2) for _ in range(3))
    out = attention(q, k, v, causal=True)
    assert out.dtype is dtype and out.stride() == q.stride()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5)])
def test_empty_sizes(sizes: tuple[int, int, int]) -> None:
    batch, queries, keys = sizes
    q, k = drawn(batch, 2, queries, 8), drawn(batch, 2, keys, 8)
    out = attention(q, k, k, causal=True)
    out.sum().backward()
    assert not out.any() and q.grad is not None and not q.grad.any() and k.grad is not None and not k.grad.any()


def test_compiles_whole_with_gradients_and_other_sizes() -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q * 2, k, v, causal=True, window=3, softcap=4.0).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 8):
        tensors = [drawn(1, 2, length, 8) for _ in range(3)]
        copies = [x.detach().clone().requires_grad_() for x in tensors]
        compiled(*tensors).backward()
        loss(*copies).backward()
        for one, other in zip(tensors, copies, strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_operator_passes_the_checks_of_torch() -> None:
    q, mask, sinks = drawn(1, 2, 4, 8), drawn(1, 2, 1, 4), drawn(2)
    args = (q, q, q, mask, sinks, None, None, None, None, None, *NO_OPTIONS, True, "", "")
    torch.library.opcheck(ATTENTION, args)


def test_what_has_no_gradient_says_so() -> None:
    q, slopes = drawn(1, 2, 4, 8), drawn(2)
    with pytest.raises(UsageError, match="slopes"):
        attention(q, q, q, alibi=slopes).sum().backward()  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="first derivatives"):
        (d_q,) = torch.autograd.grad(attention(q, q.detach(), q.detach()).sum(), q, create_graph=True)  # type: ignore[union-attr]
        d_q.sum().backward()
    out, _ = ATTENTION(q, q, q, *[None] * 7, *NO_OPTIONS, False, "", "")
    with pytest.raises(UsageError, match="lse=True"):
        out.sum().backward()


def test_wrong_operands_say_what_was_wanted() -> None:
    q = drawn(1, 2, 4, 8)
    with pytest.raises(InvalidWorkload, match="head_dim of q"):
        attention(q, drawn(1, 2, 4, 9), drawn(1, 2, 4, 9))
    with pytest.raises(UnsupportedDtype, match="one dtype"):
        attention(q, q.float(), q.float())
    with pytest.raises(InvalidWorkload, match="both cu_q and cu_k"):
        attention(drawn(4, 2, 8), drawn(4, 2, 8), drawn(4, 2, 8), cu_q=torch.tensor([0, 4], dtype=torch.int32))


def test_forms_become_the_workloads_that_records_are_filed_under() -> None:
    q = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16)
    k = torch.empty(2, 32, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    mask = torch.empty(1, 8, 1, 32, dtype=torch.bfloat16)
    inputs = {"q": q, "k": k, "v": k, "mask": mask}
    form = form_of(inputs, Options(causal="top_left", softcap=3.0, lse=True), mask_gradient=True)
    layouts = {"k": "bshd", "v": "shared"}
    shared = {"causal": "top_left", "softcap": 3.0, "mask": "additive", "mask_dims": "hk"}
    assert form.workload() == attention_workload(
        2, 8, 16, 32, 64, kv_heads=2, layout=layouts, kv_shared=True, lse=True, **shared
    )
    assert form.workload(backward=True) == attention_workload(
        2, 8, 16, 32, 64, kv_heads=2, layout=layouts | {"v": "bshd"}, direction="backward", mask_gradient=True, **shared
    )


def test_addresses_that_are_not_aligned_are_told() -> None:
    q = torch.empty(2 * 2 * 4 * 8 + 3, dtype=torch.float16)[3:].view(2, 2, 4, 8)
    workload = form_of(
        {"q": q, "k": torch.empty(2, 2, 4, 8, dtype=torch.float16), "v": q.clone()}, Options()
    ).workload()
    assert workload.layouts["q"] == "bhsd+3" and workload.layouts["k"] == "bhsd"


def test_letters_of_masks() -> None:
    mask = torch.empty(3, 5, 4).permute(1, 0, 2)[:, :, None, :].expand(5, 3, 7, 4)
    assert mask_letters(mask) == "hbk"
    assert sorted(mask_letters(mask, every=True)) == sorted("bhqk")


def record(workload: Workload, ours_us: float, vendor_us: float, **knobs: Any) -> TuningRecord:
    operator = get_operator("attention")
    schedule = next(s for s in operator.space(workload, H100) if all(s.knobs.get(n) == x for n, x in knobs.items()))
    print_of = operator.templates[schedule.template].fingerprint
    found = Measurement(Status.OK, ours_us)
    toolchain = current_toolchain(TIMER_VERSION)
    return TuningRecord(
        workload, H100, toolchain, schedule, found, print_of, "tune", "2026-01-01", vendor="sdpa", vendor_us=vendor_us
    )


def chooser(*records: TuningRecord, model: Any = None) -> Chooser:
    return Chooser(RecordedAnswers(records, H100, current_toolchain(TIMER_VERSION)), model)


FORWARD = attention_workload(2, 8, 512, 512, 64)
WITH_LSE = attention_workload(2, 8, 512, 512, 64, lse=True)
BACKWARD = attention_workload(2, 8, 512, 512, 64, direction="backward")


def test_a_record_is_taken_also_without_logarithms() -> None:
    known = record(FORWARD, 10.0, 20.0, block_n=64)
    assert chooser(known).schedule(FORWARD) == known.schedule
    assert chooser(known).schedule(WITH_LSE) == known.schedule


def test_without_records_the_model_predicts_or_the_default_serves() -> None:
    operator = get_operator("attention")
    assert chooser().schedule(WITH_LSE) == operator.default_schedule(WITH_LSE, H100)
    predicted = chooser(model=RooflineModel("attention")).schedule(BACKWARD)
    assert predicted is not None and not operator.space(BACKWARD, H100).why_illegal(predicted)


@pytest.mark.parametrize(
    ("forward_us", "backward_us", "torchs"), [(10.0, 40.0, False), (14.0, 40.0, False), (14.0, 60.0, True)]
)
def test_forward_and_backward_are_judged_together(forward_us: float, backward_us: float, torchs: bool) -> None:
    known = [record(WITH_LSE, forward_us, 12.0), record(BACKWARD, backward_us, 50.0)]
    assert chooser(*known).torch_is_faster([WITH_LSE, BACKWARD]) is torchs
    assert chooser(known[0]).torch_is_faster([WITH_LSE, BACKWARD])


def test_what_torch_has_no_call_for_is_ours() -> None:
    capped = dataclasses.replace(FORWARD, attributes=type(FORWARD.attributes)({"softcap": 3.0}))
    assert not chooser().torch_is_faster([capped])
    assert chooser().torch_is_faster([FORWARD])


def test_schedules_that_need_alignment() -> None:
    assert reads_any_address(Schedule("forward", {"block_m": 64}))
    assert not reads_any_address(Schedule("backward", {"loads": "bulk"}))
    assert not reads_any_address(Schedule("forward_warp_specialized", {"block_m": 128}))


def test_on_a_gpu_the_chooser_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    known = record(FORWARD, 10.0, 20.0, block_n=64)
    slower = chooser(record(FORWARD, 30.0, 20.0), record(BACKWARD, 30.0, 20.0))
    q = torch.empty(2, 8, 512, 64, dtype=torch.bfloat16)
    inputs = {"q": q, "k": q.clone(), "v": q.clone()}
    form, training = form_of(inputs, Options()), form_of(inputs, Options(lse=True))
    monkeypatch.setattr(attention_ops, "chooser_of", lambda index: chooser(known) if index == 61 else slower)
    assert attention_ops._forward_call(form, "", 61).schedule == known.schedule
    assert attention_ops._forward_call(form, "", 62).schedule is None
    # what torch's forward leaves is of no use to our backward
    assert attention_ops._forward_call(training, "", 62).schedule is not None
    assert attention_ops._backward_call(form_of(inputs | {"out": q}, Options()), "", 62).schedule is not None
    attention_ops._forward_call.cache_clear()
    attention_ops._backward_call.cache_clear()


class FakeOperator:
    """Stands for the operator: its only launch fills out with sevens, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.plans = 0

    def plan(self, workload: Workload, schedule: Schedule, inputs: Any, out: Any) -> list[Any]:
        self.plans += 1
        if self.error is not None:
            raise self.error
        return [({(1,): lambda: out.fill_(7)}, (1,), (), {})]


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeOperator]:
    def make(error: Exception | None = None) -> FakeOperator:
        fake = FakeOperator(error)
        monkeypatch.setattr(attention_ops, "get_operator", lambda name: fake)
        monkeypatch.setattr(attention_ops, "_interpreting", lambda: True)
        attention_ops._forward_call.cache_clear()
        return fake

    return make


def test_failing_kernel_is_replaced_by_torch_and_told_once(
    operator: Callable[..., FakeOperator], caplog: pytest.LogCaptureFixture
) -> None:
    fake = operator(RuntimeError("planted"))
    q = drawn(1, 2, 4, 16, dtype=torch.float32, grad=False)
    schedule = json.dumps(Schedule("forward", {"block_m": 16}).to_json())
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    for _ in range(2):
        torch.testing.assert_close(attention(q, q, q, schedule=schedule), want)
    assert fake.plans == 1
    assert [entry.getMessage().endswith("planted") for entry in caplog.records] == [True]


def test_unaligned_operands_only_reach_kernels_that_take_them(operator: Callable[..., FakeOperator]) -> None:
    operator()
    q = torch.randn(1 * 2 * 4 * 16 + 1)[1:].view(1, 2, 4, 16)
    pointer, bulk = Schedule("forward", {"block_m": 16}), Schedule("decode", {"loads": "bulk"})
    assert (attention(q, q, q, schedule=json.dumps(pointer.to_json())) == 7).all()  # type: ignore[union-attr]
    assert not (attention(q, q, q, schedule=json.dumps(bulk.to_json())) == 7).any()  # type: ignore[union-attr]


def test_problems_of_forms_are_problems() -> None:
    q = drawn(3, 2, 8, dtype=torch.float32, grad=False)
    bounds = torch.tensor([0, 1, 3], dtype=torch.int32)
    inputs = {"q": q, "k": q, "v": q.clone(), "cu_q": bounds, "cu_k": bounds}
    p = problem_of(form_of(inputs, Options(longest_q=2, longest_k=2)).workload())
    assert (p.batch, p.total_q, p.q_length, p.out.shape) == (2, 3, 2, (3, 2, 8))
