"""How an attention is written as a Workload: dims B, Hq, Hkv, Sq, Skv, D (of q and k) and Dv (of v and out).

q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], out [B, Hq, Sq, Dv]; query head h reads key head
h // (Hq / Hkv). Two other forms: "page" among the dims makes the cache paged (k [pages, page, Hkv, D], v likewise,
`block_table` int32 [B, ceil(Skv / page)], `lengths` int32 [B]); "T" and "Tk" make lengths vary (q [T, Hq, D], k
[Tk, Hkv, D], v likewise, out [T, Hq, Dv], `cu_q` and `cu_k` int32 [B + 1]), and Sq and Skv are then the longest.

layouts of q, k, v, out: "bhsd" or "bshd" (dense memory behind the view), "thd" packed, "paged", or
"strided:sb,sh,ss,sd" with one stride in elements for each dimension of the view, 0 where it repeats; "+1" behind any
of them says by how many elements the base misses 16 bytes. With the attribute kv_shared v is the first Dv columns of k,
and its layout reads "shared".

attributes, all optional:
  causal      "top_left" (key j visible to query i if j <= i) or "bottom_right" (j <= i + Skv - Sq)
  window      w: of these, keys j > i' - w; i' is the query's aligned place, bottom right unless causal says top left
  softcap     c: scores s become c * tanh(s / c), before masks
  scale       of the scores, D ** -0.5 by default
  mask        "bool" (true: visible) or "additive" (in q's type), with mask_dims: the letters of b, h, q, k that it has,
              in the order in which they lie in memory ("qkh": heads innermost); all others repeat
  alibi       `alibi` fp32 [Hq] holds slopes: -slope * |i' - j| is added
  sinks       `sinks` fp32 [Hq] holds a score a head that counts in the softmax's denominator alone
  lse         the logarithm of the denominator is a second result, fp32 [B, Hq, Sq], packed [Hq, T]
  scaling     "tensor": fp8 operands, fp32 numbers q_scale, k_scale and v_scale
  direction   "backward": from out, lse and d_out to dq, dk, dv, and d_mask with mask_gradient
  deterministic  a fixed order of sums

A query without a visible key gives zeros, and -inf as its logarithm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.attention.layout import Layout, parse_layout
from kernelwright.kernels.precision import allowed
from kernelwright.types import DTYPES, FrozenMap, Scalar, Workload

FLOATS = ("fp16", "bf16", "fp32")

FP8 = ("fp8e4m3", "fp8e5m2")

CAUSAL = ("top_left", "bottom_right")

MASKS = ("bool", "additive")

TENSORS = ("q", "k", "v", "out")

_SWITCHES = ("alibi", "sinks", "lse", "deterministic", "mask_gradient", "kv_shared")

_ATTRIBUTES = ("causal", "window", "softcap", "scale", "mask", "mask_dims", "scaling", "direction", *_SWITCHES)

_DIMS = ("B", "Hq", "Hkv", "Sq", "Skv", "D", "Dv")

_SIZES = ("batch", "heads", "kv_heads", "q_length", "kv_length", "head_dim", "v_dim")


@dataclasses.dataclass(frozen=True)
class Problem:
    """An attention workload taken apart; `problem_of` makes it.

    page: tokens of a page, 0 for a cache that is not paged. total_q, total_k: tokens of packed sequences, 0 for others.
    window, softcap: 0 for none. causal, mask: "" for none.
    """

    batch: int
    heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    v_dim: int
    q: Layout
    k: Layout
    v: Layout
    out: Layout
    dtype: str
    out_dtype: str
    scale: float
    packed: bool = False
    total_q: int = 0
    total_k: int = 0
    page: int = 0
    causal: str = ""
    window: int = 0
    softcap: float = 0.0
    mask: str = ""
    mask_dims: str = ""
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    backward: bool = False
    deterministic: bool = False
    mask_gradient: bool = False
    kv_shared: bool = False
    scaling: str = ""

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.kv_length // self.page) if self.page else 0

    def aligned(self, tensor: str) -> bool:
        """Whether the bulk copy engine can read or write "q", "k", "v" or "out"."""
        layout: Layout = getattr(self, tensor)
        return layout.aligned(DTYPES[self.out_dtype if tensor == "out" else self.dtype])


def attention_workload(
    batch: int,
    heads: int,
    q_length: int,
    kv_length: int,
    head_dim: int,
    dtype: str = "bf16",
    *,
    kv_heads: int | None = None,
    v_dim: int | None = None,
    layout: str | Mapping[str, str] = "",
    page: int | None = None,
    packed: tuple[int, int] | None = None,
    out_dtype: str | None = None,
    error_budget: float | None = None,
    **attributes: Scalar | None,
) -> Workload:
    """The workload of these sizes; raises InvalidWorkload for what an attention cannot be.

    layout: of all tensors, or by tensor; dense "bhsd", "thd" or "paged" where it says nothing. packed: total tokens of
    q and of k. attributes: as in the module's docstring; those that are None or False are left out.
    """
    dims = dict(zip(_DIMS, (batch, heads, kv_heads or heads, q_length, kv_length, head_dim, 0), strict=True))
    dims["Dv"] = head_dim if v_dim is None else v_dim
    dims |= {"page": page} if page is not None else {}
    dims |= dict(zip(("T", "Tk"), packed, strict=True)) if packed is not None else {}
    given = {name: value for name, value in attributes.items() if value is not None and value is not False}
    cache = "thd" if packed is not None else "paged" if page is not None else "bhsd"
    layouts = dict.fromkeys(TENSORS, "thd" if packed is not None else "bhsd") | {"k": cache, "v": cache}
    layouts |= {"v": "shared"} if given.get("kv_shared") else {}
    if isinstance(layout, str):
        chosen = {name: layout for name in TENSORS if layout and layouts[name] == "bhsd"}
    else:
        chosen = dict(layout)
    try:
        workload = Workload(
            "attention",
            FrozenMap(dims),
            FrozenMap(
                {**dict.fromkeys(("q", "k", "v"), dtype), "out": out_dtype or (dtype if dtype in FLOATS else "bf16")}
            ),
            FrozenMap({**layouts, **chosen}),
            (),
            FrozenMap(given),
            error_budget,
        )
    except ValueError as error:
        raise InvalidWorkload(str(error)) from error
    problem_of(workload)
    return workload


def problem_of(workload: Workload) -> Problem:
    """Take an attention workload apart; raises InvalidWorkload or UnsupportedDtype with what was wanted."""
    _check_names(workload)
    _check_attributes(workload.attributes)
    _check_types(workload)
    _check_dims(workload)
    dims, attributes = workload.dims, workload.attributes
    switches = {name: bool(attributes.get(name, False)) for name in _SWITCHES}
    fields: dict[str, Any] = {
        **dict(zip(_SIZES, (dims[name] for name in _DIMS), strict=True)),
        **_layouts(workload, switches["kv_shared"]),
        **switches,
        "dtype": workload.dtypes["q"],
        "out_dtype": workload.dtypes["out"],
        "scale": float(attributes.get("scale", max(dims["D"], 1) ** -0.5)),
        "packed": "T" in dims,
        "total_q": dims.get("T", 0),
        "total_k": dims.get("Tk", 0),
        "page": dims.get("page", 0),
        "causal": str(attributes.get("causal", "")),
        "window": int(attributes.get("window", 0)),
        "softcap": float(attributes.get("softcap", 0.0)),
        "mask": str(attributes.get("mask", "")),
        "mask_dims": str(attributes.get("mask_dims", "bhqk")) if "mask" in attributes else "",
        "backward": attributes.get("direction") == "backward",
        "scaling": str(attributes.get("scaling", "")),
    }
    problem = Problem(**fields)
    _check_combinations(problem)
    return problem


def _layouts(workload: Workload, shared: bool) -> dict[str, Layout]:
    d = workload.dims
    if "T" in d:
        form = cache = "thd"
        shapes = {"q": (d["T"], d["Hq"], d["D"]), "out": (d["T"], d["Hq"], d["Dv"])}
        shapes |= {"k": (d["Tk"], d["Hkv"], d["D"]), "v": (d["Tk"], d["Hkv"], d["Dv"])}
    else:
        form = cache = "bhsd"
        shapes = {"q": (d["B"], d["Hq"], d["Sq"], d["D"]), "out": (d["B"], d["Hq"], d["Sq"], d["Dv"])}  # type: ignore[dict-item]
        keys = (d["B"], d["Hkv"], d["Skv"])
        if "page" in d:
            cache, keys = "paged", (d["B"] * -(-d["Skv"] // d["page"]) + 1, d["page"], d["Hkv"])
        shapes |= {"k": (*keys, d["D"]), "v": (*keys, d["Dv"])}  # type: ignore[dict-item]
    found = {
        name: parse_layout(name, text, shapes[name], cache if name in ("k", "v") else form)
        for name, text in workload.layouts.items()
        if not (shared and name == "v")
    }
    if shared:
        if workload.layouts["v"] != "shared":
            raise InvalidWorkload(f"with kv_shared the layout of v must be shared, got {workload.layouts['v']!r}")
        found["v"] = dataclasses.replace(found["k"], shape=shapes["v"], dense=False)
    return found


def _check_names(workload: Workload) -> None:
    if workload.operator != "attention":
        raise InvalidWorkload(f"operator must be 'attention', got {workload.operator!r}")
    if workload.epilogue:
        raise InvalidWorkload(f"attention has no epilogue, got {', '.join(workload.epilogue)}")
    known: Mapping[str, tuple[set[str], set[str]]] = {
        "dims": (set(_DIMS), {"page", "T", "Tk"}),
        "dtypes": (set(TENSORS), set()),
        "layouts": (set(TENSORS), set()),
        "attributes": (set(), set(_ATTRIBUTES)),
    }
    for field, (needed, optional) in known.items():
        got = set(getattr(workload, field))
        if not needed <= got <= needed | optional:
            want = ", ".join(sorted(needed)) or "none"
            also = f" (and {', '.join(sorted(optional))} at will)" if optional else ""
            raise InvalidWorkload(f"attention {field} must be {want}{also}, got {', '.join(sorted(got)) or 'none'}")


def _check_attributes(attributes: Mapping[str, Scalar]) -> None:
    choices: Mapping[str, tuple[Any, ...]] = {
        "causal": CAUSAL,
        "mask": MASKS,
        "scaling": ("tensor",),
        "direction": ("forward", "backward"),
        **dict.fromkeys(_SWITCHES, (True, False)),
    }
    for name, allowed_values in choices.items():
        value = attributes.get(name, allowed_values[0])
        if value not in allowed_values:
            raise InvalidWorkload(f"{name} must be one of {', '.join(map(str, allowed_values))}, got {value!r}")
    for name in ("window", "softcap", "scale"):
        value = attributes.get(name, 1)
        number = isinstance(value, int if name == "window" else int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(float(value)) or (float(value) <= 0 and name != "scale"):
            kind = (
                "a whole number above 0" if name == "window" else "a number above 0" if name == "softcap" else "finite"
            )
            raise InvalidWorkload(f"{name} must be {kind}, got {value!r}")
    letters = str(attributes.get("mask_dims", "k"))
    if ("mask_dims" in attributes and "mask" not in attributes) or not letters:
        raise InvalidWorkload("mask_dims needs a mask, and at least one dimension")
    if set(letters) - set("bhqk") or len(set(letters)) != len(letters):
        raise InvalidWorkload(f"mask_dims must be some of the letters b, h, q, k, each once, got {letters!r}")


def _check_types(workload: Workload) -> None:
    q, k, v, out = (workload.dtypes[name] for name in TENSORS)
    scaling = workload.attributes.get("scaling", "")
    types = FP8 if scaling else FLOATS
    if q not in types:
        hint = "" if scaling else "; fp8 operands need the attribute scaling"
        raise UnsupportedDtype(f"attention computes {', '.join(types)}; dtype of q is {q!r}{hint}")
    if not q == k == v:
        raise UnsupportedDtype(f"q, k and v must have one dtype, got {q}, {k} and {v}; cast them first")
    if out not in (("fp16", "bf16") if scaling else (q,)):
        raise UnsupportedDtype(f"out must be {'fp16 or bf16' if scaling else q}, got {out!r}")
    if not allowed(q, q, out, workload.error_budget):
        raise InvalidWorkload(
            f"no way to compute {out} from {q} operands keeps within an error of {workload.error_budget:g}; "
            "allow a larger error_budget"
        )


def _check_dims(workload: Workload) -> None:
    dims = workload.dims
    if not dims["D"] or not dims["Dv"]:
        raise InvalidWorkload(f"D and Dv must be at least 1, got {dims['D']} and {dims['Dv']}")
    if not dims["Hkv"] or dims["Hq"] % dims["Hkv"]:
        raise InvalidWorkload(f"Hq must be a multiple of Hkv, got {dims['Hq']} and {dims['Hkv']}")
    if ("T" in dims) != ("Tk" in dims):
        raise InvalidWorkload("packed lengths need both T and Tk, the tokens of q and of k")
    if "T" in dims and "page" in dims:
        raise InvalidWorkload("a cache is either packed (T, Tk) or paged (page), not both")
    if dims.get("page") == 0:
        raise InvalidWorkload("page must be at least 1 token")
    for total, longest in (("T", "Sq"), ("Tk", "Skv")):
        if total in dims and not dims[longest] <= dims[total] <= dims[longest] * dims["B"]:
            raise InvalidWorkload(
                f"{total} must lie between {longest}={dims[longest]}, the longest sequence, and B times that, "
                f"got {dims[total]}"
            )


def _check_combinations(p: Problem) -> None:
    if p.packed and p.mask:
        raise InvalidWorkload("packed sequences take no mask tensor; use causal, window or alibi")
    if p.backward and (p.page or p.scaling or p.lse):
        raise InvalidWorkload("a backward has no paged cache, no fp8 operands and no lse of its own")
    if p.mask_gradient and not (p.backward and p.mask == "additive"):
        raise InvalidWorkload("mask_gradient needs direction backward and an additive mask")
    if p.kv_shared and (p.v_dim > p.head_dim or p.backward):
        raise InvalidWorkload("kv_shared is for forwards in which v is the first Dv <= D columns of k")
