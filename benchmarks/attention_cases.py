"""Every kind of attention that the operator takes, at sizes that find mistakes: what check_attention runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verify_job import Case

from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.types import Workload

Found = tuple[str, Workload]

CAUSAL = {"causal": "bottom_right"}

ABSORBED: dict[str, Any] = {"kv_heads": 1, "v_dim": 512, "kv_shared": True, "scale": 0.0722}

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "square": (2, 4, 256, 256, 64),
    "ragged": (1, 3, 333, 333, 128),
    "prime lengths": (1, 7, 1009, 1013, 64),
    "few keys": (1, 4, 300, 77, 64),
    "chunked prefill": (1, 4, 200, 700, 128),
    "rows without keys": (1, 2, 300, 130, 128),
    "one query": (3, 8, 1, 1000, 128),
    "five queries": (2, 8, 5, 777, 128),
    "one key": (1, 2, 100, 1, 64),
    "many heads": (64, 16, 130, 130, 64),
}

HEADS = (8, 16, 32, 40, 64, 65, 72, 80, 96, 128, 160, 192, 256, 272, 512)

FEATURES: dict[str, dict[str, Any]] = {
    "window": {**CAUSAL, "window": 100},
    "window of one": {**CAUSAL, "window": 1},
    "window alone": {"window": 150},
    "soft cap": {**CAUSAL, "softcap": 5.0},
    "window and soft cap": {**CAUSAL, "window": 200, "softcap": 20.0},
    "scale": {"scale": 1.0},
    "bool mask": {"mask": "bool"},
    "mask of keys": {"mask": "bool", "mask_dims": "bk"},
    "additive mask": {"mask": "additive"},
    "heads innermost": {"mask": "additive", "mask_dims": "qkh"},
    "slopes": {**CAUSAL, "alibi": True},
    "sinks": {**CAUSAL, "sinks": True, "window": 64},
}

LAYOUTS: dict[str, Any] = {
    "bshd": "bshd",
    "merged": dict.fromkeys("qkv", "strided:384000,64,768,1"),
    "heads repeat": {"k": "strided:32000,0,64,1", "v": "strided:32000,0,64,1"},
    "keys along the sequence": {"k": "strided:128000,32000,1,500"},
    "off by one": {"q": "bhsd+1", "k": "bhsd+1", "v": "bhsd+3", "out": "strided:131000,32500,65,1+1"},
}


def coverage() -> list[Case]:
    """The cases, each with an id that counts them."""
    found = [*_shapes(), *_features(), *_forms(), *_gradients(), *_absorbed()]
    return [Case(f"a{number:03}", tag, workload) for number, (tag, workload) in enumerate(found)]


def _shapes() -> Iterator[Found]:
    for name, sizes in SHAPES.items():
        for causal in (None, "top_left", "bottom_right"):
            yield f"{name} {causal or 'full'}", attention_workload(*sizes, causal=causal, lse=True)
    for head_dim in HEADS:
        yield f"heads of {head_dim}", attention_workload(1, 4, 300, 300, head_dim, "fp16", layout="bshd", **CAUSAL)
    yield "heads of 192 and 128", attention_workload(1, 4, 300, 300, 192, v_dim=128, **CAUSAL)
    yield "far offsets", attention_workload(3, 33, 180000, 64, 128)
    yield "more heads than a grid has layers", attention_workload(2048, 33, 16, 16, 16)


def _features() -> Iterator[Found]:
    for name, options in FEATURES.items():
        for dtype in ("bf16", "fp16", "fp32"):
            yield f"{name} {dtype}", attention_workload(2, 8, 300, 400, 64, dtype, kv_heads=2, lse=True, **options)
    for name, layout in LAYOUTS.items():
        yield f"layout: {name}", attention_workload(2, 4, 500, 500, 64, layout=layout, **CAUSAL)
    for dtype in ("fp8e4m3", "fp8e5m2"):
        yield dtype, attention_workload(2, 4, 300, 500, 128, dtype, scaling="tensor", **CAUSAL)
    for budget in (1e-2, 1e-3, 1e-4):
        yield f"fp32 within {budget}", attention_workload(1, 4, 300, 300, 64, "fp32", error_budget=budget)


def _forms() -> Iterator[Found]:
    for name, options in ({"plain": {}} | FEATURES).items():
        if "mask" not in options:
            yield f"packed, {name}", attention_workload(7, 8, 300, 300, 64, kv_heads=2, packed=(900, 900), **options)
            yield f"paged, {name}", attention_workload(5, 8, 1, 777, 128, kv_heads=2, page=16, **options)
    yield "packed, more keys", attention_workload(5, 4, 60, 400, 128, packed=(150, 1100), **CAUSAL)
    for page in (16, 48, 64, 256):
        yield f"pages of {page}", attention_workload(5, 8, 2, 1000, 128, kv_heads=2, page=page, **CAUSAL)
    yield "absorbed", attention_workload(3, 128, 1, 1111, 576, **ABSORBED)
    yield "absorbed, paged", attention_workload(3, 16, 1, 1111, 576, page=64, **ABSORBED)


def _absorbed() -> Iterator[Found]:
    yield "absorbed, paged, all heads", attention_workload(5, 128, 1, 1000, 576, page=64, lse=True, **ABSORBED)
    yield "absorbed, pages of 32", attention_workload(5, 70, 1, 777, 576, page=32, **ABSORBED)
    yield "absorbed, drafts", attention_workload(4, 128, 2, 900, 576, page=64, **CAUSAL, **ABSORBED)
    yield "absorbed, drafts, fp16", attention_workload(4, 20, 3, 700, 576, "fp16", lse=True, **CAUSAL, **ABSORBED)
    yield "absorbed, several key heads", attention_workload(2, 64, 1, 640, 576, **(ABSORBED | {"kv_heads": 2}))
    yield "absorbed, short", attention_workload(2, 64, 1, 40, 576, **ABSORBED)
    yield "absorbed, narrow", attention_workload(3, 64, 1, 1111, 320, **(ABSORBED | {"v_dim": 256}))


def _gradients() -> Iterator[Found]:
    back: dict[str, Any] = {"direction": "backward"}
    for name in ("square", "ragged", "few keys", "chunked prefill", "rows without keys"):
        yield f"backward, {name}", attention_workload(*SHAPES[name], deterministic=True, **CAUSAL, **back)
    for name, sizes in SHAPES.items():
        for causal in (None, "top_left", "bottom_right"):
            yield f"backward in any order, {name} {causal or 'full'}", attention_workload(*sizes, causal=causal, **back)
    for dtype in ("bf16", "fp16"):
        heads = attention_workload(2, 8, 700, 700, 128, dtype, kv_heads=2, layout="bshd", **CAUSAL, **back)
        yield f"backward in any order, shared heads {dtype}", heads
    for causal in (None, "bottom_right"):
        parts = attention_workload(2, 4, 1500, 77, 64, kv_heads=2, layout="bshd", causal=causal, **back)
        yield f"backward in any order, queries in parts {causal or 'full'}", parts
    for head_dim in (40, 64, 80, 128, 256):
        yield f"backward, heads of {head_dim}", attention_workload(1, 4, 300, 300, head_dim, kv_heads=2, **back)
    for name, options in FEATURES.items():
        gradient = {"mask_gradient": True} if options.get("mask") == "additive" else {}
        yield f"backward, {name}", attention_workload(2, 4, 200, 300, 64, kv_heads=2, **options, **gradient, **back)
    yield "backward, packed", attention_workload(5, 4, 200, 200, 64, packed=(600, 600), **CAUSAL, **back)
