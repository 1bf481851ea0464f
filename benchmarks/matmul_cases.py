"""Workloads that together cover what a matmul can be: types, scalings, layouts, batches, steps, sizes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from verify_job import Case

from kernelwright.kernels.matmul.workload import (
    ACTIVATIONS,
    FLOATS,
    LAYOUTS,
    OPERANDS,
    PAIRS,
    matmul_workload,
    problem_of,
)
from kernelwright.types import Workload

SIZES = (
    (1, 1, 1),
    (3, 5, 7),
    (127, 129, 1),
    (17, 4099, 333),
    (511, 1024, 96),
    (2048, 1, 256),
    (1, 1, 65537),
    (1021, 1031, 1033),
    (1, 4096, 4104),
    (16, 4096, 4096),
    (40, 2048, 8192),
    (64, 64, 131072),
    (2048, 2048, 2048),
    (1024, 50257, 768),
    (20000, 128, 64),
)
"""M, N, K of plain bf16 products: one, primes, few rows, few columns, long K, whole waves, a vocabulary, many rows."""

CHAINS = 16
MOST_STEPS = 5
MOST_FACTORS = 2
"""Steps that multiply by random numbers: more make a few elements so large that the metric is about them alone."""


def coverage() -> list[Case]:
    """The cases, in an order in which the commonest faults show first."""
    kinds = (
        _sizes,
        _empty,
        _letters,
        _strides,
        _precisions,
        _steps,
        _chains,
        _batches,
        _groups,
        _eight_bits,
        _four_bits,
        _shared_out,
        _limits,
        _far_offsets,
    )
    return [
        Case(f"{kind.__name__[1:]}_{number:02}", tag, workload, ends=ends)
        for kind in kinds
        for number, (tag, workload, ends) in enumerate(map(_completed, kind()))
    ]


def label(workload: Workload) -> str:
    """A workload in as few characters as tell it: MxNxK, types, scaling, letters, layouts that are not dense, steps."""
    p, dims = problem_of(workload), workload.dims
    size = "x".join(str(dims[name]) for name in ("M", "N", "K"))
    many = "".join(f"{name.lower()}{dims[name]}*" for name in ("B", "G") if name in dims)
    types = [p.a_dtype] + ([p.b_dtype] if p.b_dtype != p.a_dtype else [])
    types += [f">{p.out_dtype}"] if p.out_dtype != p.a_dtype else []
    plain = {(a, b): letters for letters, (a, b) in LAYOUTS.items()}
    texts = workload.layouts
    letters = plain.get((texts["a"], texts["b"]), f"a:{texts['a']},b:{texts['b']}")
    rest = [letters] + ([f"out:{texts['out']}"] if texts["out"] != "row" else [])
    rest += [f"{name}={value}" for name, value in workload.attributes.items()]
    rest += [f"err<{workload.error_budget:g}"] if workload.error_budget is not None else []
    return f"{many}{size} {'/'.join(types)} {' '.join(rest)}{''.join('+' + step for step in workload.epilogue)}"


Found = tuple[str, Workload] | tuple[str, Workload, tuple[int, ...]]


def _completed(found: Found) -> tuple[str, Workload, tuple[int, ...]]:
    return found if len(found) == 3 else (*found, ())


def laid_out(workload: Workload, **layouts: str) -> Workload:
    """The workload with other layouts of a, b or out."""
    changed = Workload.from_json({**workload.to_json(), "layouts": {**workload.layouts, **layouts}})
    problem_of(changed)
    return changed


def _sizes() -> Iterator[Found]:
    for m, n, k in SIZES:
        yield "size", matmul_workload(m, n, k)


def _empty() -> Iterator[Found]:
    yield "no row", matmul_workload(0, 64, 64)
    yield "no column", matmul_workload(64, 0, 64)
    yield "K=0 is all zeros", matmul_workload(64, 48, 0)
    yield "K=0 is the epilogue of zeros", matmul_workload(16, 128, 0, epilogue=("bias", "gelu", "residual"))
    yield "K=0, batch", matmul_workload(9, 33, 0, batch=3)
    yield "no batch", matmul_workload(16, 16, 16, batch=0)
    yield "no token", matmul_workload(0, 64, 64, groups=4)


def _letters() -> Iterator[Found]:
    for letters, dtype in itertools.product(LAYOUTS, ("bf16", "fp32")):
        yield "letters", matmul_workload(192, 320, 264, dtype, letters)
        yield "letters, ragged", matmul_workload(130, 71, 515, dtype, letters)
    for letters in LAYOUTS:
        yield "letters, few rows", matmul_workload(8, 1024, 2048, "bf16", letters, ("bias",))


def _strides() -> Iterator[Found]:
    plain = matmul_workload(133, 165, 245)
    round_sizes = matmul_workload(256, 192, 320)
    few = matmul_workload(16, 1024, 2048)
    yield "gaps between rows", laid_out(plain, a="row:248", b="col:256", out="row:168")
    yield "gaps, nn", laid_out(plain, a="row:256", b="row:200", out="row:176")
    yield "gaps that TMA cannot have", laid_out(plain, a="row:247", b="col:249", out="row:167")
    yield "result by columns", laid_out(plain, out="col")
    yield "result by columns, aligned", laid_out(round_sizes, out="col:264")
    yield "bases off by one element", laid_out(round_sizes, a="row+1", b="col+3", out="row+5")
    yield "only the result's base off", laid_out(round_sizes, out="row+1")
    yield "no unit stride", laid_out(round_sizes, a="strided:960,3", b="strided:2,650")
    yield "result without unit stride", laid_out(round_sizes, out="strided:400,2")
    yield "one row again and again", laid_out(round_sizes, a="strided:0,1")
    yield "overlapping rows", laid_out(round_sizes, a="strided:1,1")
    yield "few rows, gaps", laid_out(few, a="row:2056", b="col:2056", out="row:1032")
    yield "few rows, base off", laid_out(few, b="col+1")


def _precisions() -> Iterator[Found]:
    for budget in (None, 1e-5, 1e-4, 1e-3, 5e-3):
        yield "fp32 within an error", matmul_workload(200, 264, 1032, "fp32", error_budget=budget)
    yield "fp32, few rows", matmul_workload(5, 512, 4096, "fp32", error_budget=1e-3)
    yield "fp32, ragged", matmul_workload(511, 1023, 97, "fp32", "nn", error_budget=5e-3)
    for dtype, out in itertools.permutations(FLOATS, 2):
        yield "result of another type", matmul_workload(150, 136, 520, dtype, out_dtype=out)


def _steps() -> Iterator[Found]:
    for number, step in enumerate((*OPERANDS, *ACTIVATIONS, *PAIRS)):
        dtype = ("bf16", "fp16", "fp32")[number % 3]
        yield f"step {step}", matmul_workload(150, 200, 328, dtype, epilogue=(step,))
    yield "pair, few rows", matmul_workload(8, 2048, 1024, epilogue=("swiglu",))
    yield "pair, ragged", matmul_workload(77, 2 * 131, 333, "fp16", "nn", ("bias", "geglu", "residual"))
    yield "softcap", matmul_workload(4, 5000, 512, epilogue=("scale", "tanh", "scale"))


def _chains() -> Iterator[Found]:
    rng = random.Random(3)
    shapes = (
        {"m": 150, "n": 264, "k": 520},
        {"m": 16, "n": 1024, "k": 2048},
        {"m": 64, "n": 128, "k": 8192},
        {"m": 65, "n": 130, "k": 129, "batch": 3},
    )
    for number in range(CHAINS):
        dtype, letters = rng.choice(FLOATS), rng.choice(tuple(LAYOUTS))
        yield "chain", matmul_workload(**shapes[number % 4], dtype=dtype, layout=letters, epilogue=random_chain(rng))


def random_chain(rng: random.Random) -> tuple[str, ...]:
    """A legal epilogue of 2 to MOST_STEPS steps."""
    steps: list[str] = []
    for _ in range(rng.randint(2, MOST_STEPS)):
        paired = any(step in PAIRS for step in steps)
        matrix = any(OPERANDS.get(step) == "mn" for step in steps)
        factors = sum(step in OPERANDS and not step.startswith(("bias", "residual")) for step in steps)
        choices = [*ACTIVATIONS, "bias", "bias_m", "residual"]
        choices += [] if paired or matrix else [*PAIRS] * 2
        choices += ["scale", "scale_vec", "scale_m", "multiply", "gelu_backward"] if factors < MOST_FACTORS else []
        steps.append(rng.choice(choices))
    return tuple(steps)


def _batches() -> Iterator[Found]:
    small = matmul_workload(65, 72, 80, batch=5)
    yield "batch", small
    yield "batch, ragged", matmul_workload(27, 27, 129, "fp16", batch=67)
    yield (
        "batch, nn, bias and residual",
        matmul_workload(49, 49, 32, "fp16", "nn", ("scale", "bias", "residual"), batch=100),
    )
    yield "batch of one", matmul_workload(96, 128, 64, batch=1)
    yield "batch, tn", matmul_workload(130, 96, 200, "fp32", "tn", batch=3)
    yield "batch, pair", matmul_workload(48, 256, 128, epilogue=("swiglu",), batch=7)
    yield "batch, long K", matmul_workload(16, 64, 8192, batch=4)
    yield "b is the same for all", laid_out(small, b="col@0")
    yield "a is the same for all", laid_out(small, a="row@0")
    yield "heads side by side", laid_out(matmul_workload(8, 512, 128, "bf16", "nn", batch=16), a="row:3072@192")
    yield "results side by side", laid_out(small, out="row:360@72")
    yield "more than 65535", matmul_workload(16, 16, 16, "fp16", "nn", batch=65537)


def _groups() -> Iterator[Found]:
    yield "experts", matmul_workload(640, 256, 512, groups=5)
    yield "experts without tokens", matmul_workload(300, 264, 200, groups=6), (0, 17, 17, 170, 300, 300)
    yield "one expert has all", matmul_workload(200, 128, 256, groups=4), (0, 200, 200, 200)
    yield "more experts than tokens", matmul_workload(20, 512, 1024, groups=64)
    yield "256 experts", matmul_workload(1024, 512, 512, groups=256)
    yield "one group", matmul_workload(130, 128, 128, groups=1)
    yield "experts, nn, fp16", matmul_workload(500, 384, 320, "fp16", "nn", groups=8)
    yield "experts, swiglu", matmul_workload(500, 512, 320, epilogue=("swiglu",), groups=8)
    yield "experts, chain", matmul_workload(257, 256, 128, epilogue=("scale_m", "silu", "residual"), groups=3)
    yield "experts, ragged", matmul_workload(129, 135, 77, groups=3)
    yield "experts, fp32", matmul_workload(129, 136, 80, "fp32", groups=3)


def _eight_bits() -> Iterator[Found]:
    for scaling, m in itertools.product(("tensor", "row", "block128"), (1, 16, 300)):
        yield "fp8", matmul_workload(m, 520, 1024, "fp8e4m3", scaling=scaling)
    yield "fp8, other types", matmul_workload(200, 256, 512, "fp8e5m2", scaling="tensor", out_dtype="fp16")
    yield "fp8, mixed", matmul_workload(200, 256, 512, "fp8e4m3", b_dtype="fp8e5m2", scaling="row", out_dtype="fp32")
    yield "fp8, e5m2 blocks", matmul_workload(77, 200, 256, "fp8e5m2", scaling="block128", out_dtype="fp32")
    yield "fp8, ragged", matmul_workload(77, 131, 333, "fp8e4m3", scaling="row")
    yield "fp8, chain", matmul_workload(150, 256, 512, "fp8e4m3", epilogue=("bias", "silu", "residual"), scaling="row")
    yield "fp8, pair", matmul_workload(64, 512, 512, "fp8e4m3", epilogue=("swiglu",), scaling="tensor")
    yield "fp8 blocks, long K", matmul_workload(16, 256, 7168, "fp8e4m3", scaling="block128")
    for letters in ("nn", "tn"):
        yield "fp8, letters", matmul_workload(160, 256, 384, "fp8e4m3", letters, scaling="tensor")
        yield "int8, letters", matmul_workload(160, 256, 384, "int8", letters, scaling="row")
    for scaling, m in itertools.product(("tensor", "row"), (1, 16, 300)):
        yield "int8", matmul_workload(m, 520, 1024, "int8", scaling=scaling)
    yield "int8, ragged", matmul_workload(33, 130, 77, "int8", scaling="row", out_dtype="fp32")
    yield "int8, long K", matmul_workload(16, 256, 14336, "int8", epilogue=("bias",), scaling="row")


def _four_bits() -> Iterator[Found]:
    for group, m in itertools.product((32, 64, 128), (1, 16, 200)):
        dtype = "fp16" if group == 64 else "bf16"
        yield "w4a16", matmul_workload(m, 520, 1024, dtype, b_dtype="int4", scaling=f"group:{group}")
    yield "w4a16, long K", matmul_workload(16, 256, 14336, b_dtype="int4", scaling="group:128")
    yield (
        "w4a16, chain",
        matmul_workload(40, 264, 512, b_dtype="int4", scaling="group:128", epilogue=("bias", "silu", "multiply")),
    )
    yield "w4a16, pair", matmul_workload(16, 512, 512, b_dtype="int4", scaling="group:128", epilogue=("swiglu",))
    mx = (("fp8e4m3", "fp8e4m3"), ("fp8e5m2", "fp4"), ("fp4", "fp4"), ("fp8e4m3", "fp4"), ("fp4", "fp8e4m3"))
    for (a, b), m in itertools.product((*mx, ("bf16", "fp4"), ("fp16", "fp4")), (16, 150)):
        yield "mx", matmul_workload(m, 264, 512, a, b_dtype=b, scaling="mx")
    for a, m in itertools.product(("fp4", "bf16", "fp16"), (16, 150)):
        yield "nvfp4", matmul_workload(m, 264, 512, a, b_dtype="fp4", scaling="nvfp4")
    yield "mx, pair", matmul_workload(40, 528, 512, "fp8e4m3", b_dtype="fp4", scaling="mx", epilogue=("bias", "swiglu"))
    yield "nvfp4, long K", matmul_workload(33, 130, 7168, "fp4", b_dtype="fp4", scaling="nvfp4", epilogue=("residual",))
    yield "w4a16, one column", matmul_workload(5, 1, 128, "fp16", b_dtype="int4", scaling="group:128")
    yield "mx, one column", matmul_workload(5, 1, 32, "fp16", b_dtype="fp4", scaling="mx")
    yield "mx, ragged", matmul_workload(33, 131, 96, "bf16", b_dtype="fp4", scaling="mx", epilogue=("bias",))


def _shared_out() -> Iterator[Found]:
    yield "shared out", matmul_workload(2048, 1280, 8192)
    for letters, dtype in zip(LAYOUTS, ("bf16", "fp16", "bf16", "fp16"), strict=True):
        yield "shared out, letters", matmul_workload(1160, 1352, 1096, dtype, letters)
    yield "shared out, ragged", matmul_workload(729, 1301, 1157, "fp16", epilogue=("bias", "gelu"), out_dtype="fp32")
    yield "shared out, nn", matmul_workload(1000, 3072, 768, "bf16", "nn", ("bias", "gelu_tanh"))
    yield "shared out, two waves", matmul_workload(2048, 4672, 1024, epilogue=("residual",))
    yield "shared out, one tile", matmul_workload(128, 256, 65536, epilogue=("scale_m", "silu"))
    yield "shared out, fp8", matmul_workload(1024, 1296, 4096, "fp8e4m3", epilogue=("bias",), scaling="row")
    chain = ("bias", "gelu", "multiply", "residual", "tanh")
    yield "shared out, long chain", matmul_workload(1000, 1100, 520, "fp16", epilogue=chain)
    yield "shared out, long chain, nn", matmul_workload(1000, 2304, 1096, "bf16", "nn", ("gelu", "scale_m", "sigmoid"))
    yield "shared out, by columns", laid_out(matmul_workload(640, 712, 2048), out="col:648")


def _limits() -> Iterator[Found]:
    shape: Mapping[str, Any] = {"m": 64, "n": 256, "k": 16384}
    for attributes in ({"deterministic": True}, {"workspace_bytes": 0}, {"workspace_bytes": 2**20}):
        yield "limited", matmul_workload(**shape, attributes=attributes)
    yield "limited", matmul_workload(16, 1024, 4096, epilogue=("bias",), attributes={"deterministic": True})


def _far_offsets() -> Iterator[Found]:
    tall = matmul_workload(12000, 64, 128)
    yield "a past 2^31", laid_out(tall, a="row:200000")
    yield "result past 2^31", laid_out(tall, out="row:200000")
    yield "b past 2^31", laid_out(matmul_workload(64, 12000, 128), b="col:200000")
    yield "b past 2^31, nn", laid_out(matmul_workload(64, 128, 12000, "bf16", "nn"), b="row:200000")
    yield "few rows, b past 2^31", laid_out(matmul_workload(8, 12000, 128), b="col:200000")
    yield "a batch past 2^31", laid_out(matmul_workload(64, 64, 64, batch=3), a="row@1200000000")
    yield "result past 2^31, chain", matmul_workload(70000, 32768, 64, epilogue=("scale", "relu"))
