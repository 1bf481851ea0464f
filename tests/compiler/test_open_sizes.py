"""Batched products, convolutions and attentions with a size that only a call tells: one graph for all sizes, schedules
near where they were measured, torch elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.fx.experimental.proxy_tensor import make_fx

from kernelwright.compiler import open_call
from kernelwright.compiler.kernel_call import Call
from kernelwright.compiler.passes import open_sizes
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.types import Workload

H100 = named_device("h100")
LAST = torch.channels_last
Made = Callable[[int], tuple[torch.Tensor, ...]]


def tensor(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a, b)


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, w, stride=2, padding=1)


def biased(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, w, bias)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def to_itself(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x + 1, x * 2, is_causal=True)


def heads_inside(x: torch.Tensor) -> torch.Tensor:
    q = x.unflatten(2, (4, 8)).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, torch.cat([k, new], 2), torch.cat([v, new + 1], 2))


def without_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k[:, :, 1:], v)


def lengths(*sizes: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor(2, 4, size, 8) + place for place, size in enumerate(sizes))


CASES: dict[str, tuple[Callable[..., torch.Tensor], Made, str]] = {
    "bmm": (product, lambda n: (tensor(n, 6, 8), tensor(n, 8, 5)), "B"),
    "bmm, rows": (product, lambda n: (tensor(3, n, 8), tensor(3, 8, 5)), "M"),
    "conv": (plain, lambda n: (tensor(n, 8, 6, 6), tensor(4, 8, 3, 3)), "N"),
    "conv, last": (biased, lambda n: (tensor(n, 8, 6, 6).to(memory_format=LAST), tensor(4, 8, 3, 3), tensor(4)), "N"),
    "attention": (attend, lambda n: tuple(tensor(n, 4, 16, 8) + i for i in range(3)), "B"),
    "attention, length": (to_itself, lambda n: (tensor(2, 4, n, 8),), "Sq"),
    "attention, keys": (attend, lambda n: lengths(3, n, n), "Skv"),
    "attention, cache": (
        cached,
        lambda n: lengths(1, n, n, 1),
        "Skv",
    ),
    "attention, heads": (heads_inside, lambda n: (tensor(2, n, 32),), "Sq"),
}


def marked(args: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The operands, with those dimensions marked that differ in the others."""
    for one, other in zip(args, others, strict=True):
        for place, (size, another) in enumerate(zip(one.shape, other.shape, strict=True)):
            if size != another:
                torch._dynamo.mark_dynamic(one, place)
    return args


@pytest.mark.parametrize("case", CASES)
def test_one_graph_serves_all_sizes(forced: Any, case: str) -> None:
    function, make, name = CASES[case]
    run = forced.compile(function)
    with torch.no_grad():
        # torch itself compiles convolutions of 16 images anew
        for size in (5, 3, 14, 9):
            args = make(size)
            got = run(*marked(args, make(size + 1)))
            torch.testing.assert_close(got, function(*args), rtol=1e-4, atol=1e-4)
            assert got.stride() == function(*args).stride()
    assert len(forced.graphs) == 1 and forced.targets().count(open_call.OPEN_CALL) == 1
    (decision,) = forced.report.replaced
    assert f"{name} 16" in decision.reason and not forced.report.warnings


def test_sizes_below_the_symbol_are_chosen_among_too(forced: Any) -> None:
    """What is looked up are powers of two of such a size, not of the symbol."""

    def shorter(x: torch.Tensor) -> torch.Tensor:
        return to_itself(x[:, :, :-7])

    run = forced.compile(shorter)
    with torch.no_grad():
        for size in (20, 9):
            x = tensor(2, 4, size, 8)
            got = run(*marked((x,), (tensor(2, 4, size + 1, 8),)))
            torch.testing.assert_close(got, shorter(x), rtol=1e-4, atol=1e-4)
    (decision,) = forced.report.replaced
    assert "around Skv 1, Sq 1 and Skv 2, Sq 2 and Skv 4, Sq 4 and" in decision.reason
    assert len(forced.graphs) == 1 and not forced.report.warnings


def test_only_sizes_that_win_are_kept(tried_with: Any) -> None:
    tried = tried_with(lambda workload: workload.dims["B"] in (8, 16))
    function, make, _ = CASES["bmm"]
    with torch.no_grad():
        tried.compile(function)(*marked(make(5), make(6)))
    (decision,) = tried.report.decisions
    assert decision.replaced and decision.reason == "faster around B 8 and B 16"


def test_what_never_wins_is_left_alone(tried_with: Any) -> None:
    tried = tried_with(lambda workload: False)
    function, make, _ = CASES["conv"]
    with torch.no_grad():
        tried.compile(function)(*marked(make(5), make(6)))
    assert not tried.report.replaced and open_call.OPEN_CALL not in tried.targets()


@pytest.mark.parametrize(
    ("function", "args", "others"),
    [
        (product, (tensor(5, 6, 8), tensor(5, 8, 5)), (tensor(6, 7, 8), tensor(6, 8, 5))),
        (plain, (tensor(2, 8, 6, 6), tensor(4, 8, 3, 3)), (tensor(2, 8, 7, 6), tensor(4, 8, 3, 3))),
        (attend, lengths(3, 5, 5), lengths(4, 6, 6)),
        (without_first, lengths(3, 6, 5), lengths(3, 7, 6)),
    ],
    ids=["two symbols", "height", "queries and keys", "keys and values that are not alike"],
)
def test_what_has_other_symbols_is_left_alone(
    forced: Any, function: Any, args: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]
) -> None:
    with torch.no_grad():
        torch.testing.assert_close(forced.compile(function)(*marked(args, others)), function(*args))
    assert not forced.report.replaced and not forced.report.warnings


def test_training_keeps_its_gradients(forced: Any) -> None:
    for case in ("conv", "attention"):
        function, make, _ = CASES[case]
        run = forced.compile(function)
        for size in (5, 7):
            args = [x.requires_grad_() for x in make(size)]
            marked(tuple(args), make(size + 1))
            got, want = (torch.autograd.grad(call(*args).square().sum(), args) for call in (run, function))
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert not forced.report.warnings


SLICED: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "product": (torch.mm, (tensor(9, 8), tensor(8, 4))),
    "product, activation": (lambda a, b: (a @ b).relu(), (tensor(9, 8), tensor(8, 4))),
    "bmm": (torch.bmm, (tensor(9, 6, 8), tensor(9, 8, 4))),
    "conv": (functional.conv2d, (tensor(9, 4, 6, 6), tensor(8, 4, 3, 3), tensor(8))),
    "attention": (attend, tuple(tensor(9, 4, 16, 8) + i for i in range(3))),
}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", SLICED)
def test_known_sizes_do_not_bind_open_ones_behind_them(forced: Any, case: str, trains: bool) -> None:
    """As a table of places is cut to the length of a prompt, which may be all of it."""
    function, args = SLICED[case]

    def model(x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return function(*args)[: x.shape[0]] * x.view(-1, *[1] * (function(*args).dim() - 1))

    run = forced.compile(model)
    operands = [x.detach().clone().requires_grad_(trains) for x in args]
    for size in (9, 5, 8):
        x = tensor(size)
        torch._dynamo.mark_dynamic(x, 0)
        got, want = run(x, *operands), model(x, *operands)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        if trains:
            gradients = (torch.autograd.grad(y.square().sum(), operands) for y in (got, want))
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert len(forced.graphs) == 1 and forced.report.replaced and not forced.report.warnings


def table_of(*sizes: int) -> tuple[dict[str, Any], dict[int, Any]]:
    found = {}
    for size in sizes:
        space = get_operator("matmul").templates["pointer"].space(workload_of(size), H100)
        found[size] = space.sample(random.Random(size), 1)[0]
    known = [[dict(workload_of(size).dims), schedule.to_json()] for size, schedule in found.items()]
    return {"device": "h100", "known": known}, found


def workload_of(batch: int) -> Workload:
    operands = {"a": tensor(batch, 64, 64), "b": tensor(batch, 64, 64)}
    told = {"kind": "bmm", "order": [0, 1, 2]}
    return open_call.workload_of(operands, told, open_call.empty_result(operands, told))


@pytest.mark.parametrize(("batch", "measured"), [(16, 16), (20, 16), (25, 32), (45, 32), (9, None), (60, None)])
def test_schedule_is_the_nearest_within_reach(batch: int, measured: int | None) -> None:
    table, schedules = table_of(16, 32)
    assert open_call.nearest(workload_of(batch), table) == (None if measured is None else schedules[measured])


def test_a_kernel_gets_the_call_and_torch_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Workload] = []

    def run(self: Call, operands: Any) -> list[torch.Tensor]:
        ran.append(self.workload)
        return [torch.bmm(*operands)]

    monkeypatch.setattr(Call, "run", run)
    table, _ = table_of(16)
    told = json.dumps({"kind": "bmm", "order": [0, 1, 2]})
    for batch in (18, 40):
        a, b = tensor(batch, 64, 64), tensor(batch, 64, 64)
        torch.testing.assert_close(open_call.open_call([a, b], "a,b", told, json.dumps(table)), torch.bmm(a, b))
    assert [workload.dims["B"] for workload in ran] == [18]


def test_the_source_is_asked_for_all_sizes_at_once(recorder: Any) -> None:
    from kernelwright.compiler.passes.replace import Replace

    class Asked(type(recorder())):  # type: ignore[misc]
        def prepare(self, workloads: Any) -> None:
            self.prepared = list(workloads)

    answers = Asked()
    passes = Replace(answers, devices=("cpu",))
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        passes(graph.graph)
        seen.append(graph.graph)
        return graph.forward

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    behind = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(backend(graph, inputs)))
    function, make, _ = CASES["bmm"]
    with torch.no_grad():
        torch.compile(function, backend=behind)(*marked(make(5), make(6)))
    assert seen and answers.asked and set(answers.asked) <= set(answers.prepared)


@pytest.mark.parametrize(
    ("length", "name", "is_ours"), [(8, "flash", True), (1, "flash", False), (1, "efficient", True)]
)
def test_causal_attention_that_counts_from_the_last_query_is_left_to_torch(
    length: int, name: str, is_ours: bool
) -> None:
    """Where there are other numbers of queries and keys; equal sizes have one symbol here."""
    behind = (0.0, True) if name == "flash" else (None, False, 0.0, True)
    attend = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    q, k = tensor(1, 1, length, 8), tensor(1, 1, 8, 8)
    graph = make_fx(lambda q, k, v: attend(q, k, v, *behind)[0], tracing_mode="symbolic")(q, k, k + 1).graph
    (node,) = (node for node in graph.nodes if node.target is attend.default)
    assert (open_sizes.place_of(node) is not None) == is_ours
