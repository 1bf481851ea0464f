"""The part of a rendered attention file around its kernel: constants, the function that launches it, and a check."""

from __future__ import annotations

from kernelwright.kernels.attention.layout import Layout
from kernelwright.kernels.attention.operator import plan_attributes
from kernelwright.kernels.attention.workload import Problem, problem_of
from kernelwright.types import Schedule, Workload

TITLE = "An attention kernel"

_DTYPES = {
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "fp32": "torch.float32",
    "fp8e4m3": "torch.float8_e4m3fn",
    "fp8e5m2": "torch.float8_e5m2",
}


def operand_names(p: Problem) -> list[str]:
    """The function's parameters after q, k and v."""
    named = {
        "mask": p.mask,
        "alibi": p.alibi,
        "sinks": p.sinks,
        "cu_q": p.packed,
        "cu_k": p.packed,
        "block_table": p.page,
        "lengths": p.page,
        **dict.fromkeys(("q_scale", "k_scale", "v_scale"), p.scaling),
        **dict.fromkeys(("forward_out", "lse", "d_out"), p.backward),
    }
    return [name for name, there in named.items() if there]


def checks_itself(p: Problem) -> bool:
    """Whether the file can make its own operands and right answer: for forwards of sequences that lie in one piece."""
    return not (p.packed or p.page or p.scaling or p.backward or p.kv_shared)


def memory_order(layout: Layout) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
    """(dimensions from the outermost to the innermost, stride of the innermost, elements between one line and the next,
    dimensions that repeat)."""
    strides, shape = layout.strides, layout.shape
    repeated = tuple(i for i, step in enumerate(strides) if step == 0)
    order = tuple(sorted(range(len(shape)), key=lambda i: (-strides[i], i)))
    lines = [i for i in order if i not in repeated]
    inner = strides[lines[-1]] if lines else 1
    gap = strides[lines[-2]] - inner * shape[lines[-1]] if len(lines) > 1 else 0
    return order, inner, max(gap, 0), repeated


def constants(workload: Workload, schedule: Schedule, tolerance: float) -> str:
    """Sizes, schedule, types and layouts as Python assignments."""
    p = problem_of(workload)
    knobs = ", ".join(f"{name!r}: {value!r}" for name, value in schedule.knobs.items())
    layouts = {name: memory_order(getattr(p, name)) for name in ("q", "k", "v", "out")}
    return f"""
BATCH, HEADS, KV_HEADS, QUERIES, KEYS = {p.batch}, {p.heads}, {p.kv_heads}, {p.q_length}, {p.kv_length}
HEAD_DIM, V_DIM = {p.head_dim}, {p.v_dim}
TEMPLATE = {schedule.template!r}
SCHEDULE = {{{knobs}}}
ATTRIBUTES = {plan_attributes(workload)!r}
DTYPE, OUT_DTYPE = {_DTYPES[p.dtype]}, {_DTYPES[p.out_dtype]}
# dimensions of the view from the outermost in memory to the innermost, stride of the innermost, elements between one
# line and the next, dimensions that repeat
LAYOUTS = {layouts!r}
# largest relative error (Frobenius norm, against fp64) with which a result counts as right
TOLERANCE = {tolerance!r}
"""


def harness(workload: Workload) -> list[str]:
    """The code after the kernel's own, one part for each item."""
    p = problem_of(workload)
    parts = [_STRIDED, _function(p)]
    return [*parts, _CHECK, _operands(p), _MAIN] if checks_itself(p) else [*parts, _NO_CHECK]


_STRIDED = '''
def strided(name, shape, dtype, device):
    """An uninitialised tensor of that shape, which lies in memory as LAYOUTS[name] says."""
    order, inner, gap, repeated = LAYOUTS[name]
    strides, step, first = [0] * len(shape), inner, True
    for dim in reversed(order):
        if dim not in repeated:
            strides[dim] = step
            step = step * max(shape[dim], 1) + (gap if first else 0)
            first = False
    return torch.empty(step + inner, dtype=dtype, device=device).as_strided(shape, strides)
'''


def _function(p: Problem) -> str:
    names = operand_names(p)
    parameters = ", ".join(["q", "k", "v", *names, "out=None"])
    inputs = ", ".join(f'"{name.removeprefix("forward_")}": {name}' for name in ["q", "k", "v", *names])
    shape = "(*q.shape[:-1], v.shape[-1])"
    if p.backward:
        made = "tuple(torch.empty_like(x) for x in (q, k, v))"
        made += " + (torch.empty_like(mask),)" if p.mask_gradient else ""
        result = "(dq, dk, dv, d_mask)" if p.mask_gradient else "(dq, dk, dv)"
    else:
        made, result = f'strided("out", {shape}, OUT_DTYPE, q.device)', "out"
        rows = "(q.shape[1], q.shape[0])" if p.packed else "q.shape[:3]"
        made = f"({made}, torch.empty({rows}, device=q.device))" if p.lse else made
        result = "(out, lse)" if p.lse else "out"
    return f'''
def attention({parameters}):
    """{result}, with the layouts of LAYOUTS.

    The tiles were chosen for {p.q_length} queries and {p.kv_length} keys of {p.batch} times {p.heads} heads of
    {p.head_dim}; other sizes are right, but may be slow."""
    inputs = {{{inputs}}}
    if out is None:
        out = {made}
    for kernel, grid, args, options in plan(inputs, out, SCHEDULE, ATTRIBUTES):
        kernel[grid](*args, **options)
    return out
'''


_CHECK = '''
def torch_attention(q, k, v, mask=None, alibi=None, sinks=None):
    """(out, logarithm of the denominator) by torch, in the type of q."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * ATTRIBUTES.get("scale", HEAD_DIM**-0.5)
    cap, window, causal = (ATTRIBUTES.get(name) for name in ("softcap", "window", "causal"))
    s = cap * torch.tanh(s / cap) if cap else s
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    shift = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    rows = shift + torch.arange(q.shape[2], device=q.device)[:, None]
    columns = torch.arange(k.shape[2], device=q.device)
    s = s - alibi[:, None, None] * (rows - columns).abs() if alibi is not None else s
    s = s.masked_fill(columns > rows, -torch.inf) if causal else s
    s = s.masked_fill(columns <= rows - window, -torch.inf) if window else s
    terms = s
    if sinks is not None:
        terms = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(terms, -1)
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None]) @ v, lse


def relative_error(found, wanted):
    """Frobenius norm of the difference over that of the right answer; NaN where a result was not written."""
    same = wanted.isinf() & (found == wanted)
    found, wanted = found.double().masked_fill(same, 0), wanted.masked_fill(same, 0)
    size, difference = wanted.norm().item(), (found - wanted).norm().item()
    return difference / size if size else difference
'''


def _operands(p: Problem) -> str:
    lines = []
    if p.mask:
        sizes = dict(zip("bhqk", ("batch", "heads", "queries", "keys"), strict=True))
        shape = ", ".join(sizes[letter] if letter in p.mask_dims else "1" for letter in "bhqk")
        drawn = f"torch.randn({shape}, device=device)"
        made = f"{drawn} > -1" if p.mask == "bool" else f"{drawn}.to(dtype)"
        lines.append(f"        ({made}).expand(batch, heads, queries, keys),")
    lines += ["        torch.rand(heads, device=device),"] if p.alibi else []
    lines += ["        torch.randn(heads, device=device),"] if p.sinks else []
    body = "\n".join(["    return {", *(_named(p, lines)), "    }"])
    return f'''
def operands(batch, heads, queries, keys, dtype, device):
    """What attention takes after q, k and v, random, by name."""
{body}
'''


def _named(p: Problem, lines: list[str]) -> list[str]:
    return [f'        "{name}": {line.strip()}' for name, line in zip(operand_names(p), lines, strict=True)]


_NO_CHECK = """
if __name__ == "__main__":
    print("Import attention from this file; operands of this kind are checked by `kernelwright tune`, not by the file.")
"""

_MAIN = """
def main():
    interpreted = triton.knobs.runtime.interpret
    parser = argparse.ArgumentParser(description="Check the kernel against fp64, and time it on a GPU.")
    parser.add_argument("sizes", nargs="*", type=int, metavar="QUERIES KEYS", help="default: those it was made for")
    sizes = parser.parse_args().sizes
    if sizes and len(sizes) != 2:
        parser.error(f"give both the queries and the keys or none, got {len(sizes)} numbers")
    if not interpreted and not torch.cuda.is_available():
        parser.error("there is no GPU here; set TRITON_INTERPRET=1 to check the kernel on the CPU, at small sizes")
    # The interpreter is slow, so that it gets sizes of the same alignment; and its bf16 products are wrong.
    queries, keys = sizes or [s if s <= 192 or not interpreted else 128 + s % 64 for s in (QUERIES, KEYS)]
    batch, heads, kv_heads = BATCH, HEADS, KV_HEADS
    if interpreted and batch * heads > 4:
        batch, kv_heads, heads = 1, min(KV_HEADS, 2), min(KV_HEADS, 2) * min(HEADS // KV_HEADS, 2)
    device = "cpu" if interpreted else "cuda"
    dtype, out_dtype = (torch.float16 if interpreted and t == torch.bfloat16 else t for t in (DTYPE, OUT_DTYPE))
    torch.manual_seed(0)
    q = strided("q", (batch, heads, queries, HEAD_DIM), dtype, device).normal_()
    k, v = (
        strided(name, (batch, kv_heads, keys, width), dtype, device) for name, width in (("k", HEAD_DIM), ("v", V_DIM))
    )
    for x, name in ((k, "k"), (v, "v")):
        x[tuple(slice(0, 1) if i in LAYOUTS[name][3] else slice(None) for i in range(4))].normal_()
    rest = operands(batch, heads, queries, keys, dtype, device)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in rest.items()}
    wanted = torch_attention(q.double(), k.double(), v.double(), **wide)
    out = strided("out", (batch, heads, queries, V_DIM), out_dtype, device).fill_(float("nan"))
    lse = torch.full((batch, heads, queries), float("nan"), device=device)
    target = (out, lse) if ATTRIBUTES.get("lse") else out
    attention(q, k, v, *rest.values(), target)
    error = relative_error(out, wanted[0])
    if ATTRIBUTES.get("lse"):
        error = max(error, relative_error(lse, wanted[1]), key=lambda x: (x != x, x))
    right = error <= TOLERANCE
    verdict = "right" if right else "WRONG"
    print(f"Sq={queries} Skv={keys} {dtype}: relative error {error:.2e}, limit {TOLERANCE:.1e}: {verdict}")
    if not right:
        sys.exit(1)
    if not interpreted:
        ours = triton.testing.do_bench(lambda: attention(q, k, v, *rest.values(), target), return_mode="median")
        print(f"{ours * 1e3:.1f} us (L2 cleared before each call; launch gaps are inside)")


if __name__ == "__main__":
    main()
"""
