"""Rendered files: the same text each time, nothing of ours imported, right when run, and told when wrong."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernelwright.errors import IllegalSchedule, InvalidWorkload, UnknownOperator, UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels import render as render_module
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.render import render
from kernelwright.types import FrozenMap, Schedule, Workload

H100 = named_device("h100")
MATMUL = get_operator("matmul")
SMALL = matmul_workload(100, 72, 136, "fp16", "nt", ("bias", "gelu"))


def a_schedule(workload: Workload, template: str) -> Schedule:
    schedules = MATMUL.templates[template].space(workload, H100).sample(random.Random(3), 1)
    assert schedules, f"{template} has no schedule for {workload}"
    return schedules[0]


def imported(source: str) -> set[str]:
    """Top-level packages that the source imports, anywhere."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


SUITABLE = (
    SMALL,
    matmul_workload(1000, 1000, 1000),
    matmul_workload(100, 72, 136, "fp16", groups=4),
    matmul_workload(16, 512, 512, b_dtype="int4", scaling="group:128"),
    matmul_workload(1, 512, 512),
    matmul_workload(27, 27, 128, batch=16),
    matmul_workload(128, 256, 512, "fp8e4m3", scaling="block128"),
    matmul_workload(128, 256, 512, "fp4", scaling="nvfp4"),
)


def suited_to(template: str) -> Workload:
    """The first of SUITABLE for which the template has schedules."""
    return next(w for w in SUITABLE if len(MATMUL.templates[template].space(w, H100)))


@pytest.mark.parametrize("template", sorted(MATMUL.templates))
def test_needs_only_torch_and_triton(template: str) -> None:
    workload = suited_to(template)
    source = render(workload, a_schedule(workload, template))
    assert imported(source) - set(sys.stdlib_module_names) == {"torch", "triton"}
    compile(source, "kernel.py", "exec")


@pytest.mark.parametrize(
    ("template", "workload"),
    [
        ("pointer", matmul_workload(100, 72, 135, "fp32", "tt", ("bias", "relu"))),
        ("persistent_tma", matmul_workload(100, 72, 136, "fp16", "nn", ("gelu_tanh",))),
        ("skinny", matmul_workload(16, 128, 192, "bf16", "nt", ("bias", "silu"))),
    ],
)
def test_runs_on_its_own_and_is_right(template: str, workload: Workload, run: Any) -> None:
    done = run(render(workload, a_schedule(workload, template)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right" in done.stdout
    dims = workload.dims
    assert f"M={dims['M']} N={dims['N']} K={dims['K']}" in done.stdout


def test_runs_as_a_program_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(render(SMALL, a_schedule(SMALL, "pointer")), encoding="utf-8")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr


def test_odd_strides_and_other_sizes(run: Any) -> None:
    layouts = {"a": "row:80", "b": "col:72", "out": "col:90"}
    workload = Workload(**{**matmul_workload(64, 32, 70, "fp16").to_json(), "layouts": layouts})
    source = render(workload, a_schedule(workload, "pointer"))
    assert "LAYOUTS = {'a': ('row', 10), 'b': ('col', 2), 'out': ('col', 26)}" in source
    done = run(source, "33", "17", "65")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "M=33 N=17 K=65" in done.stdout


def test_a_wrong_kernel_is_told(run: Any) -> None:
    workload = matmul_workload(32, 32, 65, "fp16")
    knobs = {"block_m": 32, "block_n": 32, "block_k": 32, "num_warps": 4, "num_stages": 2, "group_m": 1, "split_k": 1}
    source = render(workload, Schedule("pointer", FrozenMap({**knobs, "precision": "fp16"})))
    loop = "range(split * BLOCK_K, K, step)"
    assert loop in source
    without_tail = run(source.replace(loop, "range(split * BLOCK_K, K - 1, step)"))
    assert without_tail.returncode == 1, without_tail.stdout + without_tail.stderr
    assert "WRONG" in without_tail.stdout


def test_an_output_that_is_not_written_is_wrong(run: Any) -> None:
    source = render(SMALL, a_schedule(SMALL, "pointer")).replace("kernel[grid](*args, **options)", "pass")
    done = run(source)
    assert done.returncode == 1
    assert "error nan" in done.stdout


def test_without_a_gpu_or_the_interpreter_it_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(render(SMALL, a_schedule(SMALL, "pointer")))
    env = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "TRITON_INTERPRET=1" in done.stderr


def test_text_is_the_same_each_time_and_carries_its_provenance() -> None:
    schedule = a_schedule(SMALL, "pointer")
    again = Schedule.from_json({"template": "pointer", "knobs": dict(reversed(list(schedule.knobs.items())))})
    facts = {"measured on": "NVIDIA H100", "time": "12.5 us"}
    source = render(SMALL, schedule, facts)
    assert source == render(SMALL, again, facts)
    assert "# measured on: NVIDIA H100\n# time: 12.5 us\n" in source
    assert f"# template source: {MATMUL.templates['pointer'].fingerprint}\n" in source
    assert "Apache-2.0" in source


def test_provenance_cannot_become_code() -> None:
    evil = 'x\nimport os\r\nos.abort()\x0cimport os\u2028"""'
    source = render(SMALL, a_schedule(SMALL, "pointer"), {"note": evil})
    assert "# note: x import os  os.abort() import os" in source
    assert ast.dump(ast.parse(source)) == ast.dump(ast.parse(render(SMALL, a_schedule(SMALL, "pointer"))))


def test_rendering_needs_neither_torch_nor_triton() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from kernelwright.kernels.render import render\n"
        "from kernelwright.types import Schedule, Workload\n"
        f"workload, schedule = {SMALL.to_json()!r}, {a_schedule(SMALL, 'skinny').to_json()!r}\n"
        "sys.stdout.write(render(Workload.from_json(workload), Schedule.from_json(schedule)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == render(SMALL, a_schedule(SMALL, "skinny")), done.stderr


def test_what_cannot_be_rendered_is_told() -> None:
    with pytest.raises(IllegalSchedule, match=r"torch\.mm is a library call"):
        render(SMALL, Schedule("vendor", FrozenMap({"call": "torch.mm"})))
    with pytest.raises(IllegalSchedule, match=r"one of .*pointer.*got 'cutlass'"):
        render(SMALL, Schedule("cutlass"))
    with pytest.raises(UnknownOperator):
        render(Workload("conv9d", FrozenMap(), FrozenMap()), Schedule("pointer"))
    with pytest.raises(InvalidWorkload):
        render(Workload("matmul", FrozenMap({"M": 1}), FrozenMap()), Schedule("pointer"))


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"two": "f = 1", "one": "from two import f\ndef f(): pass"}, "f is defined in both one and two"),
        ({"one": "from kernelwright.kernels.matmul.epilogue_kernel import finish as f"}, "without `as`"),
        ({"one": "import kernelwright.kernels.matmul.epilogue_kernel"}, "as `from file import name`"),
    ],
)
def test_kernel_files_that_cannot_be_inlined(
    sources: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_module, "kernel_sources", lambda module: sources)
    with pytest.raises(UsageError, match=words):
        render_module.inline("one")
