"""The custom operator kernelwright::merged: products of one matrix with several weights, as one wider product.

Weights that lie side by side are read where they are, so nothing is copied and changes in place are seen; whether they
do is looked at in every call, and others are copied together first: slower, never wrong. Many rows may be worth the
copy, so that only those that lay side by side when the graph was compiled (`beside`) are warned of.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from kernelwright.compiler import side_by_side
from kernelwright.compiler.kernel_call import CALL, Form, written_forms
from kernelwright.types import Workload

_log = logging.getLogger(__name__)
_warned: list[bool] = []


def _columns(weights: list[torch.Tensor], workload: str) -> int:
    columns = sum(weight.shape[1] for weight in weights)
    return columns // 2 if "swiglu" in Workload.from_json(json.loads(workload)).epilogue else columns


def _operands(
    weights: list[torch.Tensor], biases: list[torch.Tensor], beside: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if beside and not _warned and not side_by_side.beside(weights):
        _warned.append(True)
        _log.warning("weights of a merged product no longer lie side by side, so that every call copies them")
    return side_by_side.joined(weights), torch.cat(biases) if biases else None


def _compute(
    a: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], workload: str, schedule: str, beside: bool
) -> torch.Tensor:
    wide, bias = _operands(weights, biases, beside)
    if not schedule:
        return torch.mm(a, wide) if bias is None else torch.addmm(bias, a, wide)
    out = Form((a.shape[0], _columns(weights, workload)), (_columns(weights, workload), 1), a.dtype)
    names = "a,b" if bias is None else "a,b,bias"
    (result,) = CALL([a, wide] if bias is None else [a, wide, bias], names, workload, schedule, written_forms([out]))
    return result  # type: ignore[no-any-return]


def _shape_only(
    a: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], workload: str, schedule: str, beside: bool
) -> torch.Tensor:
    return a.new_empty((a.shape[0], _columns(weights, workload)))


def _defined() -> Any:
    library: Any = torch.library.Library("kernelwright", "FRAGMENT")
    library.define(
        "merged(Tensor a, Tensor[] weights, Tensor[] biases, str workload, str schedule, bool beside) -> Tensor",
        tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
    )
    for backend in ("CUDA", "CPU"):
        library.impl("merged", _compute, backend)
    torch.library.register_fake("kernelwright::merged", _shape_only, lib=library)
    return library


LIBRARY = _defined()
"""Keeps the operator registered as long as this module lives."""

MERGED = torch.ops.kernelwright.merged.default
"""The operator, as it stands in graphs."""
