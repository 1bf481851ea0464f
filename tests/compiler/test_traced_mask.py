"""Constant masks in the graph that dynamo traced: torch sees none of them, and numbers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.fx import GraphModule

from kernelwright.compiler.passes import constant_mask, traced_mask
from kernelwright.compiler.passes.constant_mask import judged
from kernelwright.compiler.passes.traced_mask import ATTENTION, simplify_traced_masks
from tests.compiler.masks import LENGTH, additive, windowed, with_a_held_number

sdpa = functional.scaled_dot_product_attention

Mask = Callable[[], torch.Tensor]


def operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, 4, LENGTH, 16, generator=generator) for _ in range(3))


def simplified(function: Callable[..., Any], *args: torch.Tensor) -> tuple[list[dict[str, Any]], int]:
    """Run a function as dynamo traces it, with its masks simplified, and compare with eager; what the attentions were
    given, and how many were changed."""
    seen: list[dict[str, Any]] = []
    counts: list[int] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        counts.append(simplify_traced_masks(module))
        module.graph.lint()
        for node in module.graph.nodes:
            if node.target is ATTENTION:
                seen.append(dict(zip(("q", "k", "v", "attn_mask"), node.args, strict=False)) | dict(node.kwargs))
        return module.forward

    torch._dynamo.reset()
    got = torch.compile(function, backend=backend, dynamic=False)(*args)
    torch._dynamo.reset()
    torch.testing.assert_close(got, function(*args), rtol=1e-5, atol=1e-5)
    return seen, sum(counts)


def spread_along_keys() -> torch.Tensor:
    """Hides nothing, and has a stride of 0 along the keys, for which torch takes attention apart."""
    return (torch.arange(LENGTH)[None, None, :, None] >= 0).expand(2, 1, LENGTH, LENGTH)


def by_index() -> torch.Tensor:
    places = torch.arange(LENGTH)
    return (places[None, None, None, :] <= places[None, None, :, None]).expand(2, 4, LENGTH, LENGTH)


def drawn() -> torch.Tensor:
    return torch.zeros(LENGTH, LENGTH) * torch.rand(LENGTH, LENGTH)


def filled_later() -> torch.Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask.tril_()
    return mask


def written_through_a_view() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    mask.view(-1)[1:9] = -1.0
    return mask


def added_to() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    row = mask[3]
    row -= 2.0
    return mask


def on_a_named_device() -> torch.Tensor:
    places = torch.arange(LENGTH, device=torch.device("cpu"))
    return (places[None] <= places[:, None].to("cpu")) & torch.ones(LENGTH, LENGTH, device="cpu").bool()


def shut_in() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    functional.hardtanh(mask, -3.0, -1.0, inplace=True)
    return mask


def raised_by_place() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    functional.threshold(mask, 1.0, -2.0, True)
    return mask


IN_PLACE = [shut_in, raised_by_place]


@torch.compiler.allow_in_graph
def where(mask: torch.Tensor) -> torch.Tensor:
    """Has a name of torch's, and gives something else from call to call."""
    return mask & (torch.rand(LENGTH, LENGTH) > 0.5)


def of_another_name() -> torch.Tensor:
    return where(by_index()[0, 0]).logical_or(by_index()[0, 0])


@pytest.mark.parametrize(
    "mask", [by_index, additive, with_a_held_number, on_a_named_device], ids=lambda mask: mask.__name__
)
@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask, scale=0.3),
        lambda q, k, v, mask: sdpa(q, k, v, mask, 0.0, scale=0.3),
        lambda q, k, v, mask: sdpa(query=q, key=k, value=v, attn_mask=mask, scale=0.3),
        lambda q, k, v, mask: sdpa(q, attn_mask=mask, value=v, key=k, scale=0.3),
    ],
    ids=["mask by name", "by place", "by name", "query by place"],
)
def test_a_causal_mask_becomes_the_flag(mask: Mask, call: Callable[..., torch.Tensor]) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return call(q, k, v, mask())

    (given,), changed = simplified(model, *operands())
    assert changed == 1
    assert given["is_causal"] is True and given["scale"] == 0.3 and "attn_mask" not in given


def test_a_mask_that_hides_nothing_is_taken_away() -> None:
    (given,), changed = simplified(lambda q, k, v: sdpa(q, k, v, attn_mask=spread_along_keys()), *operands())
    assert (changed, given["is_causal"]) == (1, False)
    assert "attn_mask" not in given


@pytest.mark.parametrize("mask", [by_index, windowed])
def test_a_mask_that_layers_share_is_worked_out_once(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Any] = []
    monkeypatch.setattr(constant_mask, "judged", lambda value: evaluated.append(value) or judged(value))

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shared = mask()
        for _ in range(3):
            q = sdpa(q, k, v, attn_mask=shared)
        return q

    simplified(model, *operands())
    assert len(evaluated) == 1


def test_names_of_gpus_are_looked_at_on_the_cpu() -> None:
    for name in ("cuda", "cuda:1", "cpu", "meta"):
        assert traced_mask._on_cpu(name) == "cpu"
    for other in ("torch.BoolTensor", 1, None, torch.float16):
        assert traced_mask._on_cpu(other) is other
    assert traced_mask._on_cpu(torch.device("cuda")) == torch.device("cpu")


def test_all_layers_may_share_a_mask_and_its_places_are_read_elsewhere() -> None:
    table = torch.randn(LENGTH, 16, generator=torch.Generator().manual_seed(1))

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH)
        mask = places[None, :] <= places[:, None]
        x = (q + functional.embedding(places, table)).relu_()
        for _ in range(3):
            x = sdpa(x, k, v, attn_mask=mask)
        return x

    seen, changed = simplified(model, *operands())
    assert changed == 3 and all(given["is_causal"] for given in seen)


@pytest.mark.parametrize(
    "mask",
    [
        windowed,
        drawn,
        filled_later,
        written_through_a_view,
        added_to,
        *IN_PLACE,
        of_another_name,
    ],
    ids=lambda mask: mask.__name__,
)
def test_whatever_is_not_known_for_sure_stays(mask: Mask) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return sdpa(q, k, v, attn_mask=mask())

    seen, changed = simplified(model, *operands())
    assert changed == 0 and all(given["attn_mask"] is not None for given in seen)


def test_a_mask_from_an_input_or_a_cached_prompt_stays() -> None:
    q, k, v = operands()
    seen, changed = simplified(lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask), q, k, v, by_index())
    assert changed == 0 and seen[0]["attn_mask"] is not None

    def longer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen_up_to = torch.arange(LENGTH)[None, :] <= torch.arange(LENGTH - 4, LENGTH)[:, None]
        return sdpa(q[:, :, -4:], k, v, attn_mask=seen_up_to)

    seen, changed = simplified(longer, q, k, v)
    assert changed == 0 and seen[0]["attn_mask"] is not None


def test_the_backend_and_the_collector_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelwright.compiler import backend, collect

    given: list[Any] = []
    monkeypatch.setattr(backend, "compile_fx", lambda module, *_, **__: given.append(module) or module.forward)
    options = {"devices": ("cpu",), "answers": lambda workload: None}
    args = operands()
    torch._dynamo.reset()
    torch.compile(lambda q, k, v: sdpa(q, k, v, attn_mask=by_index()), backend="kernelwright", options=options)(*args)
    (node,) = [node for node in given[0].graph.nodes if node.target is ATTENTION]
    assert node.kwargs["is_causal"] is True
    on_meta = [tensor.to("meta") for tensor in args]

    def spread(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(LENGTH, device=q.device)[:, None] >= 0).expand(2, 1, LENGTH, LENGTH)
        return sdpa(q, k, v, attn_mask=mask)

    found, _ = collect.collect_workloads(spread, on_meta)
    (workload,) = found
    assert "mask" not in dict(workload.attributes) and "causal" not in dict(workload.attributes)


def compared_by_method() -> torch.Tensor:
    """As a vmapped comparison is traced: its operators are methods such as `__eq__`."""
    places = torch.arange(LENGTH)
    packed = (places.expand(2, -1).diff(dim=-1, prepend=places[None, :1].expand(2, 1) - 1) != 1).cumsum(-1)
    alike = packed[:, None, :, None].__eq__(packed[:, None, None, :])
    return (places[None, None, None, :] <= places[None, None, :, None]).__and__(alike)


def test_operators_that_are_called_by_their_methods_are_known() -> None:
    q, k, v = operands()
    (seen,), changed = simplified(lambda q, k, v: sdpa(q, k, v, attn_mask=compared_by_method()), q, k, v)
    assert changed == 1 and seen["is_causal"] and "attn_mask" not in seen


def test_a_mask_that_a_method_of_an_operator_writes_into_stays() -> None:
    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        mask.__iand__(mask.tril(2))
        return sdpa(q, k, v, attn_mask=mask)

    (seen,), changed = simplified(masked, *operands())
    assert changed == 0 and seen["attn_mask"] is not None


IN_PLACE = [name for name in dir(torch.Tensor) if name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}")]


@pytest.mark.parametrize("name", [*IN_PLACE, "__setitem__", "iadd_", "masked_fill_"])
def test_methods_that_write_are_known(name: str) -> None:
    graph = torch.fx.Graph()
    mask = graph.placeholder("mask")
    assert traced_mask._writes(graph.call_method(name, (mask, mask)))


def test_methods_that_write_are_found_by_their_names() -> None:
    assert {"__iadd__", "__iand__", "__idiv__", "__ilshift__", "__ipow__"} <= set(IN_PLACE)
    graph = torch.fx.Graph()
    mask = graph.placeholder("mask")
    assert not traced_mask._writes(graph.call_method("__invert__", (mask,)))
