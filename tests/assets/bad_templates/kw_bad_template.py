"""Kernel generators for tests of building: two that work, and every way of going wrong.

`plan` is a planner of `kernelwright.kernels.build`; the schedule's knob `fault` says what to do.
"""

import os
import time

import torch
import triton
import triton.language as tl


@triton.jit
def copy_tile(src, dst, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(dst + places, tl.load(src + places))


@triton.jit
def matmul_tile(a, b, c, SIZE: tl.constexpr, STEPS: tl.constexpr):
    rows = tl.arange(0, SIZE)
    places = rows[:, None] * SIZE + rows[None, :]
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for _ in tl.range(STEPS):
        acc = tl.dot(tl.load(a + places), tl.load(b + places), acc)
        a += SIZE * SIZE
        b += SIZE * SIZE
    tl.store(c + places, acc)


@triton.jit
def mismatched(a, dst):
    x = tl.load(a + tl.arange(0, 16)) + tl.load(a + tl.arange(0, 32))
    tl.store(dst + tl.arange(0, 32), x)


def meta(dtype=torch.float16):
    return torch.empty(1 << 16, dtype=dtype, device="meta")


def plan(workload, schedule):
    return globals()[f"plan_{schedule.knobs['fault']}"]()


def plan_none():
    return [(copy_tile, (1,), (meta(), meta(), 128), {"num_warps": 1})]


def plan_two_kernels():
    product = (matmul_tile, (1,), (meta(), meta(), meta(torch.float32), 64, 8), {"num_warps": 4, "num_stages": 3})
    return [*plan_none(), product]


def plan_shared_memory():
    args = (meta(), meta(), meta(torch.float32), 128, 8)
    return [(matmul_tile, (1,), args, {"num_warps": 8, "num_stages": 3})]


def plan_threads():
    return [(copy_tile, (1,), (meta(), meta(), 128), {"num_warps": 64})]


def plan_abort():
    os.write(2, b"LLVM ERROR: UNREACHABLE executed at Lowering.cpp:42\n")
    os.abort()


def plan_hang():
    while True:
        time.sleep(60)


def plan_raise():
    raise ValueError("no tile fits")


def plan_syntax():
    compile("def plan(workload, schedule:", "kw_bad_syntax.py", "exec")


def plan_code():
    return [(mismatched, (1,), (meta(), meta()), {})]
