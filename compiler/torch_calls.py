"""Workloads by torch's own operators: where no kernel of ours can run, and on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as functional

from kernelwright.kernels.attention import workload as attention
from kernelwright.kernels.conv2d import reference as conv2d_reference
from kernelwright.kernels.conv2d import workload as conv2d
from kernelwright.kernels.matmul import reference as matmul_reference
from kernelwright.types import Workload

Operands = Mapping[str, torch.Tensor]


def compute(workload: Workload, operands: Operands) -> list[torch.Tensor]:
    """The results of a workload, in the operands' own precision."""
    return _BY_OPERATOR[workload.operator](workload, operands)


def _widened(operands: Operands, names: set[str]) -> dict[str, torch.Tensor]:
    """16-bit operands of an epilogue in fp32, in which kernels compute it."""
    return {name: tensor.float() for name, tensor in operands.items() if name not in names}


def _matmul(workload: Workload, operands: Operands) -> list[torch.Tensor]:
    a, b = operands["a"], operands["b"]
    product = torch.matmul(a, b)
    if not workload.epilogue:
        return [product]
    rest = _widened(operands, {"a", "b"})
    return [matmul_reference.finished(product.float(), rest, workload.epilogue).to(a.dtype)]


def _conv2d(workload: Workload, operands: Operands) -> list[torch.Tensor]:
    p = conv2d.problem_of(workload)
    rest = (p.stride, p.padding, p.dilation)
    if p.direction != "forward":
        return [_conv2d_gradient(p, operands)]
    x, w = operands["x"], operands["w"]
    if p.transposed:
        out = functional.conv_transpose2d(
            x, w, None, p.stride, p.padding, p.output_padding, p.groups, dilation=p.dilation
        )
    else:
        out = functional.conv2d(x, w, None, *rest, p.groups)
    if not p.epilogue:
        return [out]
    return [conv2d_reference.finished(out.float(), _widened(operands, {"x", "w"}), p.epilogue).to(x.dtype)]


def _conv2d_gradient(p: conv2d.Problem, operands: Operands) -> torch.Tensor:
    d_out = operands["d_out"]
    place = 0 if p.direction == "input_gradient" else 1
    given = [operands.get("x"), operands.get("w")]
    missing = torch.empty_strided(
        p.shapes[p.result], p.layouts[p.result].strides, dtype=d_out.dtype, device=d_out.device
    )
    x, w = (missing if tensor is None else tensor for tensor in given)
    mask = [place == which for which in range(3)]
    found = torch.ops.aten.convolution_backward(
        d_out, x, w, None, list(p.stride), list(p.padding), list(p.dilation), False, [0, 0], p.groups, mask
    )
    gradient: torch.Tensor = found[place]
    return gradient


def _attention(workload: Workload, operands: Operands) -> list[torch.Tensor]:
    p = attention.problem_of(workload)
    if p.backward:
        return _attention_backward(p, operands)
    if not p.lse:
        mask = _hidden(p, operands)
        q, k, v = (operands[name] for name in ("q", "k", "v"))
        return [functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=p.scale, enable_gqa=p.group > 1)]
    outs, logs = zip(*(_attention_of(p, _part(operands, batch)) for batch in range(p.batch)), strict=True)
    return [torch.stack(outs).to(operands["q"].dtype), torch.stack(logs)]


def _part(operands: Operands, batch: int) -> dict[str, torch.Tensor]:
    """The operands of one batch entry, so that its scores alone lie in memory."""
    return {name: tensor[batch] for name, tensor in operands.items()}


def _hidden(p: attention.Problem, operands: Operands) -> torch.Tensor | None:
    """All that hides keys, or adds to scores, as one mask of torch's."""
    mask = operands.get("mask")
    if not p.causal:
        return mask
    shift = 0 if p.causal == "top_left" else p.kv_length - p.q_length
    seen = torch.ones(p.q_length, p.kv_length, dtype=torch.bool, device=operands["q"].device).tril(shift)
    if mask is None:
        return seen
    return seen & mask if p.mask == "bool" else mask.masked_fill(~seen, float("-inf"))


def _scores(p: attention.Problem, part: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scores [Hq, Sq, Skv], k, v) of one batch entry in fp32, keys and values once for each query head."""
    k, v = (part[name].float().repeat_interleave(p.group, 0) for name in ("k", "v"))
    scores = part["q"].float() @ k.transpose(1, 2) * p.scale
    mask = _hidden(p, part)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return scores, k, v


def _attention_of(p: attention.Problem, part: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    scores, _, v = _scores(p, part)
    logs = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - logs.nan_to_num(neginf=0.0).unsqueeze(-1))
    return weights @ v, logs


def _attention_backward(p: attention.Problem, operands: Operands) -> list[torch.Tensor]:
    found = [_gradients_of(p, _part(operands, batch)) for batch in range(p.batch)]
    return [torch.stack(parts).to(operands["q"].dtype) for parts in zip(*found, strict=True)]


def _gradients_of(p: attention.Problem, part: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores, k, v = _scores(p, part)
    d_out, out, logs = part["d_out"].float(), part["out"].float(), part["lse"]
    weights = torch.exp(scores - logs.nan_to_num(neginf=0.0).unsqueeze(-1))
    d_weights = d_out @ v.transpose(1, 2)
    d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdim=True)) * p.scale
    dk, dv = d_scores.transpose(1, 2) @ part["q"].float(), weights.transpose(1, 2) @ d_out
    return d_scores @ k, *(x.unflatten(0, (p.kv_heads, p.group)).sum(1) for x in (dk, dv))


_BY_OPERATOR: Mapping[str, Callable[[Workload, Operands], list[torch.Tensor]]] = {
    "matmul": _matmul,
    "conv2d": _conv2d,
    "attention": _attention,
}
