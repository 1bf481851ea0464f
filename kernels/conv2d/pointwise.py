"""Template "pointwise": convolution with one tap and stride 1 as the equal matrix product, in the space and with the
kernel of the matmul template persistent_tma; forward, transposed and both gradients; from sm_90 on."""

from __future__ import annotations

import functools
import itertools
import math

from kernelwright.kernels.conv2d.layout import Layout
from kernelwright.kernels.conv2d.template import LONGEST_SUM, ConvTemplate
from kernelwright.kernels.conv2d.workload import FLOATS, Problem
from kernelwright.kernels.matmul import workload as matmul
from kernelwright.kernels.matmul.persistent_tma import PERSISTENT_TMA
from kernelwright.kernels.matmul.template import Knobs, number
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec, FrozenMap, Scalar, Workload


@functools.lru_cache(maxsize=512)
def product_of(problem: Problem) -> Workload | str:
    """The matmul workload that computes the same, or why there is none."""
    p = problem
    if (p.r, p.s, p.stride, p.padding, p.output_padding) != (1, 1, (1, 1), (0, 0), (0, 0)) or p.groups > 1:
        return "computes only convolutions with one tap, stride 1, no padding and one group"
    if p.dtypes[p.operands[0]] not in FLOATS:
        return f"multiplies {', '.join(FLOATS)}"
    missing = [step for step in p.epilogue if step not in matmul.STEPS]
    if missing:
        return f"matmul kernels have no epilogue step {', '.join(missing)}"
    flat = all(_merged(p, name, (0, 2, 3)) is not None for name in ("x", "out"))
    if not flat and (p.result == "w" or any(_merged(p, name, (2, 3)) is None for name in ("x", "out"))):
        return "the pixels of an image are not evenly spaced in memory"
    return _workload(p, batched=not flat)


def _merged(p: Problem, name: str, places: tuple[int, ...]) -> int | None:
    """The stride of these dimensions of an image taken together; None where elements are not evenly spaced."""
    sizes, strides = p.shapes[name], p.layouts[name].strides
    kept = [(sizes[place], strides[place]) for place in places if sizes[place] != 1]
    if any(outer[1] != inner[0] * inner[1] for outer, inner in itertools.pairwise(kept)):
        return None
    # a single pixel: the next one would stand behind its channels
    return kept[-1][1] if kept else sizes[1] * strides[1]


def _workload(p: Problem, batched: bool) -> Workload:
    pixels = p.h * p.w * (1 if batched else p.n)
    first, second = p.operands
    places = (2, 3) if batched else (0, 2, 3)
    images = {name: (_merged(p, name, places) or 0, p.layouts[name].strides[1]) for name in ("x", "out")}
    weight = p.layouts["w"].strides[:2]
    turned = weight[1], weight[0]
    if p.result == "w":
        (m, n, k), sides = (p.k, p.c, pixels), {"a": images["out"][::-1], "b": images["x"], "out": weight}
        first, second = "out", "x"
    else:
        plain = p.result == "out" and not p.transposed
        m, n, k = pixels, p.shapes[p.result][1], p.shapes[first][1]
        sides = {"a": images[first], "b": turned if plain else weight, "out": images[p.result]}
    named = {"a": first, "b": second, "out": p.result}
    sizes = {"a": (m, k), "b": (k, n), "out": (m, n)}
    layouts = {}
    for side, name in named.items():
        # one weight for every image
        batch = (0 if name == "w" else p.layouts[name].strides[0]) if batched else None
        layouts[side] = _text(sizes[side], sides[side], batch, p.layouts[name])
    attributes: dict[str, Scalar] = {"deterministic": True} if p.deterministic else {}
    attributes |= {} if p.workspace_bytes is None else {"workspace_bytes": p.workspace_bytes}
    return Workload(
        "matmul",
        FrozenMap({"M": m, "N": n, "K": k} | ({"B": p.n} if batched else {})),
        FrozenMap({side: p.dtypes[name] for side, name in named.items()}),
        FrozenMap(layouts),
        p.epilogue,
        FrozenMap(attributes),
        # which precisions are allowed is told by the convolution
        None,
    )


def _text(sizes: tuple[int, int], strides: tuple[int, int], batch: int | None, layout: Layout) -> str:
    """How the matmul operator writes the layout of a [rows, columns] matrix with these strides."""
    tail = ("" if batch is None else f"@{batch}") + (f"+{layout.offset}" if layout.offset else "")
    for order, along, across in (("row", 1, 0), ("col", 0, 1)):
        if strides[along] == 1 and strides[across] >= sizes[along]:
            return f"{order}:{strides[across]}{tail}"
    return f"strided:{strides[0]},{strides[1]}{tail}"


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    product = product_of(problem)
    if isinstance(product, str):
        return [Knob("precision", precisions, "category")]
    return list(PERSISTENT_TMA.knobs(matmul.problem_of(product), device, precisions))


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    product = product_of(problem)
    if isinstance(product, str):
        words = product
        return [Constraint("pointwise", lambda knobs: words)]
    length = product.dims["K"]

    def long_sums(knobs: Knobs) -> str | None:
        each = math.ceil(length / number(knobs, "split_k"))
        if problem.element_bytes == 4 or each <= LONGEST_SUM:
            return None
        return f"sums of {each} products lose too much on tensor cores; split them into parts of {LONGEST_SUM}"

    space = PERSISTENT_TMA.space(product, device)
    kept = [constraint for constraint in space.constraints if constraint.name != "shared_memory"]
    return [*kept, Constraint("long_sums", long_sums)]


def _shared(problem: Problem, knobs: Knobs) -> int:
    product = product_of(problem)
    return 0 if isinstance(product, str) else PERSISTENT_TMA.shared(matmul.problem_of(product), knobs)


POINTWISE = ConvTemplate("pointwise", "kernelwright.kernels.conv2d.pointwise_kernel", _knobs, _constraints, _shared)
