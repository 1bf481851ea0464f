"""The pass by numbers: graphs with our operator give what eager gives, and only what may be replaced is replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelwright.compiler.operands import workload_of
from kernelwright.compiler.ops import MATMUL
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.report import Report
from kernelwright.kernels.matmul.reference import activations
from kernelwright.types import Workload

aten = torch.ops.aten
Model = Callable[..., Any]
ACTIVATIONS = sorted(activations())
TYPES = (torch.float32, torch.bfloat16)


def tensor(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    precise = want.dtype in (torch.float32, torch.float64, torch.complex64)
    torch.testing.assert_close(got, want, rtol=1e-5 if precise else 2e-2, atol=1e-5 if precise else 2e-2)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x, weight, bias)


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(ACTIVATIONS, TYPES), ("gelu", torch.float16)], ids=str)
def test_bias_and_activation_are_taken_in(forced: Any, name: str, dtype: torch.dtype) -> None:
    activation = activations()[name]
    args = tensor(2, 3, 8, dtype=dtype), tensor(12, 8, dtype=dtype), tensor(12, dtype=dtype)

    def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return activation(linear(x, weight, bias))

    with torch.no_grad():
        same(forced.compile(model)(*args), model(*args))
    assert forced.epilogues() == [("bias", name)]
    assert [t for t in forced.targets() if t not in (aten.view.default, aten.permute.default)] == [MATMUL]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_without_bias(forced: Any, name: str) -> None:
    activation = activations()[name]
    args = tensor(6, 8), tensor(8, 12)
    with torch.no_grad():
        same(forced.compile(lambda a, b: activation(a @ b))(*args), activation(args[0] @ args[1]))
    assert forced.epilogues() == [(name,)]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("times two", lambda x: x * 2),
        ("quick gelu", lambda x: x * torch.sigmoid(1.702 * x)),
        ("hardtanh", functional.hardtanh),
        ("leaky", lambda x: functional.leaky_relu(x, 1e-4)),
        ("softplus", functional.softplus),
        ("hardswish", functional.hardswish),
        ("relu that drops NaN", lambda x: torch.where(x > 0, x, 0.0)),
        ("quantised", lambda x: x.to(torch.int32).to(x.dtype)),
        ("twice the gate", lambda x: x * torch.sigmoid(x) ** 2),
        ("random", lambda x: functional.dropout(x, 0.0, training=True) + 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_functions_stay_behind_the_product(forced: Any, name: str, function: Model) -> None:
    args = tensor(6, 8), tensor(12, 8), tensor(12)
    with torch.no_grad():
        same(
            forced.compile(lambda x, w, b: function(linear(x, w, b)))(*args),
            function(linear(*args)),
        )
    assert forced.epilogues() == [("bias",)]


def test_scaling_stays_behind_the_activation(forced: Any) -> None:
    args = tensor(6, 8), tensor(12, 8), tensor(12)

    def model(*args: torch.Tensor) -> torch.Tensor:
        return functional.relu6(linear(*args)) * 0.5

    with torch.no_grad():
        same(forced.compile(model)(*args), model(*args))
    # relu6 is relu, cut off at 6.
    assert forced.epilogues() == [("bias", "relu")]


def test_activation_spelled_by_hand_is_known(forced: Any) -> None:
    args = tensor(6, 8), tensor(12, 8), tensor(12)

    def silu(x: torch.Tensor) -> torch.Tensor:
        return x / (1 + torch.exp(-x))

    with torch.no_grad():
        same(forced.compile(lambda *a: silu(linear(*a)))(*args), silu(linear(*args)))
    assert forced.epilogues() == [("bias", "silu")]


def test_only_the_part_of_a_chain_that_is_an_activation_is_taken(forced: Any) -> None:
    args = tensor(6, 8), tensor(12, 8), tensor(12)

    def model(*args: torch.Tensor) -> torch.Tensor:
        return torch.sin(functional.gelu(linear(*args))) * 3

    with torch.no_grad():
        same(forced.compile(model)(*args), model(*args))
    assert forced.epilogues() == [("bias", "gelu")]


def test_product_that_others_use_keeps_its_value(forced: Any) -> None:
    args = tensor(6, 8), tensor(12, 8), tensor(12)

    def model(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = linear(*args)
        return torch.relu(product), product

    with torch.no_grad():
        for got, want in zip(forced.compile(model)(*args), model(*args), strict=True):
            same(got, want)
    assert forced.epilogues() == [("bias",)]


def test_activation_used_twice_is_taken_once(forced: Any) -> None:
    args = tensor(6, 8), tensor(12, 8), tensor(12)

    def model(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = functional.silu(linear(*args))
        return x + 1, x * x

    with torch.no_grad():
        for got, want in zip(forced.compile(model)(*args), model(*args), strict=True):
            same(got, want)
    assert forced.epilogues() == [("bias", "silu")]


@pytest.mark.parametrize("order", ["product first", "bias first"])
def test_bias_added_by_hand(forced: Any, order: str) -> None:
    args = tensor(2, 3, 8), tensor(12, 8), tensor(12)

    def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        product = linear(x, weight)
        return torch.tanh(product + bias if order == "product first" else bias + product)

    with torch.no_grad():
        same(forced.compile(model)(*args), model(*args))
    assert forced.epilogues() == [("bias", "tanh")]


@pytest.mark.parametrize("added", [(6, 1), (1,)])
def test_what_is_not_a_bias_is_added_outside(forced: Any, added: tuple[int, ...]) -> None:
    args = tensor(6, 8), tensor(8, 12), tensor(*added)
    with torch.no_grad():
        same(forced.compile(lambda a, b, c: a @ b + c)(*args), args[0] @ args[1] + args[2])
    assert forced.epilogues() == [()]


def test_residual_addmm_is_left_alone(forced: Any) -> None:
    args = tensor(6, 12), tensor(6, 8), tensor(8, 12)
    with torch.no_grad():
        same(forced.compile(torch.addmm)(*args), torch.addmm(*args))
    assert MATMUL not in forced.targets()


def test_scaled_addmm_is_left_alone(forced: Any) -> None:
    args = tensor(12), tensor(6, 8), tensor(8, 12)

    def model(*args: torch.Tensor) -> torch.Tensor:
        return torch.addmm(*args, beta=2.0, alpha=0.5)

    with torch.no_grad():
        same(forced.compile(model)(*args), model(*args))
    assert [decision.reason for decision in forced.report.decisions] in ([], ["addmm scales its operands"])
    assert ("bias",) not in forced.epilogues()


@pytest.mark.parametrize(
    ("view", "layout"),
    [
        (lambda x: x, "row"),
        (lambda x: x.t().contiguous().t(), "col"),
        (lambda x: torch.cat([x, x], 1)[:, : x.shape[1]], "row:16"),
        (lambda x: torch.cat([x, x], 0).t().contiguous().t()[: x.shape[0]], "col:16"),
    ],
    ids=["dense", "transposed", "sliced", "sliced and transposed"],
)
def test_strides_become_the_layout(forced: Any, view: Model, layout: str) -> None:
    a, b = view(tensor(8, 8)), tensor(8, 12)
    with torch.no_grad():
        same(forced.compile(torch.mm)(a, b), a @ b)
    assert forced.answers.asked[0].layouts["a"] == layout
    assert MATMUL in forced.targets()


@pytest.mark.parametrize(
    "operand",
    [
        lambda: tensor(1, 8).expand(6, 8),
        lambda: tensor(6, 1).expand(6, 8),
        lambda: tensor(6, 16)[:, ::2],
        lambda: tensor(20).as_strided((6, 8), (2, 1)),
    ],
    ids=["expanded rows", "expanded columns", "every other", "overlapping"],
)
def test_odd_strides_are_left_alone(forced: Any, operand: Callable[[], torch.Tensor]) -> None:
    a, b = operand(), tensor(8, 12)
    with torch.no_grad():
        same(forced.compile(torch.mm)(a, b), a @ b)
    assert MATMUL not in forced.targets()
    assert "stride" in forced.report.decisions[0].reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64], ids=str)
def test_other_types_are_left_alone(forced: Any, dtype: torch.dtype) -> None:
    a, b = (torch.ones(size, dtype=dtype).cumsum(1) for size in ((6, 8), (8, 12)))
    with torch.no_grad():
        torch.testing.assert_close(forced.compile(torch.mm)(a, b), a @ b)
    assert MATMUL not in forced.targets()


def test_symbolic_sizes_are_left_alone(forced: Any) -> None:
    compiled = forced.compile(lambda a, b: torch.relu(a @ b), dynamic=True)
    with torch.no_grad():
        for rows in (5, 7, 9):
            a, b = tensor(rows, 8), tensor(8, 12)
            same(compiled(a, b), torch.relu(a @ b))
    assert len(forced.graphs) == 1, "the pass must not make sizes static"
    assert MATMUL not in forced.targets()


@pytest.mark.parametrize("sizes", [(0, 8, 12), (6, 0, 12), (6, 8, 0)])
def test_empty_operands_are_left_alone(forced: Any, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b = tensor(m, k), tensor(k, n)
    with torch.no_grad():
        same(forced.compile(torch.mm)(a, b), a @ b)
    assert MATMUL not in forced.targets()


def test_without_the_fused_record_the_plain_one_is_used(tried_with: Any) -> None:
    def accepts(workload: Workload) -> bool:
        return workload.epilogue == ("bias",)

    tried = tried_with(accepts)
    args = tensor(6, 8), tensor(12, 8), tensor(12)
    with torch.no_grad():
        same(tried.compile(lambda *a: functional.gelu(linear(*a)))(*args), functional.gelu(linear(*args)))
    assert [w.epilogue for w in tried.answers.asked][:2] == [("bias", "gelu"), ("bias",)]
    assert tried.epilogues() == [("bias",)]
    assert tried.epilogues() == [("bias",)]


def test_slower_products_are_left_alone(tried_with: Any) -> None:
    tried = tried_with(lambda workload: False)
    args = tensor(6, 8), tensor(12, 8), tensor(12)
    with torch.no_grad():
        same(tried.compile(linear)(*args), linear(*args))
    assert MATMUL not in tried.targets()
    assert "torch.mm" in tried.report.decisions[0].reason


@pytest.mark.parametrize("setting", ["legacy", "by backend"])
def test_tf32_asks_for_another_workload(setting: str) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
    try:
        if setting == "legacy":
            torch.set_float32_matmul_precision("high")
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        single, half = (
            workload_of(tensor(6, 8, dtype=dtype), tensor(8, 12, dtype=dtype), None, (), dtype)
            for dtype in (torch.float32, torch.float16)
        )
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cuda.matmul.fp32_precision = before[1]
    assert (single.error_budget, half.error_budget) == (1e-3, None)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in ACTIVATIONS), ("silu", torch.bfloat16)], ids=str
)
def test_gradients_equal_those_of_eager(forced: Any, name: str, dtype: torch.dtype) -> None:
    activation = activations()[name]

    def model(x: torch.Tensor, first: torch.Tensor, bias: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return linear(activation(linear(x, first, bias)), second).float().square().mean()

    args = [tensor(*size, dtype=dtype) for size in ((2, 3, 8), (12, 8), (12,), (4, 12))]
    gradients = []
    for function in (model, forced.compile(model)):
        leaves = [arg.clone().requires_grad_() for arg in args]
        function(*leaves).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for want, got in zip(*gradients, strict=True):
        same(got, want)
    assert len(forced.report.replaced) == len(forced.report.decisions) == 6


def test_an_error_of_ours_leaves_the_graph_alone(forced: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(workload: Workload) -> Any:
        raise ArithmeticError("planted")

    forced.ask(fail)
    args = tensor(6, 8), tensor(12, 8), tensor(12)
    with torch.no_grad():
        same(forced.compile(linear)(*args), linear(*args))
    assert MATMUL not in forced.targets()
    ours = [record for record in caplog.records if record.name.startswith("kernelwright")]
    assert [record.levelname for record in ours] == ["WARNING"]
    assert forced.report.warnings == ["planted"]


def test_operator_on_another_device_is_left_alone(forced: Any) -> None:
    forced._pass._devices = ("cuda",)
    with torch.no_grad():
        forced.compile(torch.mm)(tensor(6, 8), tensor(8, 12))
    assert MATMUL not in forced.targets()
    assert forced.report.decisions[0].reason == "it runs on cpu"


def test_identity_follows_the_answers(recorder: Any) -> None:
    def identity(state: str | None, how: tuple[str, ...] = ("measured",)) -> Any:
        return Replace(recorder(), state=state, how=how).uuid()

    assert identity("one") == identity("one")
    assert len({identity("one"), identity("two"), identity("one", ("measured", "stale"))}) == 3
    assert identity(None) is None


def test_an_answer_that_is_not_trusted_changes_nothing(recorder: Any) -> None:
    module = torch.fx.symbolic_trace(lambda a, b: aten.mm.default(a, b))
    mode = FakeTensorMode()
    for node, size in zip(module.graph.nodes, ((6, 8), (8, 12), (6, 12)), strict=False):
        node.meta["val"] = mode.from_tensor(tensor(*size))
    report = Report()
    Replace(recorder(), how=("nearest",), devices=("cpu",), report=report)(module.graph)
    assert "not trusted" in report.decisions[0].reason
    Replace(recorder(), how=("measured",), devices=("cpu",), report=report)(module.graph)
    assert report.decisions[1].replaced
