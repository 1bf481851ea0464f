"""The part of a rendered matmul file around its kernel: constants, the function that launches it, and a check."""

from __future__ import annotations

from kernelwright.kernels.matmul.workload import OPERANDS, Problem, group_size, problem_of
from kernelwright.types import Schedule, Workload

TITLE = "A matrix product kernel"

_DTYPES = {
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "fp32": "torch.float32",
    "fp8e4m3": "torch.float8_e4m3fn",
    "fp8e5m2": "torch.float8_e5m2",
    "int8": "torch.int8",
}

_STEPS = {
    "bias": "x + {}",
    "bias_m": "x + {}[:, None]",
    "scale": "x * {}",
    "scale_vec": "x * {}",
    "scale_m": "x * {}[:, None]",
    "residual": "x + {}",
    "multiply": "x * {}",
    "gelu_backward": "x * gelu_derivative({}.to(x.dtype))",
    "relu": "torch.relu(x)",
    "gelu": "torch.nn.functional.gelu(x)",
    "gelu_tanh": 'torch.nn.functional.gelu(x, approximate="tanh")',
    "silu": "torch.nn.functional.silu(x)",
    "sigmoid": "torch.sigmoid(x)",
    "tanh": "torch.tanh(x)",
    "swiglu": "torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]",
    "geglu": "x.chunk(2, -1)[0] * torch.nn.functional.gelu(x.chunk(2, -1)[1])",
    "glu": "torch.nn.functional.glu(x, -1)",
}
"""Each step of an epilogue as torch runs it on x."""


def operand_names(problem: Problem) -> list[str]:
    """The function's parameters after a and b: scales, offsets, then what the epilogue's steps read."""
    scales = ["a_scale", "b_scale"] if problem.scaling else []
    if problem.scaling and problem.a_dtype in ("fp16", "bf16"):
        scales = ["b_scale"]
    steps = problem.epilogue
    named = [s if steps.index(s) == i else f"{s}_{i}" for i, s in enumerate(steps) if s in OPERANDS]
    return [*scales, *(["offsets"] if problem.groups else []), *named]


def checks_itself(problem: Problem) -> bool:
    """Whether the file can make its own operands and right answer: not for grouped and group-scaled products."""
    return not problem.groups and group_size(problem.scaling) == 1


def constants(workload: Workload, schedule: Schedule, tolerance: float) -> str:
    """Sizes, schedule, types and layouts as Python assignments."""
    problem = problem_of(workload)
    knobs = ", ".join(f"{name!r}: {value!r}" for name, value in schedule.knobs.items())
    sides = {"a": (problem.m, problem.k), "b": (problem.k, problem.n), "out": (problem.m, problem.out_n)}
    layouts = {}
    for name, (rows, columns) in sides.items():
        layout = getattr(problem, name)
        dense = columns if layout.order == "row" else rows
        gap = layout.leading - dense if layout.order != "strided" else layout.strides()
        layouts[name] = (layout.order, gap)
    return f"""
M, N, K = {problem.m}, {problem.n}, {problem.k}
BATCH = {problem.batch if problem.batched else None}
TEMPLATE = {schedule.template!r}
SCHEDULE = {{{knobs}}}
EPILOGUE = {problem.epilogue!r}
DTYPES = {{"a": {_DTYPES.get(problem.a_dtype, "torch.uint8")}, "b": {_DTYPES.get(problem.b_dtype, "torch.uint8")}}}
OUT_DTYPE = {_DTYPES[problem.out_dtype]}
# order ("row": the last dimension is dense) and how many elements lie between one line and the next
LAYOUTS = {layouts!r}
# largest relative error (Frobenius norm, against fp64) with which a result counts as right
TOLERANCE = {tolerance!r}
"""


def harness(workload: Workload) -> list[str]:
    """The code after the kernel's own, one part for each item."""
    problem = problem_of(workload)
    parts = [_STRIDED, _function(problem)]
    if not checks_itself(problem):
        return [*parts, _NO_CHECK]
    parts += [_GELU_DERIVATIVE] if "gelu_backward" in problem.epilogue else []
    return [*parts, _reference(problem), _operands(problem), _MAIN]


_STRIDED = '''
def strided(batch, rows, columns, layout, dtype, device):
    """An uninitialised [rows, columns] tensor, or [batch, rows, columns], with the layout of LAYOUTS[layout]."""
    order, gap = LAYOUTS[layout]
    if order == "strided":
        strides = gap
    else:
        strides = (columns + gap, 1) if order == "row" else (1, rows + gap)
    length = 1 + max(rows - 1, 0) * strides[0] + max(columns - 1, 0) * strides[1] + max(strides)
    # the matrices of a batch begin at whole multiples of 16 elements
    length += -length % 16
    storage = torch.empty((batch or 1) * length, dtype=dtype, device=device)
    if batch is None:
        return storage.as_strided((rows, columns), strides)
    return storage.as_strided((batch, rows, columns), (length, *strides))
'''

_GELU_DERIVATIVE = '''
def gelu_derivative(x):
    """The derivative of the exact gelu at x."""
    return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
'''


def _function(problem: Problem) -> str:
    names = operand_names(problem)
    parameters = ", ".join(["a", "b", *names, "out=None"])
    inputs = ", ".join(f'"{name}": {name}' for name in ["a", "b", *names])
    batch = "[batch, " if problem.batched else "["
    return f'''
def matmul({parameters}):
    """out {batch}M, N] = epilogue(a {batch}M, K] @ b {batch}K, N]), with the layouts of LAYOUTS.

    The tiles were chosen for M={problem.m}, N={problem.n}, K={problem.k}; other sizes are right, but may be slow."""
    inputs = {{{inputs}}}
    if out is None:
        batch = a.shape[0] if a.dim() == 3 else None
        columns = b.shape[-1]{" // 2" if problem.paired else ""}
        out = strided(batch, a.shape[-2], columns, "out", OUT_DTYPE, a.device)
    for kernel, grid, args, options in plan(inputs, out, SCHEDULE, EPILOGUE):
        kernel[grid](*args, **options)
    return out
'''


def _reference(problem: Problem) -> str:
    names = operand_names(problem)
    lines = ["    x = a @ b"]
    if problem.scaling:
        row = "[:, None]" if problem.scaling == "row" else ""
        lines.append(f"    x = x * a_scale{row} * b_scale")
    left = iter(name for name in names if not name.endswith(("a_scale", "b_scale")))
    for step in problem.epilogue:
        lines.append("    x = " + (_STEPS[step].format(next(left)) if step in OPERANDS else _STEPS[step]))
    body = "\n".join(lines)
    return f'''
def torch_matmul({", ".join(["a", "b", *names])}):
    """What matmul computes, by torch, in the type of a."""
{body}
    return x
'''


def _operands(problem: Problem) -> str:
    """A function that draws what matmul takes after a and b."""
    lines: list[str] = []
    if problem.scaling:
        sizes = ("m", "n") if problem.scaling == "row" else ("()", "()")
        lines += [f"        torch.rand({size}, device=device) + 0.5," for size in sizes]
    columns = "n"
    for step in problem.epilogue:
        columns = "n // 2" if step in ("swiglu", "geglu", "glu") else columns
        where = OPERANDS.get(step)
        if where is None:
            continue
        matrix = f"({'BATCH, ' if problem.batched else ''}m, {columns})"
        size = {"1": "()", "m": "m", "n": columns, "mn": matrix}[where]
        dtype = "torch.float32" if where == "1" else "dtype"
        lines.append(f"        torch.randn({size}, device=device).to({dtype}),")
    body = "\n".join(["    return [", *lines, "    ]"]) if lines else "    return []"
    return f'''
def operands(m, n, dtype, device):
    """What matmul takes after a and b, random, in its order."""
{body}
'''


_NO_CHECK = """
if __name__ == "__main__":
    print("Import matmul from this file; operands of this kind are checked by `kernelwright tune`, not by the file.")
"""


_MAIN = '''
def relative_error(found, wanted):
    """Frobenius norm of the difference over that of the right answer; NaN where a result was not written."""
    size = wanted.norm().item()
    difference = (found.double() - wanted).norm().item()
    return difference / size if size else difference


def fill(tensor):
    """Random normal numbers (integers: from -128 to 127) in a tensor of any type."""
    if tensor.dtype == torch.int8:
        return tensor.copy_(torch.randint(-128, 128, tensor.shape, device=tensor.device))
    return tensor.copy_(torch.randn(tensor.shape, device=tensor.device).to(tensor.dtype))


def main():
    interpreted = triton.knobs.runtime.interpret
    parser = argparse.ArgumentParser(description="Check the kernel against fp64, and time it on a GPU.")
    parser.add_argument("sizes", nargs="*", type=int, metavar="M N K", help="default: those it was made for")
    sizes = parser.parse_args().sizes
    if sizes and len(sizes) != 3:
        parser.error(f"give all of M, N and K or none, got {len(sizes)} numbers")
    if not interpreted and not torch.cuda.is_available():
        parser.error("there is no GPU here; set TRITON_INTERPRET=1 to check the kernel on the CPU, at small sizes")
    # The interpreter is slow, so that it gets sizes of the same alignment; and its bf16 products are wrong.
    m, n, k = sizes or [s if s <= 192 or not interpreted else 128 + s % 64 for s in (M, N, K)]
    usable = {torch.bfloat16: torch.float16} if interpreted else {}
    a_dtype, b_dtype, out_dtype = (usable.get(t, t) for t in (DTYPES["a"], DTYPES["b"], OUT_DTYPE))
    device = "cpu" if interpreted else "cuda"
    torch.manual_seed(0)
    a = fill(strided(BATCH, m, k, "a", a_dtype, device))
    b = fill(strided(BATCH, k, n, "b", b_dtype, device))
    rest = operands(m, n, out_dtype, device)
    wanted = torch_matmul(a.double(), b.double(), *(x.double() for x in rest))
    out = strided(BATCH, *wanted.shape[-2:], "out", out_dtype, device).fill_(float("nan"))
    matmul(a, b, *rest, out)
    error = relative_error(out, wanted)
    right = error <= TOLERANCE
    verdict = "right" if right else "WRONG"
    print(f"M={m} N={n} K={k} {a_dtype}: relative error {error:.2e}, limit {TOLERANCE:.1e}: {verdict}")
    if not right:
        sys.exit(1)
    if not interpreted:
        torch.backends.cuda.matmul.allow_tf32 = SCHEDULE["precision"] == "tf32"
        ours = triton.testing.do_bench(lambda: matmul(a, b, *rest, out), return_mode="median")
        times = f"{ours * 1e3:.1f} us"
        if a.element_size() > 1:
            theirs = triton.testing.do_bench(lambda: torch_matmul(a, b, *rest), return_mode="median")
            times += f", torch {theirs * 1e3:.1f} us"
        print(f"{times} (L2 cleared before each call; launch gaps are inside)")


if __name__ == "__main__":
    main()
'''
