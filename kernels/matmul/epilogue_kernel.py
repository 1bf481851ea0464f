"""What every matmul kernel does with a finished tile before it is written."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """relu, gelu (erf), gelu_tanh, silu, sigmoid, tanh or "" of an fp32 tile."""
    if ACTIVATION == "relu":
        # a plain maximum would turn NaN into 0, which torch's relu does not
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u)
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    elif ACTIVATION == "sigmoid":
        x = sigmoid(x)
    elif ACTIVATION == "tanh":
        x = 2.0 * sigmoid(2.0 * x) - 1.0
    return x


@triton.jit
def finish(acc, bias_ptr, cols, N, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Add bias[cols] to each row of an fp32 tile [rows, cols], then activate."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return activate(acc, ACTIVATION)


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Place of a tile in an order that walks GROUP_M rows of tiles at a time, so that operands stay in L2."""
    per_group = GROUP_M * tiles_n
    first = (tile // per_group) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % per_group) % height, (tile % per_group) // height
