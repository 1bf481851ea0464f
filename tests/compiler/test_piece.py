"""Pieces of graphs by themselves: what belongs to one, and that it computes what it did in its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from kernelwright.compiler.passes.forms import Option, put_in
from kernelwright.compiler.piece import Piece, piece_of
from kernelwright.compiler.piece_job import PieceJob, measure
from kernelwright.errors import UsageError
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search.timing import Effort
from kernelwright.types import Schedule, Workload

aten = torch.ops.aten
H100 = named_device("h100")


def tensor(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def graph_of(model: Callable[..., Any], args: Sequence[torch.Tensor]) -> Graph:
    with torch.no_grad():
        return make_fx(model, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args).graph


def anchors_of(graph: Graph, *targets: Any) -> list[Node]:
    return [node for node in graph.nodes if node.target in targets]


def first_piece(model: Callable[..., Any], *args: torch.Tensor) -> Piece:
    targets = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default)
    return piece_of(anchors_of(graph_of(model, args), *targets)[:1])


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(functional.gelu(functional.linear(x, w, b)) + y, (12,), g)


BLOCK = (tensor(2, 3, 8), tensor(12, 8), tensor(12), tensor(2, 3, 12), tensor(12))


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (block, BLOCK),
        (lambda a, b: torch.where(a @ b > 0, a @ b, float("-inf")), (tensor(6, 8), tensor(8, 12))),
        (lambda a, b: (a @ b).to(torch.bfloat16).transpose(0, 1), (tensor(6, 8), tensor(8, 12))),
        (
            lambda x, w: functional.conv2d(torch.relu(x), w, padding=1).sigmoid(),
            (tensor(2, 8, 6, 6).to(memory_format=torch.channels_last), tensor(4, 8, 3, 3)),
        ),
        (lambda a, b: torch.bmm(a, b).amax(2), (tensor(3, 6, 8).transpose(1, 2), tensor(3, 6, 12))),
        (lambda a, b: aten.sum.dim_IntList(a @ b, [1], dtype=torch.float64), (tensor(6, 8), tensor(8, 12))),
        (
            lambda a, b: aten.clone.default((a @ b).t(), memory_format=torch.contiguous_format),
            (tensor(6, 8), tensor(8, 12)),
        ),
        (lambda a, b: aten.sum.dim_IntList(a @ b, [1], keepdim=True), (tensor(6, 8), tensor(8, 12))),
    ],
    ids=[
        "block",
        "infinities",
        "types",
        "convolution",
        "batched",
        "a type by name",
        "a layout by name",
        "a flag by name",
    ],
)
def test_piece_computes_what_its_graph_computes(model: Callable[..., Any], args: Sequence[torch.Tensor]) -> None:
    """A graph whose piece is all of it: the same operators on other numbers of the same form."""
    piece = first_piece(model, *args)
    module, anchors = piece.graph("cpu")
    inputs = piece.inputs("cpu", 0)
    (got,) = module(*inputs)
    order = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    assert [(one.shape, one.stride(), one.dtype) for one in inputs] == [(v.shape, v.stride(), v.dtype) for v in order]
    assert got.shape == model(*args).shape and got.dtype == model(*args).dtype and not got.isnan().any()
    assert piece_of(anchors).key == piece.key, "a piece of a piece is the piece itself"


def test_layers_that_are_alike_have_one_piece() -> None:
    def model(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
        return (torch.sin(torch.relu(x @ one) @ other) @ third).sum(1)

    graph = graph_of(model, [tensor(8, 8) for _ in range(4)])
    first, second, third = (piece_of([node]) for node in anchors_of(graph, aten.mm.default))
    assert str(first) == "mm+relu" and str(second) == "mm+sin" and str(third) == "mm+sum"
    same = graph_of(lambda a, b, c: torch.relu(torch.relu(a @ b) @ c), [tensor(8, 8) for _ in range(3)])
    assert {piece_of([node]).key for node in anchors_of(same, aten.mm.default)} == {first.key}


def test_steps_that_wait_for_something_behind_the_piece_are_outside() -> None:
    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = torch.relu(a @ b)
        return torch.sin(x) + x @ b

    piece = first_piece(model, tensor(8, 8), tensor(8, 8))
    assert str(piece) == "mm+relu+sin"
    module, _ = piece.graph("cpu")
    assert len(module(*piece.inputs("cpu", 0))) == 2


def test_sizes_types_and_strides_tell_pieces_apart() -> None:
    pieces = [
        first_piece(torch.mm, tensor(8, 8), tensor(8, 8)),
        first_piece(torch.mm, tensor(8, 8), tensor(8, 16)),
        first_piece(torch.mm, tensor(8, 8), tensor(8, 8).t()),
        first_piece(torch.mm, *[tensor(8, 8, dtype=torch.bfloat16)] * 2),
        first_piece(lambda a, b: torch.relu(a @ b), tensor(8, 8), tensor(8, 8)),
        first_piece(lambda a, b: (a @ b) * 2, tensor(8, 8), tensor(8, 8)),
        first_piece(lambda a, b: (a @ b) * 3, tensor(8, 8), tensor(8, 8)),
    ]
    assert len({piece.key for piece in pieces}) == len(pieces)


def test_open_sizes_make_no_piece() -> None:
    graph = make_fx(torch.mm, tracing_mode="symbolic")(tensor(6, 8), tensor(8, 12)).graph
    with pytest.raises(UsageError, match="not known before it runs"):
        piece_of(anchors_of(graph, aten.mm.default))


class FakeTimer:
    """Runs every call once, and gives out times that were decided on beforehand."""

    def __init__(self, *times: float) -> None:
        self._times = times

    def samples(self, calls: Sequence[Callable[[], Any]], effort: Effort) -> list[list[float]]:
        for call in calls:
            call()
        return [[time] * effort.rounds for time in self._times[: len(calls)]]


def option(workload: Workload) -> Option:
    knobs = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 4, "num_stages": 2, "group_m": 8, "split_k": 1}
    return Option(workload, Schedule("pointer", {**knobs, "precision": "ieee"}), H100)


def test_piece_is_timed_both_ways() -> None:
    piece = first_piece(block, *BLOCK)
    right = option(matmul_workload(6, 12, 8, "fp32", epilogue=("bias", "gelu", "residual")))
    fewer = option(matmul_workload(6, 12, 8, "fp32", epilogue=("bias",)))
    absent = option(matmul_workload(6, 12, 8, "fp32", epilogue=("relu",)))
    reply = measure(
        PieceJob(piece.text, {one.key: one for one in (right, fewer, absent)}), FakeTimer(9, 9, 5, 7), "cpu"
    )
    assert reply.theirs_us == 9 and reply.ours_us == {right.key: 5, fewer.key: 7}
    assert list(reply.failures) == [absent.key] and "no form" in reply.failures[absent.key]
    assert reply.noise == 0.01


def test_kernel_with_wrong_results_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelwright.compiler import ops

    real = ops.by_torch
    monkeypatch.setattr(ops, "by_torch", lambda *args: real(*args) * 1.01)
    piece = first_piece(lambda a, b: torch.relu(a @ b), tensor(6, 8), tensor(8, 12))
    one = option(matmul_workload(6, 12, 8, "fp32", "nn", epilogue=("relu",)))
    reply = measure(PieceJob(piece.text, {one.key: one}), FakeTimer(9, 9, 5), "cpu")
    assert reply.ours_us == {} and "differs by 0.01" in reply.failures[one.key]


def test_kernel_is_put_in_where_it_belongs() -> None:
    piece = first_piece(lambda a, b: torch.relu(a @ b), tensor(6, 8), tensor(8, 12))
    module, anchors = piece.graph("cpu")
    put_in(module.graph, anchors, option(matmul_workload(6, 12, 8, "fp32", "nn", epilogue=("relu",))))
    targets = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert targets == ["kernelwright.matmul.default"]


@pytest.mark.parametrize(("off", "fits"), [(1.01, True), (1.1, False)])
def test_results_behind_a_narrow_product_may_differ_as_it_may(
    monkeypatch: pytest.MonkeyPatch, off: float, fits: bool
) -> None:
    from kernelwright.compiler import ops

    real = ops.by_torch
    monkeypatch.setattr(ops, "by_torch", lambda *args: real(*args) * off)
    a, b = tensor(6, 8, dtype=torch.bfloat16), tensor(8, 12, dtype=torch.bfloat16)
    piece = first_piece(lambda a, b: torch.relu(a @ b).float().sum(-1), a, b)
    one = option(matmul_workload(6, 12, 8, "bf16", "nn"))
    reply = measure(PieceJob(piece.text, {one.key: one}), FakeTimer(9, 9, 5), "cpu")
    assert (one.key in reply.ours_us) == fits, reply
