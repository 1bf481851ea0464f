"""Attention kernels as standalone files: they need only torch and triton, run, and tell a wrong result."""

from __future__ import annotations

import ast
import random
import sys
from typing import Any

import pytest

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.render import render
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

SUITABLE = [
    attention_workload(1, 4, 300, 300, 64, causal="bottom_right", lse=True),
    attention_workload(2, 4, 1, 4096, 64, kv_heads=1),
    attention_workload(1, 2, 256, 256, 64, direction="backward"),
    attention_workload(2, 4, 1, 256, 64, kv_heads=2, page=64),
    attention_workload(3, 4, 100, 100, 64, packed=(200, 200)),
    attention_workload(2, 16, 1, 256, 576, kv_heads=1, v_dim=512, kv_shared=True),
]


def a_schedule(workload: Workload, template: str) -> Schedule:
    return random.Random(1).choice(ATTENTION.templates[template].space(workload, H100).members)


@pytest.mark.parametrize("template", sorted(ATTENTION.templates))
def test_needs_only_torch_and_triton(template: str) -> None:
    fitting = [w for w in SUITABLE if len(ATTENTION.templates[template].space(w, H100))]
    assert fitting
    for workload in fitting:
        source = render(workload, a_schedule(workload, template))
        compile(source, "kernel.py", "exec")
        nodes = list(ast.walk(ast.parse(source)))
        found = {n.module.partition(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
        found |= {alias.name.partition(".")[0] for n in nodes if isinstance(n, ast.Import) for alias in n.names}
        assert found - set(sys.stdlib_module_names) == {"torch", "triton"}


RUN: list[dict[str, Any]] = [
    {"causal": "bottom_right", "lse": True, "layout": "bshd", "kv_heads": 2},
    {
        "mask": "additive",
        "alibi": True,
        "sinks": True,
        "layout": {"k": "strided:0,0,40,1", "q": "strided:6000,3000,1,90"},
    },
]


@pytest.mark.parametrize("options", RUN)
def test_runs_on_its_own_and_is_right(options: dict[str, Any], run: Any) -> None:
    workload = attention_workload(2, 4, 40, 70, 32, "bf16", **options)
    done = run(render(workload, a_schedule(workload, "forward")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Sq=40 Skv=70" in done.stdout and "right" in done.stdout


def test_a_wrong_kernel_is_told(run: Any) -> None:
    workload = attention_workload(1, 1, 33, 40, 16, "fp16", softcap=2.0)
    source = render(workload, a_schedule(workload, "forward"))
    line = "s = capped_scores(s, factor, cap)"
    assert line in source
    done = run(source.replace(line, "s = s * factor"), "33", "50")
    assert done.returncode == 1 and "WRONG" in done.stdout, done.stdout + done.stderr
