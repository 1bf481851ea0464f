"""Makes torch trace tensors without data as it does those of a GPU, where the meta device has other rules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Results of convolutions are channels_last where the image or the weight is, as cuDNN leaves them. Tensors that a
    graph makes of numbers may be read: on the meta device `torch.tensor` makes them past the tracing (the empty cache
    of keys in models of transformers).

    What torch remembers of operators on tensors without data is forgotten before and after.
    """

    def chosen(image: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim())
        if last is not None and any(_lies(tensor, last) for tensor in (image, weight)):
            return last
        return torch.contiguous_format

    made = FakeTensorMode.__init__

    def lenient(mode: FakeTensorMode, *args: Any, **options: Any) -> None:
        made(mode, *args, **{**options, "allow_non_fake_inputs": True})

    FakeTensorMode.cache_clear()
    try:
        with (
            mock.patch.object(torch._C, "_conv_determine_backend_memory_format", chosen),
            mock.patch.object(FakeTensorMode, "__init__", lenient),
        ):
            yield
    finally:
        FakeTensorMode.cache_clear()


def _lies(tensor: torch.Tensor, order: torch.memory_format) -> bool:
    """Whether a tensor lies in this order and not in the usual one as well."""
    return tensor.is_contiguous(memory_format=order) and not tensor.is_contiguous()


def empty_results(graph: Graph, *inputs: Any) -> list[Any]:
    """Results of a graph on the meta device: tensors with the sizes and strides that were traced, and inputs that are
    handed through."""
    placeholders = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    (output,) = graph.find_nodes(op="output")
    return [placeholders[node] if node in placeholders else _empty(node) for node in output.args[0]]


def _empty(node: Any) -> Any:
    value = node.meta["val"] if isinstance(node, Node) else node
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def fuse_attention(graph: torch.fx.GraphModule) -> None:
    """Keep attention whole: on the meta device torch's dispatch would take it apart, as it does on no other."""
    for node in graph.graph.nodes:
        if node.target is torch._C._nn.scaled_dot_product_attention:
            node.target = _whole_attention
    graph.recompile()


def _whole_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention by the fused operator that has a form for tensors without data."""
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        kept, hidden = (torch.full((), value, dtype=q.dtype, device=q.device) for value in (0.0, -math.inf))
        mask = torch.where(mask, kept, hidden)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: torch.Tensor = fused(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return out
