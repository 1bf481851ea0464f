"""The part of a rendered conv2d file around its kernel: constants, the function that launches it, and a check."""

from __future__ import annotations

from kernelwright.kernels.conv2d.inputs import operand_name
from kernelwright.kernels.conv2d.workload import OPERANDS, Problem, complete_attributes, problem_of
from kernelwright.types import Schedule, Workload

TITLE = "A convolution kernel"

_DTYPES = {
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "fp32": "torch.float32",
    "fp8e4m3": "torch.float8_e4m3fn",
    "fp8e5m2": "torch.float8_e5m2",
    "int8": "torch.int8",
    "int32": "torch.int32",
}

_STEPS = {
    "bias": "x + {}[:, None, None]",
    "scale_vec": "x * {}[:, None, None]",
    "residual": "x + {}",
    "multiply": "x * {}",
    "relu": "torch.relu(x)",
    "relu6": "torch.nn.functional.relu6(x)",
    "silu": "torch.nn.functional.silu(x)",
    "gelu": "torch.nn.functional.gelu(x)",
    "gelu_tanh": 'torch.nn.functional.gelu(x, approximate="tanh")',
    "hardswish": "torch.nn.functional.hardswish(x)",
    "sigmoid": "torch.sigmoid(x)",
    "tanh": "torch.tanh(x)",
}
"""Each step of an epilogue as torch runs it on x."""


def parameters(problem: Problem) -> list[str]:
    """What the file's function takes: the two operands, then what the epilogue's steps read, in their order."""
    steps = problem.epilogue
    named = [operand_name(steps, place) for place, step in enumerate(steps) if step in OPERANDS]
    return [*("d_out" if name == "out" else name for name in sorted(problem.operands, key="xout w".find)), *named]


def constants(workload: Workload, schedule: Schedule, tolerance: float) -> str:
    """Sizes, schedule, types and layouts as Python assignments."""
    p = problem_of(workload)
    knobs = ", ".join(f"{name!r}: {value!r}" for name, value in schedule.knobs.items())
    layouts = {n: x.strides if x.order == "strided" else x.order for n, x in p.layouts.items()}
    dtypes = ", ".join(f'"{name}": {_DTYPES[p.dtypes[name]]}' for name in ("x", "w", "out"))
    return f"""
N, C, H, W, K, R, S = {p.n}, {p.c}, {p.h}, {p.w}, {p.k}, {p.r}, {p.s}
TEMPLATE = {schedule.template!r}
SCHEDULE = {{{knobs}}}
ATTRIBUTES = {complete_attributes(workload)!r}
EPILOGUE = {p.epilogue!r}
# of x [N, C, H, W], w and out [N, K, P, Q]; a gradient's d_out is like out
DTYPES = {{{dtypes}}}
# "nhwc" or "nchw", or four strides in elements
LAYOUTS = {layouts!r}
RESULT = {p.result!r}
# largest relative error (Frobenius norm, against fp64) with which a result counts as right
TOLERANCE = {tolerance!r}
"""


def harness(workload: Workload) -> list[str]:
    """The code after the kernel's own, one part for each item."""
    problem = problem_of(workload)
    return [_TENSORS, _function(problem), _reference(problem), _operands(problem), _CHECK, _MAIN]


_TENSORS = '''
def shapes_of(n, c, h, w, k, attributes):
    """Sizes of x, w and out."""

    def out_size(size, taps, axis):
        names = ("stride", "pad", "dilation", "output_pad")
        stride, pad, apart, extra = (attributes[f"{name}_{axis}"] for name in names)
        reach = apart * (taps - 1)
        if attributes["transposed"]:
            return (size - 1) * stride - 2 * pad + reach + extra + 1
        return (size + 2 * pad - reach - 1) // stride + 1

    outer, inner = (c, k) if attributes["transposed"] else (k, c)
    return {
        "x": (n, c, h, w),
        "w": (outer, inner // attributes["groups"], R, S),
        "out": (n, k, out_size(h, R, "h"), out_size(w, S, "w")),
    }


def strided(name, sizes, dtype, device):
    """An uninitialised tensor with these sizes and the layout of LAYOUTS[name]."""
    layout = LAYOUTS[name]
    if not isinstance(layout, str):
        if tuple(sizes) == shapes_of(N, C, H, W, K, ATTRIBUTES)[name]:
            length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, layout) if size)
            return torch.empty(length, dtype=dtype, device=device).as_strided(sizes, layout)
        layout = "nhwc" if layout[1] == 1 else "nchw"
    kind = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    return torch.empty(sizes, dtype=dtype, device=device, memory_format=kind)
'''

_TEXTS = {
    "out": "out [N, K, P, Q] = epilogue({kind} of x [N, C, H, W] with w)",
    "x": "The gradient of x [N, C, H, W] from d_out [N, K, P, Q] and w; give `out` where x is not {h} x {w}",
    "w": "The gradient of w from x [N, C, H, W] and d_out [N, K, P, Q]",
}

_SIZES = {
    "out": "*x.shape, w.shape[1] * attributes['groups'] if attributes['transposed'] else w.shape[0]",
    "x": "d_out.shape[0], w.shape[1] * attributes['groups'], H, W, d_out.shape[1]",
    "w": "*x.shape, d_out.shape[1]",
}


def _function(p: Problem) -> str:
    names = parameters(p)
    inputs = ", ".join(f'"{name}": {name}' for name in names)
    kind = "transposed convolution" if p.transposed else "convolution"
    text = _TEXTS[p.result].format(kind=kind, h=p.h, w=p.w)
    return f'''
def conv2d({", ".join(names)}, out=None, attributes=ATTRIBUTES):
    """{text}. Layouts: LAYOUTS.

    The tiles were chosen for N={p.n}, C={p.c}, H={p.h}, W={p.w}, K={p.k}; other sizes are right, but may be slow."""
    inputs = {{{inputs}}}
    if out is None:
        sizes = shapes_of({_SIZES[p.result].replace("'", '"')}, attributes)
        out = strided(RESULT, sizes[RESULT], DTYPES[RESULT], {names[0]}.device)
    for kernel, grid, args, options in plan(inputs, out, SCHEDULE, attributes, EPILOGUE):
        kernel[grid](*args, **options)
    return out
'''


_CALLS = {
    "out": "torch.nn.functional.conv2d(x, w, None, *rest)",
    "x": "torch.nn.grad.conv2d_input(sizes, w, d_out, *rest)",
    "w": "torch.nn.grad.conv2d_weight(x, sizes, d_out, *rest)",
}

_TRANSPOSED = "torch.nn.functional.conv_transpose2d(x, w, None, stride, padding, extra, groups, dilation)"


def _reference(p: Problem) -> str:
    names = parameters(p)
    lines = [f"    x = {_TRANSPOSED if p.transposed else _CALLS[p.result]}"]
    left = iter(names[2:])
    for step in p.epilogue:
        lines.append("    x = " + (_STEPS[step].format(next(left)) if step in OPERANDS else _STEPS[step]))
    body = "\n".join(lines)
    pairs = ["stride", "padding", "dilation"] + (["extra"] if p.transposed else [])
    keys = {"stride": "stride", "padding": "pad", "dilation": "dilation", "extra": "output_pad"}
    values = "\n".join(f'    {name} = attributes["{keys[name]}_h"], attributes["{keys[name]}_w"]' for name in pairs)
    rest = "" if p.transposed else '    rest = stride, padding, dilation, attributes["groups"]\n'
    groups = '    groups = attributes["groups"]\n' if p.transposed else ""
    return f'''
def torch_conv2d({", ".join(names)}, sizes, attributes):
    """What conv2d computes, by torch, in the type of its operands; sizes: of the result."""
{values}
{rest}{groups}{body}
    return x
'''


def _operands(p: Problem) -> str:
    """A function that draws what conv2d takes."""
    names = ["d_out" if name == "out" else name for name in p.operands]
    lines = [
        f'        "{name}": fill(strided("{key}", sizes["{key}"], dtypes["{key}"], device)),'
        for name, key in zip(names, p.operands, strict=True)
    ]
    for place, step in enumerate(p.epilogue):
        if step not in OPERANDS:
            continue
        size = 'sizes["out"][1:2]' if OPERANDS[step] == "k" else 'sizes["out"]'
        made = f'torch.empty({size}, dtype=dtypes["out"], device=device)'
        if OPERANDS[step] == "out":
            made = f'strided("out", {size}, dtypes["out"], device)'
        lines.append(f'        "{operand_name(p.epilogue, place)}": fill({made}),')
    body = "\n".join(lines)
    return f'''
def operands(sizes, dtypes, device):
    """What conv2d takes, random."""
    return {{
{body}
    }}
'''


_CHECK = '''
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


def small_sizes():
    """(sizes N, C, H, W, K, groups) that the slow interpreter can do, of the same alignment."""
    groups = ATTRIBUTES["groups"]
    some = min(groups, 2)
    c, k = (some * (size if size <= 64 else 64 + size % 16) for size in (C // groups, K // groups))
    h, w = H, W
    if not ATTRIBUTES["transposed"]:
        spans = {
            axis: max(ATTRIBUTES[f"dilation_{axis}"] * (taps - 1) + 1 - 2 * ATTRIBUTES[f"pad_{axis}"], 1)
            for axis, taps in (("h", R), ("w", S))
        }
        h, w = (
            min(size, spans[axis] + 5 * ATTRIBUTES[f"stride_{axis}"]) for size, axis in ((H, "h"), (W, "w"))
        )
    else:
        h, w = min(h, 6), min(w, 6)
    return (min(N, 2), c, h, w, k), some
'''

_MAIN = """
def main():
    interpreted = triton.knobs.runtime.interpret
    parser = argparse.ArgumentParser(description="Check the kernel against fp64, and time it on a GPU.")
    parser.add_argument("sizes", nargs="*", type=int, metavar="N C H W K", help="default: those it was made for")
    given = parser.parse_args().sizes
    if given and len(given) != 5:
        parser.error(f"give all of N, C, H, W and K or none, got {len(given)} numbers")
    if not interpreted and not torch.cuda.is_available():
        parser.error("there is no GPU here; set TRITON_INTERPRET=1 to check the kernel on the CPU, at small sizes")
    chosen, groups = given or (N, C, H, W, K), ATTRIBUTES["groups"]
    if interpreted and not given:
        chosen, groups = small_sizes()
    attributes = {**ATTRIBUTES, "groups": groups}
    # the interpreter's bf16 products are wrong
    usable = {torch.bfloat16: torch.float16} if interpreted else {}
    dtypes = {name: usable.get(kind, kind) for name, kind in DTYPES.items()}
    device = "cpu" if interpreted else "cuda"
    torch.manual_seed(0)
    sizes = shapes_of(*chosen, attributes)
    inputs = operands(sizes, dtypes, device)
    wanted = torch_conv2d(**{n: x.double() for n, x in inputs.items()}, sizes=sizes[RESULT], attributes=attributes)
    out = strided(RESULT, sizes[RESULT], dtypes[RESULT], device)
    if out.is_floating_point():
        out.fill_(float("nan"))
    conv2d(**inputs, out=out, attributes=attributes)
    error = relative_error(out, wanted)
    right = error <= TOLERANCE
    verdict = "right" if right else "WRONG"
    print(f"N, C, H, W, K = {chosen}, {dtypes[RESULT]}: relative error {error:.2e}, limit {TOLERANCE:.1e}: {verdict}")
    if not right:
        sys.exit(1)
    if not interpreted:
        torch.backends.cudnn.allow_tf32 = SCHEDULE.get("precision") == "tf32"
        torch.backends.cudnn.benchmark = True
        ours = triton.testing.do_bench(lambda: conv2d(**inputs, out=out, attributes=attributes), return_mode="median")
        times = f"{ours * 1e3:.1f} us"
        if all(tensor.element_size() > 1 for tensor in inputs.values()):
            rest = {"sizes": sizes[RESULT], "attributes": attributes}
            theirs = triton.testing.do_bench(lambda: torch_conv2d(**inputs, **rest), return_mode="median")
            times += f", torch {theirs * 1e3:.1f} us"
        print(f"{times} (L2 cleared before each call; launch gaps are inside)")


if __name__ == "__main__":
    main()
"""
