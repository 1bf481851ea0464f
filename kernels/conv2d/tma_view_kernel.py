"""How the bulk copy engine sees an NHWC image: boxes of pixels by channels, with a stride's remainders as an axis."""

import math

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


def conv_axis(taps, stride, pad, dilation, scatters):
    """One axis of a convolution: (is split, tap step, origin, remainder, step of results, step of weights).

    The result's pixel i meets, through tap t, the pixel origin + i + t * tap step of those that have the remainder
    modulo the stride; where the taps meet several remainders the axis is split, and these three say nothing. Scattering
    results have classes: each has an origin and first tap of its own, found in the kernel.
    """
    if scatters:
        common = math.gcd(stride, dilation)
        return False, -dilation // common, 0, 0, stride, stride // common
    if taps == 1 or dilation % stride == 0:
        return False, dilation // stride if taps > 1 else 0, -pad // stride, -pad % stride, 1, 1
    return True, 0, 0, 0, 1, 1


def conv_geometry(weight, attributes):
    """The constants of a convolution, by name, in the order in which the kernel takes them."""
    r, s = weight.shape[2:]
    scatters = bool(attributes["transposed"]) or attributes["direction"] == "input_gradient"
    stride, pad, dilation = ((attributes[f"{x}_h"], attributes[f"{x}_w"]) for x in ("stride", "pad", "dilation"))
    vertical = conv_axis(r, stride[0], pad[0], dilation[0], scatters)
    horizontal = conv_axis(s, stride[1], pad[1], dilation[1], scatters)
    return {
        "SCATTERS": scatters, "R": r, "S": s, "STRIDE_H": stride[0], "STRIDE_W": stride[1],
        "PAD_H": pad[0], "PAD_W": pad[1], "DILATION_H": dilation[0], "DILATION_W": dilation[1],
        "SPLIT_H": vertical[0], "SPLIT_W": horizontal[0], "TAP_STEP_H": vertical[1], "TAP_STEP_W": horizontal[1],
        "ORIGIN_H": vertical[2], "ORIGIN_W": horizontal[2], "OUT_STEP_H": vertical[4], "OUT_STEP_W": horizontal[4],
        "W_STEP_H": vertical[5], "W_STEP_W": horizontal[5],
    }  # fmt: skip


def safe_strides(sizes, strides, size_bytes):
    """Strides as the engine wants them: those of axes with one element are replaced by a multiple of 16 bytes."""
    lines = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]
    fill = -(-max([16, *lines]) * size_bytes // 16) * 16 // size_bytes
    return [fill if size == 1 else stride for size, stride in zip(sizes[:-1], strides[:-1], strict=True)] + [1]


def image_view(image, geometry):
    """(sizes, strides, tensor) of an image [N, C, H, W] as [N, H, W, C]; as [N, H / stride, stride, W / stride, ..]
    where an axis is split, remainders of W standing before the channels."""
    stride, pad = (geometry["STRIDE_H"], geometry["STRIDE_W"]), (geometry["PAD_H"], geometry["PAD_W"])
    split = geometry["SPLIT_H"], geometry["SPLIT_W"]
    if not geometry["SCATTERS"]:
        for axis in (0, 1):
            if not split[axis] and stride[axis] > 1:
                first = -pad[axis] % stride[axis]
                image = image[:, :, first :: stride[axis]] if axis == 0 else image[:, :, :, first :: stride[axis]]
    n, c, h, w = image.shape
    s_n, _, s_h, s_w = image.stride()
    if not any(split):
        return [n, h, w, c], [s_n, s_h, s_w, 1], image
    step_h, step_w = (step if cut else 1 for step, cut in zip(stride, split, strict=True))
    inner = (step_w - 1) * s_w + c
    return [n, h // step_h, step_h, w // step_w, inner], [s_n, step_h * s_h, s_h, step_w * s_w, 1], image


def box_view(image, tile, block_k, geometry):
    """The descriptor of an operand image for boxes of `tile` (images, rows, columns) by block_k channels."""
    sizes, strides, tensor = image_view(image, geometry)
    box = [tile[0], tile[1], tile[2], block_k] if len(sizes) == 4 else [tile[0], tile[1], 1, tile[2], block_k]
    return TensorDescriptor(tensor, sizes, safe_strides(sizes, strides, image.element_size()), box)


def result_view(out):
    """(sizes, strides) of a result [N, K, P, Q] as [N, P, Q, K]."""
    return [out.shape[0], *out.shape[2:], out.shape[1]], [out.stride(0), *out.stride()[2:], 1]


@triton.jit
def met_by(
    tap, SPLIT: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr,
    TAP_STEP: tl.constexpr, ORIGIN: tl.constexpr,
):  # fmt: skip
    """(pixel, remainder) that a tap meets along an axis for the result's pixel 0; remainder 0 on axes not split."""
    if SPLIT:
        # a multiple of the stride is added so that a positive number is divided
        reach = tap * DILATION + ((PAD + STRIDE - 1) // STRIDE * STRIDE - PAD)
        pixel = reach // STRIDE - (PAD + STRIDE - 1) // STRIDE
        remainder = reach % STRIDE
    else:
        pixel = tap * TAP_STEP + ORIGIN
        remainder = tap * 0
    return pixel, remainder


@triton.jit
def class_of_unit(unit, share, programs, CLASSES: tl.constexpr):
    """The class of one of CLASSES neighbouring units, which are the classes of one tile. share: items of a unit.

    A program's next item stands `programs` further on. Were classes to alternate simply, it could be one of the same
    class again and again, and classes differ in their number of taps: they turn by one with each round of programs.
    """
    if CLASSES > 1:
        rounds = unit // CLASSES * CLASSES * share // programs
        which = (unit + rounds * (CLASSES + 1 - programs // share % CLASSES)) % CLASSES
    else:
        which = unit * 0
    return which
