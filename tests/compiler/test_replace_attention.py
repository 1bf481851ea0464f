"""Attention in graphs: the forms that torch's dispatch gives on a CPU by numbers, and those of a GPU by their names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from kernelwright.compiler.kernel_call import CALL
from kernelwright.compiler.passes import attention_variants
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.report import Report
from kernelwright.kernels.attention.workload import problem_of
from kernelwright.types import Workload

aten = torch.ops.aten
sdpa = functional.scaled_dot_product_attention


def operands(
    q_length: int = 24, kv_length: int = 24, kv_heads: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(q_length + kv_length)
    sizes = (2, 4, q_length, 16), (2, kv_heads, kv_length, 16), (2, kv_heads, kv_length, 16)
    return tuple(torch.randn(*size, generator=generator).to(dtype) for size in sizes)


def workload_of(tried: Any) -> Workload:
    (decision,) = tried.report.replaced
    workload: Workload = decision.workload
    return workload


def check(tried: Any, model: Callable[..., Any], *args: torch.Tensor, error: float = 1e-5) -> None:
    with torch.no_grad():
        got, want = tried.compile(model)(*args), model(*args)
    torch.testing.assert_close(got, want, rtol=error, atol=error)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_and_causal(forced: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(forced, lambda *x: sdpa(*x, **options), *operands(dtype=dtype), error=1e-5 if dtype.itemsize > 2 else 2e-2)
    attributes = dict(workload_of(forced).attributes)
    assert attributes.pop("causal", None) == ("bottom_right" if "is_causal" in options else None)
    assert attributes == {name: value for name, value in options.items() if name == "scale"}


@pytest.mark.parametrize(("q_length", "kv_length"), [(8, 24), (24, 8), (1, 24)])
def test_causal_with_other_lengths_counts_from_the_first_key(forced: Any, q_length: int, kv_length: int) -> None:
    check(forced, lambda *x: sdpa(*x, is_causal=True), *operands(q_length, kv_length))
    assert workload_of(forced).attributes["causal"] == "top_left"


def test_query_heads_may_share_keys(forced: Any) -> None:
    check(forced, lambda *x: sdpa(*x, is_causal=True, enable_gqa=True), *operands(kv_heads=2))
    assert workload_of(forced).dims["Hkv"] == 2


@pytest.mark.parametrize("sizes", [(24, 24), (2, 1, 1, 24), (1, 4, 24, 24), (2, 4, 24, 24)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks(forced: Any, kind: str, sizes: tuple[int, ...]) -> None:
    seen = torch.rand(*sizes, generator=torch.Generator().manual_seed(0)) > 0.3
    seen[..., 0] = True
    mask = seen if kind == "bool" else torch.randn(sizes).masked_fill(~seen, float("-inf"))
    check(forced, lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask), *operands(), mask)
    there = "".join(letter for letter, size in zip("bhqk"[-len(sizes) :], sizes, strict=True) if size > 1)
    assert (workload_of(forced).attributes["mask"], workload_of(forced).attributes["mask_dims"]) == (kind, there)


def test_result_lies_as_torch_leaves_it(forced: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(2, 24, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return sdpa(q, k, v).transpose(1, 2).reshape(2, 24, 64)

    check(forced, model, torch.randn(2, 24, 192))
    assert workload_of(forced).layouts["q"] == "strided:4608,16,192,1"


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", ["", "causal", "bool"])
def test_gradients(forced: Any, masked: str, kv_heads: int) -> None:
    leaves = [tensor.requires_grad_() for tensor in operands(kv_heads=kv_heads)]
    mask = torch.rand(24, 24) > 0.3 if masked == "bool" else None
    if mask is not None:
        mask[:, 0] = True

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, mask, is_causal=masked == "causal", enable_gqa=kv_heads < 4).square()

    got, want = (torch.autograd.grad(run(*leaves).sum(), leaves) for run in (forced.compile(model), model))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    kinds = [(d.workload.attributes.get("direction"), d.workload.attributes.get("lse")) for d in forced.report.replaced]
    assert kinds == [("backward", None), (None, True)]
    assert forced.targets().count(CALL) == 2


@pytest.mark.parametrize("ours", ["forward", "backward"])
def test_forward_pass_is_only_ours_with_its_backward_pass(tried_with: Any, ours: str) -> None:
    tried = tried_with(lambda workload: workload.attributes.get("direction", "forward") == ours)
    leaves = [tensor.requires_grad_() for tensor in operands()]
    got, want = (torch.autograd.grad(run(*leaves).sum(), leaves) for run in (tried.compile(sdpa), sdpa))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    # the CPU's backward pass reads nothing but the output and the logarithms, which ours computes as well
    assert len(tried.report.replaced) == 1


@pytest.mark.parametrize("what", ["fp64", "dropout", "no keys", "three dimensions"])
def test_what_no_kernel_takes_is_left_alone(forced: Any, what: str) -> None:
    q, k, v = operands(kv_length=0 if what == "no keys" else 24)
    if what == "fp64":
        q, k, v = q.double(), k.double(), v.double()
    elif what == "three dimensions":
        q, k, v = q[0], k[0], v[0]
    with torch.no_grad():
        compiled = forced.compile(lambda *x: sdpa(*x, dropout_p=0.5 if what == "dropout" else 0.0))
        out = compiled(q, k, v)
    if what != "dropout":
        torch.testing.assert_close(out, sdpa(q, k, v))
    # the two that torch takes apart leave products behind, which may be ours
    assert not forced.report.replaced or what in ("dropout", "three dimensions")


@pytest.mark.parametrize(
    ("name", "behind"),
    [
        ("flash_attention", (0.0, True)),
        ("cudnn_attention", (None, True, 0.0, True)),
        ("efficient_attention", (None, True, 0.0, True)),
    ],
)
def test_forms_of_a_gpu_are_read(name: str, behind: tuple[Any, ...]) -> None:
    graph = Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    node = graph.call_function(getattr(aten, f"_scaled_dot_product_{name}").default, (q, k, v, *behind), {"scale": 0.5})
    found = attention_variants.read(node)
    assert found == attention_variants.Forward(q, k, v, None, True, 0.5, lower_right=name == "flash_attention")


@pytest.mark.parametrize(
    ("name", "behind"),
    [
        ("flash_attention", ("out", "lse", "x", "x", 1, 1, 0.0, True, "x", "x")),
        ("cudnn_attention", ("out", "lse", "x", "x", None, "x", "x", 1, 1, 0.0, True)),
        ("efficient_attention", ("x", "out", "lse", "x", "x", 0.0, [True, True, True, False], True)),
    ],
)
def test_backward_forms_of_a_gpu_are_read(name: str, behind: tuple[Any, ...]) -> None:
    graph = Graph()
    d_out, q, k, v, out, lse, x = (graph.placeholder(name) for name in ("d_out", "q", "k", "v", "out", "lse", "x"))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(0)
    nodes = {"out": out, "lse": lse, "x": x}
    args = tuple(nodes.get(one, one) if isinstance(one, str) else one for one in behind)
    node = graph.call_function(getattr(aten, f"_scaled_dot_product_{name}_backward").default, (d_out, q, k, v, *args))
    found = attention_variants.read(node)
    assert isinstance(found, attention_variants.Backward)
    assert (found.out, found.lse, found.d_out) == (out, lse, d_out)
    assert found.forward.causal and (found.forward.q, found.forward.k, found.forward.v) == (q, k, v)
    assert found.forward.mask is None


@pytest.mark.parametrize(("q_length", "kv_length"), [(8, 24), (24, 8), (1, 24), (24, 24)])
@pytest.mark.parametrize(
    ("name", "behind", "lower_right"),
    [
        ("flash_attention", (0.0, True), True),
        ("cudnn_attention", (None, False, 0.0, True), False),
        ("efficient_attention", (None, False, 0.0, True), False),
    ],
)
def test_each_operator_of_a_gpu_counts_from_its_own_corner(
    recorder: Any, name: str, behind: tuple[Any, ...], lower_right: bool, q_length: int, kv_length: int
) -> None:
    """causal_lower_right of torch.nn.attention.bias calls the one for flash attention."""
    q, k, v = operands(q_length, kv_length)
    with FakeTensorMode():
        fake = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (q, k, v)]
        attend = getattr(aten, f"_scaled_dot_product_{name}")
        module = make_fx(lambda q, k, v: attend(q, k, v, *behind)[0])(*fake)
        report = Report()
        Replace(recorder(), devices=("cuda",), report=report)(module.graph)
    module.recompile()
    assert len(report.replaced) == 1 and report.warnings == []
    seen = torch.ones(q_length, kv_length, dtype=torch.bool).tril(kv_length - q_length if lower_right else 0)
    torch.testing.assert_close(module(q, k, v), sdpa(q, k, v, attn_mask=seen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("q_length", "kv_length"), [(8, 24), (24, 24)])
@pytest.mark.parametrize(
    ("name", "behind", "lower_right"),
    [
        ("flash_attention", ("out", "lse", None, None, 24, 24, 0.0, True, "seed", "seed"), True),
        ("efficient_attention", (None, "out", "lse", "seed", "seed", 0.0, [True, True, True, False], True), False),
    ],
)
def test_each_gradient_of_a_gpu_counts_from_its_own_corner(
    recorder: Any, name: str, behind: tuple[Any, ...], lower_right: bool, q_length: int, kv_length: int
) -> None:
    q, k, v = operands(q_length, kv_length)
    seen = torch.ones(q_length, kv_length, dtype=torch.bool).tril(kv_length - q_length if lower_right else 0)
    scores = (q @ k.transpose(2, 3) / 4).masked_fill(~seen, float("-inf"))
    given = {"d_out": q * 2, "q": q, "k": k, "v": v, "out": scores.softmax(-1) @ v, "lse": scores.logsumexp(-1)}
    graph, nodes = Graph(), {}
    with FakeTensorMode():
        for one, value in {**given, "seed": torch.zeros(())}.items():
            nodes[one] = graph.placeholder(one)
            nodes[one].meta["val"] = torch.empty_strided(value.shape, value.stride(), device="cuda")
        args = [nodes[one] for one in ("d_out", "q", "k", "v")]
        args += [nodes[one] if isinstance(one, str) else one for one in behind]
        target = getattr(aten, f"_scaled_dot_product_{name}_backward").default
        node = graph.call_function(target, tuple(args))
        node.meta["val"] = tuple(torch.empty_like(nodes[one].meta["val"]) for one in "qkv")
        items = []
        for place, one in enumerate("qkv"):
            items.append(graph.call_function(operator.getitem, (node, place)))
            items[-1].meta["val"] = nodes[one].meta["val"]
        graph.output(tuple(items))
        report = Report()
        Replace(recorder(), devices=("cuda",), report=report)(graph)
    assert len(report.replaced) == 1 and report.warnings == []
    found = torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*given.values(), torch.zeros(()))
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(sdpa(*exact, attn_mask=seen), exact, given["d_out"])
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.where(seen, 0.0, float("-inf"))


CUTS: list[tuple[tuple[int, ...], Any]] = [
    ((2, 1, 8, 8), lambda mask: mask[1:2]),
    ((4, 1, 1, 8), lambda mask: mask[2:].expand(2, 1, 8, 8)),
    ((1, 3, 8, 8), lambda mask: mask[:, 1:2]),
    ((16, 8), lambda mask: mask[8:]),
    ((16, 8), lambda mask: mask[::2]),
    ((2, 1, 6, 8), lambda mask: functional.pad(mask, (0, 0, 0, 2))),
    ((2, 1, 8, 8), lambda mask: functional.pad(mask, (0, 0, -1, 1))),
    ((2, 1, 8, 8), lambda mask: functional.pad(mask, (1, -1))),
    ((2, 1, 8, 8), lambda mask: functional.pad(mask, (1, 0))[..., :8]),
    ((2, 1, 8, 8), lambda mask: functional.pad(mask[..., :6], (0, 2))),
    ((2, 1, 8, 8), lambda mask: functional.pad(functional.pad(mask, (0, 8))[..., :5], (0, 11), value=-1.0)[..., :8]),
    ((2, 1, 8, 8), lambda mask: functional.pad(mask, (0, 8))[..., :8]),
    ((2, 1, 1, 8), lambda mask: mask.expand(2, 3, 8, 8)),
]


@pytest.mark.parametrize(
    ("size", "cut"),
    CUTS,
    ids=[
        *("batch", "keys", "heads", "rows", "skipped", "padded", "moved", "shifted", "shifted_too"),
        *("cut_short", "cut_shorter", "aligned", "spread"),
    ],
)
def test_a_mask_that_was_cut_or_moved_is_another_one(forced: Any, size: tuple[int, ...], cut: Any) -> None:
    """Only torch's own padding and spreading lie between a mask and the bool one that it was made of."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, 16, generator=generator) for _ in range(3))
    seen = torch.rand(size, generator=generator) > 0.4
    seen[..., 0] = True

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, attn_mask=cut(additive(seen)))

    with torch.no_grad():
        torch.testing.assert_close(forced.compile(model)(q, k, v, seen), model(q, k, v, seen), rtol=1e-4, atol=1e-4)
    assert forced.report.warnings == []
    masks = [problem_of(one.workload).mask for one in forced.report.decisions if one.workload is not None]
    # the last two are what torch does; masks with lines of other strides are left to torch
    assert masks == ["bool"] if cut in [as_torch for _, as_torch in CUTS[-2:]] else masks in ([], ["additive"])
