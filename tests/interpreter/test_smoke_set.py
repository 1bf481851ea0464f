"""The matmuls of the smoke set, whole, by every template that can run them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import ACTIVATIONS, matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Workload

MATMUL = get_operator("matmul")
FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "workloads" / "smoke.json"
LETTERS = {"row": "n", "col": "t"}
PROBLEMS = [p for p in json.loads(FILE.read_text(encoding="utf-8"))["problems"] if p["family"] == "matmul"]


def workload_of(problem: dict[str, Any]) -> Workload:
    layout = LETTERS[problem["a_layout"]] + LETTERS[problem["b_layout"]]
    # steps that are not fused yet come after the product, in kernels of their own
    epilogue = tuple(step for step in problem.get("epilogue", ()) if step == "bias" or step in ACTIVATIONS)
    return matmul_workload(problem["M"], problem["N"], problem["K"], "fp32", layout, epilogue)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p["op"] in ("mm", "addmm")], ids=lambda p: str(p["id"]))
def test_smoke_set(problem: dict[str, Any]) -> None:
    workload = workload_of(problem)
    space = MATMUL.space(workload, named_device("h100"))
    tried = [part.sample(random.Random(0), 1) for part in space.parts.values()]
    assert sum(map(len, tried)) >= 1
    inputs = MATMUL.make_inputs(workload, 0, "cpu")
    reference = MATMUL.reference(workload, inputs)
    for schedule in (s for found in tried for s in found):
        out = MATMUL.empty_output(workload, "cpu")
        launch_all(MATMUL.plan(workload, schedule, inputs, out))
        verdict = verify(out, reference, MATMUL.tolerance(workload))
        assert verdict.right, (schedule, verdict)
