"""How workloads of convolution and attention are typed, and what to type for a given one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelwright.errors import InvalidWorkload
from kernelwright.kernels.attention.workload import FLOATS as ATTENTION_FLOATS
from kernelwright.kernels.attention.workload import TENSORS, attention_workload
from kernelwright.kernels.conv2d.workload import FLOATS as CONV2D_FLOATS
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.types import FrozenMap, Scalar, Workload

if TYPE_CHECKING:
    from kernelwright.service.workload_args import WorkloadArgs

ATTENTION_DIMS, ATTENTION_MORE = ("B", "Hq", "Sq", "Skv", "D"), ("Hkv", "Dv", "page", "T", "Tk")

ATTENTION_LAYOUTS = {name: dict.fromkeys(TENSORS, name) for name in ("bhsd", "bshd")}

_ATTENTION_ATTRIBUTES: Mapping[str, type] = {
    **dict.fromkeys(("causal", "mask", "mask_dims", "direction"), str),
    **dict.fromkeys(("softcap", "scale"), float),
    **dict.fromkeys(("alibi", "sinks", "lse", "deterministic", "mask_gradient", "kv_shared"), bool),
    "window": int,
}

CONV2D_DIMS = ("N", "C", "H", "W", "K", "R", "S")

CONV2D_LAYOUTS = {name: dict.fromkeys(("x", "w", "out"), name) for name in ("nhwc", "nchw")}

_BOTH = ("stride", "pad", "dilation", "output_pad")
"""Attributes of a convolution that may be typed without a direction, for both."""

_CONV2D_ATTRIBUTES: Mapping[str, type] = {
    **dict.fromkeys((*_BOTH, *(f"{name}_{axis}" for name in _BOTH for axis in "hw")), int),
    **dict.fromkeys(("groups", "workspace_bytes"), int),
    **dict.fromkeys(("transposed", "deterministic"), bool),
    "direction": str,
}


def own_attributes(args: WorkloadArgs, known: Mapping[str, type]) -> dict[str, Scalar]:
    """The attributes that were typed, false ones left out; InvalidWorkload for one that the operator does not have or
    that is of another type."""
    for name, value in args.attributes.items():
        if name not in known:
            raise InvalidWorkload(f"attribute of {args.operator} must be one of {', '.join(known)}, got {name!r}")
        if type(value) is not known[name] and not (known[name] is float and type(value) is int):
            raise InvalidWorkload(f"attribute {name} must be of type {known[name].__name__}, got {value!r}")
    return {name: value for name, value in args.attributes.items() if value is not False}


def attention_of(args: WorkloadArgs) -> Workload:
    """The attention that was typed."""
    dtype, _, scaling = args.dtype.partition("/")
    given = own_attributes(args, _ATTENTION_ATTRIBUTES)
    dims, more = args.dims, {"scaling": scaling} if scaling else {}
    _refuse_epilogue(args)
    _check_layout(args, ATTENTION_LAYOUTS)
    if ("T" in dims) != ("Tk" in dims):
        raise InvalidWorkload("shape of a packed attention must give both T and Tk, the tokens of all queries and keys")
    return attention_workload(
        dims["B"],
        dims["Hq"],
        dims["Sq"],
        dims["Skv"],
        dims["D"],
        dtype,
        kv_heads=dims.get("Hkv"),
        v_dim=dims.get("Dv"),
        layout="" if args.layout == "bhsd" else args.layout,
        page=dims.get("page"),
        packed=(dims["T"], dims["Tk"]) if "T" in dims else None,
        out_dtype=args.out_dtype,
        error_budget=args.error_budget,
        **{**given, **more},
    )


def attention_fields(workload: Workload) -> dict[str, Any]:
    """What would have to be typed for an attention, as fields of WorkloadArgs."""
    attributes, dtype, out = workload.attributes, workload.dtypes["q"], workload.dtypes["out"]
    scaling = attributes.get("scaling")
    usual = dtype if dtype in ATTENTION_FLOATS else "bf16"
    same = {"Hkv": workload.dims["Hq"], "Dv": workload.dims["D"]}
    layout = workload.layouts["q"]
    return {
        "dims": {name: size for name, size in workload.dims.items() if same.get(name) != size},
        "dtype": f"{dtype}/{scaling}" if scaling else dtype,
        "layout": layout if layout in ATTENTION_LAYOUTS else "bhsd",
        "out_dtype": None if out == usual else out,
        "attributes": FrozenMap({name: value for name, value in attributes.items() if name != "scaling"}),
    }


def conv2d_of(args: WorkloadArgs) -> Workload:
    """The convolution that was typed."""
    _check_layout(args, CONV2D_LAYOUTS)
    given = own_attributes(args, _CONV2D_ATTRIBUTES)
    for name in _BOTH:
        if name in given:
            value = given.pop(name)
            given = {f"{name}_h": value, f"{name}_w": value, **given}
    return conv2d_workload(
        (args.dims["N"], args.dims["C"], args.dims["H"], args.dims["W"]),
        args.dims["K"],
        (args.dims["R"], args.dims["S"]),
        args.dtype,
        args.layout,
        args.epilogue,
        dtypes=None if args.out_dtype is None else {"out": args.out_dtype},
        error_budget=args.error_budget,
        attributes=given,
    )


def conv2d_fields(workload: Workload) -> dict[str, Any]:
    """What would have to be typed for a convolution, as fields of WorkloadArgs."""
    attributes = dict(workload.attributes)
    for name in _BOTH:
        if f"{name}_h" in attributes and attributes.get(f"{name}_h") == attributes.get(f"{name}_w"):
            attributes[name] = attributes.pop(f"{name}_h")
            del attributes[f"{name}_w"]
    dtype, out = workload.dtypes["x"], workload.dtypes["out"]
    usual = dtype if dtype in CONV2D_FLOATS else "bf16"
    return {
        "dims": dict(workload.dims),
        "dtype": dtype,
        "layout": workload.layouts["x"],
        "epilogue": workload.epilogue,
        "out_dtype": None if out == usual else out,
        "attributes": FrozenMap(attributes),
    }


def _refuse_epilogue(args: WorkloadArgs) -> None:
    if args.epilogue:
        raise InvalidWorkload(f"{args.operator} takes no epilogue, got {','.join(args.epilogue)}")


def _check_layout(args: WorkloadArgs, known: Mapping[str, object]) -> None:
    if args.layout not in known:
        raise InvalidWorkload(f"layout must be one of {', '.join(known)}, got {args.layout!r}")
