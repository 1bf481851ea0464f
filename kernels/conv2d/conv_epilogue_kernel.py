"""What every convolution kernel does with a finished tile [pixels, channels] before it is written: a chain of steps,
made into code at compile time.

The chain is a comma-separated text such as "mul_k,add_k,relu,add_out": a step with an operand names how it lies over
the result: k (one number a channel) or out (a tensor like the result).
"""

import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import activate, step_at, step_count


@triton.jit
def activate_conv(x, STEP: tl.constexpr):
    """relu, relu6, silu, gelu (erf), gelu_tanh, hardswish, sigmoid or tanh of an fp32 tile."""
    if STEP == "relu6":
        # minimum and maximum would lose NaN, which torch keeps
        x = tl.where(x < 0.0, 0.0, tl.where(x > 6.0, 6.0, x))
    elif STEP == "hardswish":
        gate = x + 3.0
        x = x * tl.where(gate < 0.0, 0.0, tl.where(gate > 6.0, 6.0, gate)) * 0.16666666666666666
    else:
        x = activate(x, STEP)
    return x


@triton.jit
def conv_step(acc, operand, n, p, q, k, row_inside, col_inside, STEP: tl.constexpr):
    """One step of a chain on the fp32 tile acc; arguments as those of `finish_conv`."""
    if STEP == "add_k" or STEP == "mul_k":
        y = tl.load(operand[0] + k * operand[2], mask=col_inside, other=0.0).to(tl.float32)[None, :]
        acc = acc + y if STEP == "add_k" else acc * y
    elif STEP == "add_out" or STEP == "mul_out":
        places = operand[0] + image_places(n, p, q, k, operand[1:])
        y = tl.load(places, mask=row_inside[:, None] & col_inside[None, :], other=0.0).to(tl.float32)
        acc = acc + y if STEP == "add_out" else acc * y
    else:
        acc = activate_conv(acc, STEP)
    return acc


@triton.jit
def finish_conv(acc, operands, n, p, q, k, row_inside, col_inside, STEPS: tl.constexpr):
    """Run a chain on the fp32 tile acc [rows, columns]: its rows are pixels (n, p, q), its columns channels k.

    row_inside, col_inside: which rows and columns the result has. operands: for each step (pointer, strides of n, k, p
    and q), or (None, 0, 0, 0, 0); a vector over channels has its only stride at k.
    """
    for i in tl.static_range(step_count(STEPS)):
        acc = conv_step(acc, operands[i], n, p, q, k, row_inside, col_inside, step_at(STEPS, i))
    return acc


@triton.jit
def image_places(n, p, q, k, strides):
    """Offsets [rows, columns] of the elements (n, k, p, q) of an image; rows are (n, p, q), columns k."""
    rows = n.to(tl.int64) * strides[0] + p.to(tl.int64) * strides[2] + q.to(tl.int64) * strides[3]
    return rows[:, None] + (k.to(tl.int64) * strides[1])[None, :]


CHANNEL_STEPS = {"bias": "add_k", "scale_vec": "mul_k"}
IMAGE_STEPS = {"residual": "add_out", "multiply": "mul_out"}


def conv_chain(inputs, epilogue):
    """(steps as text, their operands) of a workload's epilogue.

    An operand of a step is inputs["bias"], and inputs["bias_4"] where step 4 (counted from 0) names what an earlier
    step named already.
    """
    steps, operands = [], []
    for i, step in enumerate(epilogue):
        name = step if epilogue.index(step) == i else f"{step}_{i}"
        if step in CHANNEL_STEPS:
            steps.append(CHANNEL_STEPS[step])
            operands.append((inputs[name], 0, inputs[name].stride(0), 0, 0))
        elif step in IMAGE_STEPS:
            steps.append(IMAGE_STEPS[step])
            operands.append((inputs[name], *inputs[name].stride()))
        else:
            steps.append(step)
            operands.append((None, 0, 0, 0, 0))
    return ",".join(steps), tuple(operands)
