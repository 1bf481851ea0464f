"""What every matmul kernel does with a finished tile before it is written: a chain of steps, made into code at compile
time.

The chain is a comma-separated text of primitive steps, such as "add_n,gelu,mul_mn". A step with an operand names how
the operand is laid over the tile: 1 (one number), m (one for each row), n (one for each column), mn (a whole matrix).
"""

import triton
import triton.language as tl

PAIRS = ("swiglu", "geglu", "glu")


@triton.constexpr_function
def step_count(steps):
    """How many steps a chain has."""
    return len(steps.split(",")) if steps else 0


@triton.constexpr_function
def step_at(steps, position):
    """The step at a position of a chain."""
    return steps.split(",")[position]


@triton.constexpr_function
def pair_at(steps):
    """Position of the step that halves the columns; -1 when there is none."""
    found = [i for i, step in enumerate(steps.split(",")) if step in ("swiglu", "geglu", "glu")]
    return found[0] if found else -1


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def normal_cdf(x):
    """Phi(x) of an fp32 tile; absolute error under 1e-7, and small values keep their relative precision.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: erfc as a polynomial times exp(-z * z).
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half_erfc = 0.5 * poly * tl.exp(-z * z)
    return tl.where(x < 0.0, half_erfc, 1.0 - half_erfc)


@triton.jit
def activate(x, STEP: tl.constexpr):
    """relu, gelu (erf), gelu_tanh, silu, sigmoid, tanh or "" of an fp32 tile."""
    if STEP == "relu":
        # a plain maximum would turn NaN into 0, which torch's relu does not
        x = tl.where(x < 0.0, 0.0, x)
    elif STEP == "gelu":
        x = x * normal_cdf(x)
    elif STEP == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u)
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif STEP == "silu":
        x = x * sigmoid(x)
    elif STEP == "sigmoid":
        x = sigmoid(x)
    elif STEP == "tanh":
        x = 2.0 * sigmoid(2.0 * x) - 1.0
    return x


@triton.jit
def pair(first, second, STEP: tl.constexpr):
    """One tile out of the two halves of a gated product."""
    if STEP == "swiglu":
        out = activate(first, "silu") * second
    elif STEP == "geglu":
        out = first * activate(second, "gelu")
    else:
        out = first * sigmoid(second)
    return out


@triton.jit
def operand_tile(operand, batch, rows, cols, M, N, WHERE: tl.constexpr):
    """The operand's part over the tile [rows, cols] in fp32; operand is (pointer, batch, row and column stride)."""
    ptr = operand[0] + batch * operand[1]
    if WHERE == "1":
        tile = tl.load(ptr).to(tl.float32)
    elif WHERE == "m":
        tile = tl.load(ptr + rows * operand[2], mask=rows < M, other=0.0).to(tl.float32)[:, None]
    elif WHERE == "n":
        tile = tl.load(ptr + cols * operand[3], mask=cols < N, other=0.0).to(tl.float32)[None, :]
    else:
        places = ptr + rows.to(tl.int64)[:, None] * operand[2] + cols.to(tl.int64)[None, :] * operand[3]
        tile = tl.load(places, mask=(rows[:, None] < M) & (cols[None, :] < N), other=0.0).to(tl.float32)
    return tile


@triton.constexpr_function
def operation_of(step):
    """What a step does with its operand: add, mul or gelu_backward; "" for a step without one."""
    return step if step == "gelu_backward" else step.split("_")[0] if step.split("_")[0] in ("add", "mul") else ""


@triton.constexpr_function
def where_of(step):
    """How a step's operand lies over the tile."""
    return "mn" if step == "gelu_backward" else step.split("_")[1]


@triton.jit
def apply_step(x, operand, batch, rows, cols, M, N, STEP: tl.constexpr):
    """One step that keeps the tile's shape."""
    OPERATION: tl.constexpr = operation_of(STEP)
    if OPERATION == "":
        x = activate(x, STEP)
    else:
        y = operand_tile(operand, batch, rows, cols, M, N, where_of(STEP))
        if OPERATION == "add":
            x += y
        elif OPERATION == "mul":
            x *= y
        else:
            density = 0.3989422804014327 * tl.exp(-0.5 * y * y)
            x *= normal_cdf(y) + y * density
    return x


@triton.jit
def finish_pair(first, second, operands, batch, rows, cols, M, N, STEPS: tl.constexpr):
    """Run a chain that has a pair step: first and second are fp32 tiles of the left and right half of the product.

    N counts the columns of the result, half of the product's. Steps before the pair see both halves.
    """
    for i in tl.static_range(step_count(STEPS)):
        if i < pair_at(STEPS):
            first = apply_step(first, operands[i], batch, rows, cols, M, 2 * N, step_at(STEPS, i))
            second = apply_step(second, operands[i], batch, rows, cols + N, M, 2 * N, step_at(STEPS, i))
        elif i == pair_at(STEPS):
            first = pair(first, second, step_at(STEPS, i))
        else:
            first = apply_step(first, operands[i], batch, rows, cols, M, N, step_at(STEPS, i))
    return first


@triton.jit
def finish(acc, operands, batch, rows, cols, M, N, STEPS: tl.constexpr):
    """Run a chain without a pair step on the fp32 tile acc [rows, cols] of product number `batch`.

    operands: for each step (pointer, batch stride, row stride, column stride), or (None, 0, 0, 0).
    """
    for i in tl.static_range(step_count(STEPS)):
        acc = apply_step(acc, operands[i], batch, rows, cols, M, N, step_at(STEPS, i))
    return acc


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Place of a tile in an order that walks GROUP_M rows of tiles at a time, so that operands stay in L2."""
    per_group = GROUP_M * tiles_n
    first = (tile // per_group) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % per_group) % height, (tile % per_group) // height


VECTORS = {"bias": "add_n", "bias_m": "add_m", "scale": "mul_1", "scale_vec": "mul_n", "scale_m": "mul_m"}
MATRICES = {"residual": "add_mn", "multiply": "mul_mn", "gelu_backward": "gelu_backward"}


def over_tile(tensor, where):
    """(tensor, batch, row and column stride) of a step's operand."""
    if where == "1":
        return (tensor, 0, 0, 0)
    if where in ("m", "n"):
        batch, step = (tensor.stride(0), tensor.stride(1)) if tensor.dim() == 2 else (0, tensor.stride(0))
        return (tensor, batch, step, 0) if where == "m" else (tensor, batch, 0, step)
    return (tensor, *strides3(tensor))


def strides3(tensor):
    """Batch, row and column stride of a [M, N] or [batch, M, N] tensor; the batch stride of one matrix is 0."""
    return (0, *tensor.stride()) if tensor.dim() == 2 else tuple(tensor.stride())


def chain_of(inputs, epilogue):
    """(steps as text, their operands) that turn a plain product into the result.

    Scales of quantised operands come first: one number, or one for each row of a (column of b). Then the workload's
    epilogue; an operand of a step is inputs["bias"], and inputs["residual_4"] where step 4 (counted from 0) names
    what an earlier step named already.
    """
    steps, operands = [], []
    for name, where in (("a_scale", "m"), ("b_scale", "n")):
        scale = inputs.get(name)
        if scale is not None and (scale.numel() == 1 or scale.dim() == 1):
            where = "1" if scale.numel() == 1 and scale.dim() == 0 else where
            steps.append(f"mul_{where}")
            operands.append(over_tile(scale, where))
    for i, step in enumerate(epilogue):
        primitive = VECTORS.get(step) or MATRICES.get(step)
        if primitive is None:
            steps.append(step)
            operands.append((None, 0, 0, 0))
            continue
        name = step if epilogue.index(step) == i else f"{step}_{i}"
        steps.append(primitive)
        operands.append(over_tile(inputs[name], "mn" if step in MATRICES else primitive.split("_")[1]))
    return ",".join(steps), tuple(operands)


def is_paired(epilogue):
    """Whether the chain has a step that makes one column out of two."""
    return any(step in PAIRS for step in epilogue)
