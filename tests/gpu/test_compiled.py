"""What compiled programs do only on a GPU: models, packages of AOTInductor, torch's own attention biases."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelwright.compiler import export
from kernelwright.compiler.report import Report
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import gpu_count, present_device
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

pytestmark = [
    pytest.mark.skipif(gpu_count() == 0, reason="no GPU here"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def quiet_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest captures every level, which makes torch write down each step of each compile."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


@pytest.fixture
def options() -> dict[str, Any]:
    """The backend's: ours everywhere, with the schedules that the templates begin with."""
    device = present_device()

    def answers(workload: Workload) -> Answer:
        schedule = get_operator(workload.operator).default_schedule(workload, device)
        return Answer("measured", workload, device, schedule, "kernel", 10.0, "torch", 20.0)

    return {"answers": answers, "report": Report()}


def linears() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(264, 520), torch.nn.GELU(), torch.nn.Linear(520, 136))
    return torch.nn.Sequential(*layers).cuda().bfloat16(), torch.randn(50, 264).cuda().bfloat16()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def test_a_compiled_model_runs_our_kernels(options: dict[str, Any]) -> None:
    model, x = linears()
    with torch.no_grad():
        got = torch.compile(model, backend="kernelwright", options=options)(x)
        want = model.double()(x.double())
    assert len(options["report"].replaced) == 2, str(options["report"])
    assert error(got, want) < 1e-2


def test_a_package_runs_our_kernels(options: dict[str, Any], tmp_path: Path) -> None:
    model, x = linears()
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        # what torch includes would be compiled, and optimised, for this package alone: more than a minute
        quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
        configs = export.settings(**options, **quick)
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=configs
        )
        got = export.load(path)(x)
        want = model.double()(x.double())
    assert len(options["report"].replaced) == 2, str(options["report"])
    assert error(got, want) < 1e-2


@pytest.mark.parametrize("corner", ["lower_right", "upper_left"])
def test_torchs_causal_biases_are_replaced(options: dict[str, Any], corner: str) -> None:
    from torch.nn.attention import bias

    make: Callable[[int, int], Any] = getattr(bias, f"causal_{corner}")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=make(q.shape[2], k.shape[2]))

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, length, 64, device="cuda", dtype=torch.bfloat16) for length in (128, 512, 512))
    with torch.no_grad():
        got = torch.compile(attend, backend="kernelwright", options=options)(q, k, v)
        seen = torch.ones(128, 512, dtype=torch.bool, device="cuda").tril(384 if corner == "lower_right" else 0)
        want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), seen)
    assert len(options["report"].replaced) == 1, str(options["report"])
    assert error(got, want) < 1e-2
