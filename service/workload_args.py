"""A workload as people type it (shape, dtype, layout, epilogue), read alike on the command line and in the API."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kernelwright.errors import InvalidWorkload, KernelwrightError
from kernelwright.kernels import get_operator
from kernelwright.kernels.matmul.workload import FLOATS, LAYOUTS, matmul_workload
from kernelwright.service.operator_forms import (
    ATTENTION_DIMS,
    ATTENTION_LAYOUTS,
    ATTENTION_MORE,
    CONV2D_DIMS,
    CONV2D_LAYOUTS,
    attention_fields,
    attention_of,
    conv2d_fields,
    conv2d_of,
    own_attributes,
)
from kernelwright.types import FrozenMap, Scalar, Workload

MAX_DIM = 2**31 - 1
"""Largest size of one dimension: kernels index with 32 bits."""


@dataclasses.dataclass(frozen=True)
class WorkloadArgs:
    """What was typed. `dims` are sizes by name, `dtype` as in `parse_dtype`, `layout` one of the operator's (the first
    where none was typed), `attributes` the operator's own; the rest is as in `matmul_workload`."""

    operator: str
    dims: Mapping[str, int]
    dtype: str = "bf16"
    layout: str = ""
    epilogue: tuple[str, ...] = ()
    out_dtype: str | None = None
    error_budget: float | None = None
    attributes: Mapping[str, Scalar] = FrozenMap()

    def __post_init__(self) -> None:
        if not self.layout and self.operator in FORMS:
            object.__setattr__(self, "layout", next(iter(FORMS[self.operator].layouts)))

    def query(self) -> dict[str, str]:
        """Query parameters that ask the service for this workload; defaults are left out."""
        out = {"operator": self.operator, "shape": format_shape(self.dims), "dtype": self.dtype, "layout": self.layout}
        if self.epilogue:
            out["epilogue"] = ",".join(self.epilogue)
        if self.out_dtype is not None:
            out["out_dtype"] = self.out_dtype
        if self.error_budget is not None:
            out["error_budget"] = repr(self.error_budget)
        if self.attributes:
            out["attributes"] = format_attributes(self.attributes)
        return out

    def workload(self) -> Workload:
        """The checked workload; UnknownOperator, InvalidWorkload or UnsupportedDtype say what is wrong."""
        get_operator(self.operator)
        form = FORMS[self.operator]
        check_dims(self.operator, form.dims, self.dims, form.optional_dims)
        return form.build(self)


@dataclasses.dataclass(frozen=True)
class Form:
    """How an operator's workload is typed: the names of its dimensions, those that may be left out, its layouts, the
    usual one first, with what each means for the tensors, the builder, which raises what the operator's `validate`
    does, and the way back (`args_of`)."""

    dims: tuple[str, ...]
    optional_dims: tuple[str, ...]
    layouts: Mapping[str, Mapping[str, str]]
    build: Callable[[WorkloadArgs], Workload]
    args_of: Callable[[Workload], WorkloadArgs | None]


def parse_dtype(text: str) -> tuple[str, str | None, str]:
    """(type of a, of b where it is another, scaling) from "bf16", "fp8e4m3/row" or "bf16*int4/group:128"."""
    types, _, scaling = text.partition("/")
    a, star, b = types.partition("*")
    if star and not b:
        raise InvalidWorkload(
            f"dtype must read A, A*B, A/SCALING or A*B/SCALING, such as bf16*int4/group:128, got {text!r}"
        )
    return a, b or None, scaling


def _matmul(args: WorkloadArgs) -> Workload:
    dtype, b_dtype, scaling = parse_dtype(args.dtype)
    return matmul_workload(
        args.dims["M"],
        args.dims["N"],
        args.dims["K"],
        dtype=dtype,
        b_dtype=b_dtype,
        scaling=scaling,
        batch=args.dims.get("B"),
        groups=args.dims.get("G"),
        layout=args.layout,
        epilogue=args.epilogue,
        out_dtype=args.out_dtype,
        error_budget=args.error_budget,
        attributes=own_attributes(args, {"deterministic": bool, "workspace_bytes": int}),
    )


def _matmul_args(workload: Workload) -> WorkloadArgs | None:
    kind = _matmul_kind(
        tuple(name for name in ("B", "G") if name in workload.dims),
        workload.dtypes,
        workload.layouts,
        workload.epilogue,
        workload.attributes,
        workload.error_budget,
    )
    dims = {name: workload.dims[name] for name in ("M", "N", "K", "B", "G") if name in workload.dims}
    return None if kind is None else dataclasses.replace(kind, dims=dims)


@functools.lru_cache(maxsize=1024)
def _matmul_kind(
    more_dims: tuple[str, ...],
    dtypes: FrozenMap[str],
    layouts: FrozenMap[str],
    epilogue: tuple[str, ...],
    attributes: FrozenMap[Scalar],
    error_budget: float | None,
) -> WorkloadArgs | None:
    """What to type for a workload of any size; whether it can be typed does not depend on the size."""
    letters = next((name for name, pair in LAYOUTS.items() if pair == (layouts["a"], layouts["b"])), None)
    if letters is None:
        return None
    scaling = str(attributes.get("scaling", ""))
    dtype, out_dtype = dtypes["a"], dtypes["out"]
    usual = dtype if dtype in FLOATS else "bf16"
    text = dtype + (f"*{dtypes['b']}" if dtypes["b"] != dtype else "") + (f"/{scaling}" if scaling else "")
    # whole groups of scales along K
    dims = {"M": 16, "N": 16, "K": 128, **dict.fromkeys(more_dims, 2)}
    typed = FrozenMap({name: value for name, value in attributes.items() if name != "scaling"})
    args = WorkloadArgs(
        "matmul", dims, text, letters, epilogue, None if out_dtype == usual else out_dtype, error_budget, typed
    )
    wanted = Workload("matmul", FrozenMap(dims), dtypes, layouts, epilogue, attributes, error_budget)
    try:
        return args if _matmul(args) == wanted else None
    except InvalidWorkload:
        return None


_MATMUL_LAYOUTS = {name: dict(zip(("a", "b"), pair, strict=True)) for name, pair in LAYOUTS.items()}


def _back(operator: str, fields: Callable[[Workload], dict[str, Any]]) -> Callable[[Workload], WorkloadArgs | None]:
    """The way back of an operator whose `fields` are what would have to be typed, if that can be typed at all."""

    def args_of_workload(workload: Workload) -> WorkloadArgs | None:
        try:
            args = WorkloadArgs(operator, error_budget=workload.error_budget, **fields(workload))
            return args if args.workload() == workload else None
        except KernelwrightError:
            return None

    return args_of_workload


FORMS: dict[str, Form] = {
    "matmul": Form(("M", "N", "K"), ("B", "G"), _MATMUL_LAYOUTS, _matmul, _matmul_args),
    "attention": Form(
        ATTENTION_DIMS, ATTENTION_MORE, ATTENTION_LAYOUTS, attention_of, _back("attention", attention_fields)
    ),
    "conv2d": Form(CONV2D_DIMS, (), CONV2D_LAYOUTS, conv2d_of, _back("conv2d", conv2d_fields)),
}
"""The form of every operator by name."""


def args_of(workload: Workload) -> WorkloadArgs | None:
    """What to type to get this workload; None for one that cannot be typed, such as rows that are not dense."""
    form = FORMS.get(workload.operator)
    return form.args_of(workload) if form else None


def check_dims(
    operator: str, wanted: tuple[str, ...], given: Mapping[str, int], optional: tuple[str, ...] = ()
) -> None:
    """Raise InvalidWorkload unless the wanted dimensions are given and no others but optional ones, each from 1 to
    MAX_DIM."""
    if not set(wanted) <= set(given) <= {*wanted, *optional}:
        also = f" (and {', '.join(optional)} at will)" if optional else ""
        raise InvalidWorkload(
            f"shape of {operator} must give {', '.join(wanted)}{also}, got {format_shape(given) or 'nothing'}; "
            f"try {','.join(f'{name}=1024' for name in wanted)}"
        )
    for name, size in given.items():
        if not 1 <= size <= MAX_DIM:
            raise InvalidWorkload(f"dimension {name} must lie between 1 and {MAX_DIM}, got {size}")


def format_shape(dims: Mapping[str, int]) -> str:
    """The text "M=2048,N=4096,K=4096", which `parse_shape` reads."""
    return ",".join(f"{name}={size}" for name, size in dims.items())


def parse_shape(text: str) -> dict[str, int]:
    """Sizes by name from "M=2048,N=4096,K=4096"; InvalidWorkload when it reads otherwise."""
    dims: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not name.strip():
            raise InvalidWorkload(f"shape must read NAME=SIZE,NAME=SIZE such as M=2048,N=4096,K=4096, got {text!r}")
        add_dim(dims, name.strip(), size)
    return dims


def add_dim(dims: dict[str, int], name: str, size: str) -> None:
    """Add one size; InvalidWorkload when it is no whole number or was given already."""
    text = size.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidWorkload(f"dimension {name} must be a whole number of 1 or more, got {size[:40]!r}")
    if name in dims:
        raise InvalidWorkload(f"dimension {name} must be given once, got {dims[name]} and {text}")
    dims[name] = int(text)


def parse_attributes(text: str) -> dict[str, Scalar]:
    """Attributes by name from "causal=bottom_right,window=4096"; a name alone is true. InvalidWorkload for a name that
    is missing or comes twice."""
    found: dict[str, Scalar] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not name or (equals and not value):
            raise InvalidWorkload(f"attributes must read NAME=VALUE,NAME=VALUE such as window=4096, got {text!r}")
        if name in found:
            raise InvalidWorkload(f"attribute {name} must be given once, got {found[name]!r} and {value!r}")
        found[name] = _scalar(value) if equals else True
    return found


def format_attributes(attributes: Mapping[str, Scalar]) -> str:
    """The text that `parse_attributes` reads."""
    return ",".join(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in attributes.items())


def _scalar(text: str) -> Scalar:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    number = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text)
    return float(text) if number and math.isfinite(float(text)) else text


def parse_epilogue(text: str | Iterable[str] | None) -> tuple[str, ...]:
    """Steps from "bias,gelu" or a list of such texts; empty for None, "" and "none"."""
    if text is None:
        return ()
    parts = text.split(",") if isinstance(text, str) else [step for item in text for step in item.split(",")]
    return tuple(step for step in (part.strip() for part in parts) if step and step != "none")
