"""The product of two tiles in a schedule's compute precision."""

import torch
import triton
import triton.language as tl


@triton.jit
def product(x, y, acc, PRECISION: tl.constexpr):
    """acc + x @ y; fp32 operands in a narrower precision are rounded to it first."""
    if PRECISION == "bf16":
        acc = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), acc)
    elif PRECISION == "int8":
        acc = tl.dot(x, y, acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


def dot_precision(precision, tensor):
    """What `product` is told for a schedule's compute precision; None for operands in that very type."""
    if precision == "bf16" and tensor.dtype != torch.float32:
        return None
    narrow = precision in ("bf16", "bf16x3", "bf16x6")
    if narrow and triton.knobs.runtime.interpret:
        # the interpreter multiplies in fp32 whatever it is told, and gets bf16 products wrong
        return "ieee"
    return precision if narrow or precision in ("tf32", "tf32x3", "ieee", "int8") else None
