"""From the tensors and options of one call of attention to the Workload that the records are filed under."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from kernelwright.compiler.operands import DETERMINISTIC, DTYPE_NAMES, fp32_error_budget, sums_in_order
from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.attention.layout import dense_strides
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.types import Workload

ALIGNMENT = 16
"""Bytes to which the bulk copy engine needs the addresses of operands aligned."""

TensorForm = tuple[str, torch.Size, tuple[int, ...], torch.dtype, int]
"""Name, sizes, strides, type, and by how many elements the address misses ALIGNMENT."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What an attention is told besides tensors; the names are those of a workload's attributes, with "", 0 and None
    where there is none. longest_q, longest_k: of packed sequences."""

    causal: str = ""
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    longest_q: int = 0
    longest_k: int = 0
    lse: bool = False


@dataclasses.dataclass(frozen=True)
class Form:
    """All of a call but its numbers: equal forms have equal workloads."""

    tensors: tuple[TensorForm, ...]
    options: Options
    kv_shared: bool
    mask_gradient: bool = False
    deterministic: bool = False

    def meta(self) -> dict[str, torch.Tensor]:
        """Tensors like those of the call, without memory."""
        return {
            name: torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
            for name, sizes, strides, dtype, _ in self.tensors
        }

    def workload(self, *, backward: bool = False) -> Workload:
        """The workload of the forward, or of the backward; InvalidWorkload or UnsupportedDtype where there is none."""
        tensors = self.meta()
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        _check(q, k, v)
        paged, shared = "block_table" in tensors, self.kv_shared and not backward
        layouts = {name: self._layout(name, tensors[name]) for name in (("q", "k") if shared else ("q", "k", "v"))}
        return attention_workload(
            *self._sizes(tensors),
            _dtype_name(q.dtype),
            kv_heads=k.shape[2 if paged else 1],
            v_dim=v.shape[-1],
            layout=layouts | {"out": out_layout(q)} | ({"v": "shared"} if shared else {}),
            page=k.shape[1] if paged else None,
            packed=(q.shape[0], k.shape[0]) if q.dim() == 3 else None,
            error_budget=fp32_error_budget(q.dtype),
            **self._attributes(tensors, backward),
        )

    def _sizes(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int, int, int, int]:
        """B, Hq, Sq, Skv and D."""
        q, k, table, options = tensors["q"], tensors["k"], tensors.get("block_table"), self.options
        if q.dim() == 3:
            return tensors["cu_q"].shape[0] - 1, q.shape[1], options.longest_q, options.longest_k, q.shape[2]
        keys = k.shape[2] if table is None else options.longest_k or table.shape[1] * k.shape[1]
        return q.shape[0], q.shape[1], q.shape[2], keys, q.shape[3]

    def _attributes(self, tensors: Mapping[str, torch.Tensor], backward: bool) -> dict[str, Any]:
        options, mask = self.options, tensors.get("mask")
        found: dict[str, Any] = {
            "causal": options.causal or None,
            "window": options.window or None,
            "softcap": options.softcap or None,
            "scale": options.scale,
            "alibi": "alibi" in tensors,
            "sinks": "sinks" in tensors,
            "kv_shared": self.kv_shared and not backward,
            DETERMINISTIC: self.deterministic,
        }
        if mask is not None:
            found["mask"] = "bool" if mask.dtype is torch.bool else "additive"
            found["mask_dims"] = mask_letters(mask, every=self.mask_gradient and backward)
        own = {"direction": "backward", "mask_gradient": self.mask_gradient} if backward else {"lse": options.lse}
        return found | own

    def _layout(self, name: str, tensor: torch.Tensor) -> str:
        offset = next(form[4] for form in self.tensors if form[0] == name)
        return layout_of(tensor, paged=name != "q" and self._paged) + (f"+{offset}" if offset else "")

    @property
    def _paged(self) -> bool:
        return any(form[0] == "block_table" for form in self.tensors)


def form_of(inputs: Mapping[str, torch.Tensor], options: Options, *, mask_gradient: bool = False) -> Form:
    """The form of a call with these operands, by their names in a workload."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    shared = (
        v.data_ptr() == k.data_ptr()
        and v.stride() == k.stride()
        and v.shape[:-1] == k.shape[:-1]
        and v.shape[-1] <= k.shape[-1]
        and q.shape[-1] == k.shape[-1]
    )
    forms = tuple(
        (name, x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT // x.element_size()) for name, x in inputs.items()
    )
    return Form(forms, options, shared, mask_gradient, bool(sums_in_order()))


def out_layout(q: torch.Tensor) -> str:
    """Where a result lies: as q does where that is dense, otherwise tokens first."""
    if q.dim() == 3:
        return "thd"
    return "bhsd" if q.is_contiguous() else "bshd"


def empty_like(x: torch.Tensor, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor for a result or gradient in the place of x, with heads of `width` numbers."""
    if x.dim() == 4 and out_layout(x) == "bshd":
        batch, heads, length, _ = x.shape
        return x.new_empty((batch, length, heads, width), dtype=dtype).transpose(1, 2)
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


def layout_of(tensor: torch.Tensor, *, paged: bool = False) -> str:
    """The layout of q, k or v as text."""
    shape = tensor.shape
    forms: dict[str, tuple[int, ...] | None] = {"bhsd": None, "bshd": (0, 2, 1, 3)}
    forms = {"paged": None} if paged else forms if tensor.dim() == 4 else {"thd": None}
    for name, order in forms.items():
        pairs = zip(shape, tensor.stride(), dense_strides(shape, order), strict=True)
        if all(size <= 1 or got == want for size, got, want in pairs):
            return name
    return f"strided:{','.join(map(str, tensor.stride()))}"


def mask_letters(mask: torch.Tensor, *, every: bool = False) -> str:
    """The letters of the dimensions that a mask [B, Hq, Sq, Skv] has, the outermost in memory first; all others repeat.

    every: those too that repeat in memory alone, since each of their places has a gradient.
    """
    strides = mask.stride()
    there = [place for place in range(4) if mask.shape[place] > 1 and (every or strides[place])]
    return "".join("bhqk"[place] for place in sorted(there, key=lambda place: -strides[place])) or "k"


def _dtype_name(dtype: torch.dtype) -> str:
    # Torch computes fp64, which no kernel of ours does; its workload only says what is to be computed.
    names = DTYPE_NAMES | {torch.float64: "fp32"}
    if dtype not in names:
        raise UnsupportedDtype(f"q, k and v must be one of {', '.join(DTYPE_NAMES.values())}, got {dtype}")
    return names[dtype]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise UnsupportedDtype(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.dim() not in (3, 4) or k.dim() != v.dim():
        raise InvalidWorkload(
            "q, k and v must be [batch, heads, length, head_dim], or [tokens, heads, head_dim] with cu_q and cu_k, got "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise InvalidWorkload(
            "k must have the head_dim of q, and v the heads and length of k, got "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
