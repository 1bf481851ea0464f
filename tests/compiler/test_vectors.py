"""Vectors beside a product or a convolution are the kernel's only where they have a number for each of its columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.fx.experimental.proxy_tensor import make_fx

from kernelwright.compiler.kernel_call import Call, Form, written_forms
from kernelwright.compiler.operands import workload_of
from kernelwright.compiler.passes.siblings import siblings
from kernelwright.errors import InvalidWorkload
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def tensor(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


X, W, Y = tensor(6, 8), tensor(8, 12), tensor(6, 12)
IMAGE, FILTER = tensor(2, 4, 6, 6), tensor(8, 4, 3, 3)


def conv() -> torch.Tensor:
    return functional.conv2d(IMAGE, FILTER, padding=1)


@pytest.mark.parametrize(
    ("function", "vector", "epilogue"),
    [
        (lambda v: torch.relu((X @ W).view(6, 2, 6) + v), tensor(6), ()),
        (lambda v: ((X @ W).view(6, 2, 6) + v).view(6, 12) + Y, tensor(6), ()),
        (lambda v: ((X @ W).view(6, 2, 6) * v).view(6, 12) + Y, tensor(6), ()),
        (lambda v: torch.relu((X @ W).view(12, 6) * v), tensor(6), ()),
        (lambda v: torch.relu((X @ W).view(3, 24) * v), tensor(24), ()),
        (lambda v: torch.relu((X @ W).view(3, 24) + v), tensor(24), ()),
        (lambda v: torch.relu((X @ W).view(2, 3, 12) * v), tensor(12), ("scale_vec", "relu")),
        (lambda v: torch.relu((X @ W).view(2, 3, 12) + v), tensor(12), ("bias", "relu")),
        (lambda v: (conv().view(2, 16, 3, 6) * v).view(2, 8, 6, 6), tensor(16, 1, 1), ()),
        (lambda v: (conv().view(4, 8, 3, 6) * v).view(2, 8, 6, 6), tensor(8, 1, 1), ()),
        (lambda v: torch.relu((conv().view(4, 4, 6, 6) + v).view(2, 8, 6, 6)), tensor(4, 1, 1), ()),
        (lambda v: torch.relu(conv() * v), tensor(8, 1, 1), ("scale_vec", "relu")),
    ],
    ids=range(12),
)
def test_a_vector_of_a_view_is_none_of_the_columns(
    forced: Any, function: Callable[..., Any], vector: torch.Tensor, epilogue: tuple[str, ...]
) -> None:
    """Those of heads and of groups, for example."""
    with torch.no_grad():
        torch.testing.assert_close(forced.compile(function)(vector), function(vector), rtol=1e-4, atol=1e-4)
    assert forced.epilogues() == [epilogue]
    assert forced.report.warnings == []


def test_a_bias_that_addmm_spreads_is_no_vector_of_columns(forced: Any) -> None:
    one = tensor(1)
    with torch.no_grad():
        got = forced.compile(torch.addmm)(one, X, W)
    torch.testing.assert_close(got, torch.addmm(one, X, W))
    assert forced.epilogues() == []
    with pytest.raises(InvalidWorkload, match="dense vector of 12"):
        workload_of(X, W, one, ("bias",), torch.float32)


def test_products_whose_biases_are_spread_are_no_siblings() -> None:
    def graph_of(columns: int) -> torch.fx.Graph:
        def layers(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
            return torch.addmm(b, x, v.t()).relu(), torch.addmm(c, x, w.t()).tanh()

        weights = torch.empty(2, 12, 8)
        inputs = torch.empty(4096, 8), *weights, torch.empty(columns), torch.empty(columns)
        graph: torch.fx.Graph = make_fx(layers, tracing_mode="fake")(*inputs).graph
        return graph

    found = {}
    for columns in (12, 1):
        graph = graph_of(columns)
        found[columns] = len(siblings(graph, list(graph.nodes)))
    assert found == {12: 1, 1: 0}


def test_a_kernel_gets_no_vector_of_another_length() -> None:
    """It would read behind the vector's end."""
    workload = matmul_workload(6, 12, 8, "fp32", "nn", epilogue=("bias",))
    schedule = get_operator("matmul").default_schedule(workload, named_device("h100"))
    texts = [json.dumps(part.to_json()) for part in (workload, schedule)]
    call = Call("a,b,bias", *texts, written_forms([Form.of(Y)]))
    lengths = {12: True, 24: False, 6: False, 1: False}
    ready = {n: call._ready({"a": X, "b": W, "bias": tensor(n)}) is not None for n in lengths}
    assert ready == lengths
