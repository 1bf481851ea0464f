"""The chain of steps of `epilogue_kernel` in fewer instructions, for kernels that nothing else runs beside meanwhile.

The activations are the same functions with the same precision (a few units in the last place of fp32): exponentials of
base 2 that take no subnormal numbers, and the hardware's reciprocal. A GELU is 14 instructions an element, not 26.
"""

import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import apply_step, step_at, step_count


@triton.constexpr_function
def is_activation(step):
    """Whether a step is one that is shorter here."""
    return step in ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh")


@triton.constexpr_function
def is_long(steps):
    """Whether a chain has an activation that takes many instructions."""
    return any(step in ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh") for step in steps.split(","))


@triton.jit
def reciprocal(x):
    """1 / x within a unit in the last place; 0 where that is subnormal."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def short_activation(x, STEP: tl.constexpr):
    """gelu (erf), gelu_tanh, silu, sigmoid or tanh of an fp32 tile."""
    if STEP == "gelu":
        # as in normal_cdf; the last factor is limited so that infinity times 0 does not become NaN
        size = tl.abs(x)
        t = reciprocal(1.0 + 0.23164189 * size)
        poly = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        tail = poly * tl.exp2(x * x * -0.7213475204444817)
        x = tl.maximum(x, 0.0) - tl.minimum(size, 64.0) * tail
    elif STEP == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u)
        x = x * reciprocal(1.0 + tl.exp2(x * (-2.302208198 - 0.1029432396 * (x * x))))
    elif STEP == "silu":
        x = x * reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))
    elif STEP == "sigmoid":
        x = reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))
    else:
        x = 2.0 * reciprocal(1.0 + tl.exp2(x * -2.8853900817779268)) - 1.0
    return x


@triton.jit
def short_finish(acc, operands, batch, rows, cols, M, N, STEPS: tl.constexpr):
    """Run a chain without a pair step on the fp32 tile acc [rows, cols] of product number `batch`, as `finish` does."""
    for i in tl.static_range(step_count(STEPS)):
        if is_activation(step_at(STEPS, i)):
            acc = short_activation(acc, step_at(STEPS, i))
        else:
            acc = apply_step(acc, operands[i], batch, rows, cols, M, N, step_at(STEPS, i))
    return acc
