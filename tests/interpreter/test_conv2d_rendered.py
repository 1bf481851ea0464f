"""Rendered convolutions: nothing of ours imported, right when run, and told when wrong."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.render import render
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")


def a_schedule(workload: Workload, template: str) -> Schedule:
    schedules = CONV2D.templates[template].space(workload, H100).sample(random.Random(3), 1)
    assert schedules, f"{template} has no schedule for {workload}"
    return schedules[0]


def run(source: str, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Run the file's main as a program would; its exit status."""
    file = folder / "rendered_conv2d.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("rendered_conv2d", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch.setattr(sys, "argv", [str(file)])
    try:
        module.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


CASES: list[tuple[str, dict[str, Any]]] = [
    ("implicit_gemm", {"padding": 1, "epilogue": ("scale_vec", "bias", "residual", "relu", "bias")}),
    ("implicit_gemm_input_gradient", {"stride": 2, "groups": 2, "direction": "input_gradient"}),
    ("implicit_gemm_input_gradient", {"stride": 2, "transposed": True, "output_padding": 1, "epilogue": ("gelu",)}),
    ("implicit_gemm_weight_gradient", {"padding": 1, "direction": "weight_gradient", "layout": "nchw"}),
    ("depthwise_tile", {"padding": 1, "groups": 24, "k": 24, "epilogue": ("bias", "silu")}),
    ("depthwise_tile", {"stride": 2, "groups": 24, "k": 24, "direction": "weight_gradient"}),
    ("pointwise", {"kernel": 1, "layouts": {"out": "strided:20000,1,800,40"}}),
]


@pytest.mark.parametrize(("template", "case"), CASES)
def test_rendered_file_is_right_on_its_own(
    template: str, case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    workload = conv2d_workload(**{"image": (2, 24, 8, 20), "k": 40, "kernel": 3, "dtype": "bf16", **case})
    schedule = a_schedule(workload, template)
    source = render(workload, schedule)
    assert source == render(workload, schedule)
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {"torch", "triton"}
    assert run(source, tmp_path, monkeypatch) == 0
    assert ": right" in capsys.readouterr().out


KINDS: list[dict[str, Any]] = [
    {"image": (2, 64, 16, 16), "kernel": 3, "padding": 1},
    {"image": (2, 64, 16, 16), "kernel": 1},
    {"image": (2, 64, 16, 16), "kernel": 3, "padding": 1, "groups": 64},
    {"image": (2, 64, 16, 16), "kernel": 3, "padding": 1, "groups": 16},
    {"image": (2, 3, 32, 32), "kernel": 7, "padding": 3, "stride": 2},
    {"image": (2, 64, 16, 16), "kernel": 3, "direction": "input_gradient"},
    {"image": (2, 64, 16, 16), "kernel": 3, "direction": "weight_gradient"},
    {"image": (2, 64, 16, 16), "kernel": 3, "dtype": "fp32"},
    {"image": (2, 3, 32, 32), "kernel": 4, "stride": 4, "direction": "input_gradient"},
]


@pytest.mark.parametrize("template", sorted(CONV2D.templates))
def test_every_template_can_be_rendered(template: str) -> None:
    workloads = (conv2d_workload(**kind, k=64) for kind in KINDS)
    workload = next(w for w in workloads if len(CONV2D.templates[template].space(w, H100)))
    source = render(workload, a_schedule(workload, template))
    assert "kernelwright" not in re.sub("# From kernelwright.*", "", source)
    compile(source, "kernel.py", "exec")


def test_a_wrong_kernel_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    workload = conv2d_workload((1, 16, 6, 6), 16, 3, "fp16", padding=1)
    source = render(workload, a_schedule(workload, "implicit_gemm"))
    broken = source.replace("(in_y < IN_H)", "(in_y < IN_H - 1)")
    assert broken != source
    assert run(broken, tmp_path, monkeypatch) == 1
    assert ": WRONG" in capsys.readouterr().out
