"""Masks that a graph computes from constants: causal ones become the flag, and what only looks like one stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.fx import Graph

from kernelwright.compiler.passes import attention_variants, constant_mask
from kernelwright.types import Workload
from tests.compiler.masks import LENGTH, additive, windowed, with_a_held_number

sdpa = functional.scaled_dot_product_attention
aten = torch.ops.aten

Mask = Callable[[], torch.Tensor]


def operands(grad: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, 4, LENGTH, 16, generator=generator).requires_grad_(grad) for _ in range(3))


def by_index() -> torch.Tensor:
    """As transformers makes it: places of queries and keys are compared, once for each entry of the batch."""
    places = torch.arange(LENGTH)
    return (places[None, None, None, :] <= places[None, None, :, None]).expand(2, 1, LENGTH, LENGTH)


def least_number() -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)


def slopes() -> torch.Tensor:
    places = torch.arange(LENGTH)
    return (places[None, :] - places[:, None]).float()


@torch.library.custom_op("kernelwright_tests::places", mutates_args=())
def places_of(length: int) -> torch.Tensor:
    """What an operator of somebody else gives may depend on more than its arguments."""
    return torch.arange(length)


@places_of.register_fake
def _(length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.int64)


def by_a_foreign_operator() -> torch.Tensor:
    places = places_of(LENGTH)
    return places[None, :] <= places[:, None]


def workload_of(tried: Any) -> Workload:
    (decision,) = tried.report.replaced
    workload: Workload = decision.workload
    return workload


def attributes_of(tried: Any, mask: Mask) -> dict[str, Any]:
    args = operands()
    with torch.no_grad():
        got = tried.compile(lambda q, k, v: sdpa(q, k, v, attn_mask=mask()))(*args)
        torch.testing.assert_close(got, sdpa(*args, attn_mask=mask()), rtol=1e-5, atol=1e-5)
    return dict(workload_of(tried).attributes)


@pytest.mark.parametrize("mask", [by_index, additive, least_number, with_a_held_number], ids=lambda mask: mask.__name__)
def test_a_causal_mask_becomes_the_flag(forced: Any, mask: Mask) -> None:
    assert attributes_of(forced, mask) == {"causal": "bottom_right"}


def test_a_mask_that_all_heads_share_counts_once(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_mask, "MOST_ELEMENTS", LENGTH * LENGTH)
    assert "causal" in attributes_of(forced, lambda: by_index()[:1].float().log().expand(2, 4, LENGTH, LENGTH))


def test_a_mask_that_is_too_large_stays(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_mask, "MOST_ELEMENTS", LENGTH * LENGTH)
    assert "mask" in attributes_of(forced, lambda: by_index()[:1].expand(2, 4, LENGTH, LENGTH).float().log())


@pytest.mark.parametrize("mask", [lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool), lambda: torch.zeros(1, LENGTH)])
def test_a_mask_that_hides_nothing_is_taken_away(forced: Any, mask: Mask) -> None:
    assert attributes_of(forced, mask) == {}


@pytest.mark.parametrize("mask", [windowed, slopes, by_a_foreign_operator], ids=lambda mask: mask.__name__)
def test_any_other_constant_mask_stays(forced: Any, mask: Mask) -> None:
    assert "mask" in attributes_of(forced, mask)


def test_a_mask_that_is_an_input_stays_even_if_it_is_causal(forced: Any) -> None:
    args = operands()
    with torch.no_grad():
        forced.compile(lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask))(*args, by_index())
    assert workload_of(forced).attributes["mask"] == "bool"


def test_a_random_mask_stays(forced: Any) -> None:
    with torch.no_grad():
        forced.compile(lambda q, k, v: sdpa(q, k, v, attn_mask=torch.rand(LENGTH, LENGTH) > -1.0))(*operands())
    assert workload_of(forced).attributes["mask"] == "bool"


def test_more_keys_than_queries_stay_masked(forced: Any) -> None:
    q, k, v = operands()
    with torch.no_grad():
        run = forced.compile(lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(8, LENGTH, dtype=torch.bool).tril()))
        run(q[:, :, :8], k, v)
    assert workload_of(forced).attributes["mask"] == "bool"


def test_the_flag_is_in_the_backward_pass_too(forced: Any) -> None:
    ours, theirs = operands(grad=True), operands(grad=True)
    forced.compile(lambda q, k, v: sdpa(q, k, v, attn_mask=by_index()))(*ours).square().sum().backward()
    sdpa(*theirs, is_causal=True).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert len(forced.report.replaced) == 2
    assert all(one.workload.attributes["causal"] == "bottom_right" for one in forced.report.replaced)


def test_torchs_own_attention_gains_too(tried_with: Any) -> None:
    refused = tried_with(lambda workload: False)
    with torch.no_grad():
        got = refused.compile(lambda q, k, v: sdpa(q, k, v, attn_mask=by_index()))(*operands())
    torch.testing.assert_close(got, sdpa(*operands(), is_causal=True), rtol=1e-5, atol=1e-5)
    (node,) = [node for node in refused.graphs[-1].nodes if node.target in attention_variants.FORWARD]
    assert attention_variants.mask_of(node) is None and attention_variants.arguments_of(node)["is_causal"] is True


def test_every_operator_of_a_gpu_can_lose_its_mask() -> None:
    for target in (*attention_variants.FORWARD, *attention_variants.BACKWARD):
        names = [argument.name for argument in target._schema.arguments]
        if not {"attn_bias", "attn_mask"} & set(names):
            continue
        graph = Graph()
        keywords = {argument.name for argument in target._schema.arguments if argument.kwarg_only}
        given = {name: graph.placeholder(name) for name in names}
        given |= {"dropout_p": 0.0, "is_causal": False}
        args = tuple(given[name] for name in names if name not in keywords)
        node = graph.call_function(target, args, {name: given[name] for name in keywords})
        attention_variants.without_mask(node, causal=True)
        found = attention_variants.arguments_of(node)
        assert found.get("attn_bias", found.get("attn_mask")) is None and found["is_causal"] is True


def test_a_large_mask_is_not_tried(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_mask, "MOST_ELEMENTS", LENGTH)
    assert attributes_of(forced, by_index)["mask"] == "bool"


def test_a_mask_that_cannot_be_worked_out_stays(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(steps: Any) -> torch.Tensor:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(constant_mask, "_evaluated", refuse)
    assert attributes_of(forced, by_index)["mask"] == "bool" and not forced.report.warnings


def test_the_default_device_makes_no_difference() -> None:
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    with torch.device("meta"):
        assert constant_mask.judged(seen) is True


def test_a_backward_pass_without_a_gradient_is_left_alone() -> None:
    graph = Graph()
    nodes = [graph.placeholder(name) for name in ("q", "k", "v", "out", "lse")]
    target = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert attention_variants.read(graph.call_function(target, (None, *nodes, 0.0, False))) is None
