"""Every kind of convolution that the operator takes, at sizes that find mistakes: what check_conv2d runs by default."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from verify_job import Case

from kernelwright.kernels.conv2d.workload import ACTIVATIONS, DIRECTIONS, conv2d_workload
from kernelwright.types import Workload

Found = tuple[str, Workload]

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "3x3": {"image": (4, 64, 28, 28), "k": 128, "kernel": 3, "padding": 1},
    "3x3, ragged": {"image": (3, 37, 19, 23), "k": 51, "kernel": 3, "padding": 1},
    "3x3, stride 2": {"image": (4, 64, 29, 28), "k": 96, "kernel": 3, "padding": 1, "stride": 2},
    "1x1": {"image": (4, 128, 14, 14), "k": 256, "kernel": 1},
    "1x1, stride 2": {"image": (4, 128, 15, 14), "k": 64, "kernel": 1, "stride": 2},
    "stem": {"image": (2, 3, 64, 66), "k": 32, "kernel": 7, "padding": 3, "stride": 2},
    "patches": {"image": (2, 3, 56, 56), "k": 64, "kernel": 14, "stride": 14},
    "depthwise": {"image": (2, 48, 21, 20), "k": 48, "kernel": 7, "padding": 3, "groups": 48},
    "depthwise, doubled": {"image": (2, 30, 15, 15), "k": 60, "kernel": 3, "padding": 1, "groups": 30},
    "grouped": {"image": (2, 64, 14, 14), "k": 128, "kernel": 3, "padding": 1, "groups": 16},
    "odd groups": {"image": (2, 21, 13, 13), "k": 35, "kernel": 3, "padding": 1, "groups": 7},
    "dilated": {
        "image": (2, 32, 33, 35),
        "k": 48,
        "kernel": (3, 5),
        "stride": (2, 3),
        "dilation": (3, 2),
        "padding": 4,
    },
    "padding over the kernel": {"image": (2, 24, 6, 6), "k": 16, "kernel": 3, "padding": 5},
    "31x31": {"image": (1, 16, 40, 40), "k": 16, "kernel": 31, "padding": 15},
    "one dimension": {"image": (2, 80, 1, 600), "k": 96, "kernel": (1, 3), "stride": (1, 2), "padding": (0, 1)},
    # pytorch/pytorch#173068: another template's 8 warps gave 84.7 % wrong elements
    "eight warps": {"image": (2, 33, 34, 41), "k": 34, "kernel": 3, "stride": (2, 3), "padding": (4, 5)},
    "one pixel": {"image": (5, 96, 7, 7), "k": 130, "kernel": 7},
    "few of everything": {"image": (1, 1, 1, 1), "k": 1, "kernel": 1},
}

TRANSPOSED: Mapping[str, Mapping[str, Any]] = {
    "2x2 by 2": {"image": (2, 64, 16, 16), "k": 48, "kernel": 2, "stride": 2},
    "4x4 by 2": {"image": (4, 64, 8, 8), "k": 32, "kernel": 4, "stride": 2, "padding": 1},
    "all at once": {
        "image": (2, 16, 9, 11), "k": 24, "kernel": 3, "stride": 3, "padding": (2, 1), "dilation": 2, "groups": 2,
        "output_padding": (1, 2),
    },
    "rows that nobody writes": {"image": (1, 8, 5, 5), "k": 8, "kernel": 2, "stride": 4},
}  # fmt: skip


def coverage() -> list[Case]:
    """The cases, each with an id that counts them."""
    found = [*_directions(), *_types(), *_layouts(), *_epilogues(), *_limits(), *_far_offsets(), *_copies()]
    return [Case(f"c{number:03}", tag, workload) for number, (tag, workload) in enumerate(found)]


def _directions() -> Iterator[Found]:
    for (tag, shape), direction in itertools.product(SHAPES.items(), DIRECTIONS):
        yield f"{tag}, {direction}", conv2d_workload(**shape, direction=direction)
    for tag, shape in TRANSPOSED.items():
        yield f"transposed, {tag}", conv2d_workload(**shape, transposed=True, epilogue=("bias",))
    for direction in DIRECTIONS:
        yield f"no batch, {direction}", conv2d_workload((0, 16, 8, 8), 16, 3, padding=1, direction=direction)


def _types() -> Iterator[Found]:
    for direction, tag in itertools.product(DIRECTIONS, ("3x3", "3x3, ragged", "1x1")):
        shape = SHAPES[tag]
        yield f"fp16, {direction}", conv2d_workload(**shape, dtype="fp16", direction=direction)
        yield f"fp32, {direction}", conv2d_workload(**shape, dtype="fp32", direction=direction)
        yield f"tf32, {direction}", conv2d_workload(**shape, dtype="fp32", direction=direction, error_budget=1e-3)
    wide = {"w": "fp32"}
    yield "fp32 gradient", conv2d_workload(**SHAPES["3x3"], direction="weight_gradient", dtypes=wide)
    for tag in ("3x3", "3x3, ragged"):
        yield "int8", conv2d_workload(**SHAPES[tag], dtype="int8", dtypes={"out": "int32"})
        scaled = ("scale_vec", "bias", "relu")
        yield "int8, scaled", conv2d_workload(**SHAPES[tag], dtype="int8", dtypes={"out": "fp16"}, epilogue=scaled)
        yield "fp8", conv2d_workload(**SHAPES[tag], dtype="fp8e4m3", epilogue=("scale_vec",))


def _layouts() -> Iterator[Found]:
    ragged, plain = SHAPES["3x3, ragged"], SHAPES["3x3"]
    for shape, direction in itertools.product((ragged, plain, SHAPES["1x1"]), DIRECTIONS):
        yield f"nchw, {direction}", conv2d_workload(**shape, layout="nchw", direction=direction)
    for x, w, out in (("nchw", "nhwc", "nhwc"), ("nhwc", "nchw", "nchw"), ("nhwc+1", "nhwc+3", "nhwc+5")):
        yield "mixed layouts", conv2d_workload(**plain, layouts={"x": x, "w": w, "out": out})
    wider = {"x": "strided:150528,1,5376,192", "out": "strided:225792,1,8064,288"}
    for direction in DIRECTIONS[:2]:
        yield f"slices of wider tensors, {direction}", conv2d_workload(**plain, layouts=wider, direction=direction)
    yield "one image repeated", conv2d_workload(**plain, layouts={"x": "strided:0,1,1792,64"})


def _epilogues() -> Iterator[Found]:
    for activation in ACTIVATIONS:
        yield "epilogue", conv2d_workload(**SHAPES["3x3, ragged"], epilogue=("bias", activation))
    chain = ("scale_vec", "bias", "residual", "relu")
    for tag, layout in itertools.product(("3x3", "1x1", "grouped", "depthwise", "stem"), ("nhwc", "nchw")):
        yield "chain", conv2d_workload(**SHAPES[tag], layout=layout, epilogue=chain)
    yield "long chain", conv2d_workload(**SHAPES["3x3"], epilogue=(*chain, "multiply", "bias", "sigmoid"))


def _limits() -> Iterator[Found]:
    for attributes in ({"deterministic": True}, {"workspace_bytes": 2**20}):
        for direction in DIRECTIONS:
            shape: dict[str, Any] = {"image": (1, 512, 7, 7), "k": 256, "kernel": 3, "padding": 1}
            yield "limited", conv2d_workload(**shape, direction=direction, attributes=attributes)


def _far_offsets() -> Iterator[Found]:
    far = {"image": (3, 16, 20, 20), "k": 24, "kernel": 3, "padding": 1}
    for direction in DIRECTIONS:
        for name, layout in (("x", "strided:1200000000,1,320,16"), ("out", "strided:1200000000,1,480,24")):
            found = conv2d_workload(**far, direction=direction, layouts={name: layout})  # type: ignore[arg-type]
            yield f"{name} past 2^31, {direction}", found


def _copies() -> Iterator[Found]:
    """Operands that templates with TMA copy first, and results in classes or NCHW that they write."""
    strided: tuple[dict[str, Any], ...] = (
        {"image": (4, 64, 27, 30), "k": 96, "kernel": 3, "stride": 2, "padding": 1},
        {"image": (4, 64, 28, 28), "k": 128, "kernel": 1, "stride": 2},
        {"image": (8, 128, 1, 300), "k": 128, "kernel": (1, 3), "stride": (1, 2), "padding": (0, 1)},
    )
    for shape, layout, direction in itertools.product(strided, ("nhwc", "nchw"), DIRECTIONS[:2]):
        for dtype, budget in (("fp16", None), ("fp32", 1e-3)):
            given: dict[str, Any] = {"dtype": dtype, "layout": layout, "direction": direction, "error_budget": budget}
            yield f"copies, {dtype} {layout}, {direction}", conv2d_workload(**shape, **given)
    for dtype, layout in itertools.product(("fp16", "fp8e4m3"), ("nhwc", "nchw")):
        shape = {"image": (4, 128, 8, 12), "k": 64, "kernel": 4, "stride": 2, "padding": 1}
        given = {"dtype": dtype, "layout": layout, "transposed": True, "epilogue": ("bias", "relu")}
        yield f"copies, {dtype} {layout}, transposed", conv2d_workload(**shape, **given)
    # fp32 in parts: channels that fill no whole blocks, groups, strides, both scatterings
    parted: tuple[dict[str, Any], ...] = (
        {"image": (3, 72, 13, 17), "k": 40, "kernel": 3, "padding": 1},
        {"image": (4, 64, 27, 30), "k": 96, "kernel": 3, "stride": 2, "padding": 1},
        {"image": (2, 128, 9, 11), "k": 128, "kernel": (3, 2), "padding": 1, "groups": 2},
    )
    for shape, layout, direction in itertools.product(parted, ("nhwc", "nchw"), DIRECTIONS[:2]):
        for budget in (None, 1e-4):
            given = {"dtype": "fp32", "layout": layout, "direction": direction, "error_budget": budget}
            yield f"parts, {layout}, {direction}", conv2d_workload(**shape, **given)
    for layout in ("nhwc", "nchw"):
        shape = {"image": (2, 3, 58, 61), "k": 64, "kernel": 4, "stride": 4, "layout": layout}
        yield f"copies, patches {layout}", conv2d_workload(**shape, direction="input_gradient")
