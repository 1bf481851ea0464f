"""torch.compile(model, backend="kernelwright") from end to end on the CPU, through Inductor's own code generation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

import kernelwright
from kernelwright.compiler import backend as kernelwright_backend
from kernelwright.compiler import ops
from kernelwright.compiler.backend import SLOT, Options, kernel_settings, split_options
from kernelwright.compiler.backend import kernelwright as backend
from kernelwright.compiler.passes.sequence import PassSequence, joined
from kernelwright.compiler.report import Report
from kernelwright.db.store import Store
from kernelwright.errors import UsageError
from kernelwright.kernels.matmul.workload import matmul_workload

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def mlp(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 16)).to(dtype)


def step(model: Any, parameters: list[torch.nn.Parameter], x: torch.Tensor) -> list[torch.Tensor]:
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.square().mean(), parameters)]


def test_backend_is_found_by_its_name_and_trains_as_eager_does() -> None:
    model, x = mlp(), torch.randn(8, 32)
    parameters = list(model.parameters())
    compiled = torch.compile(model, backend="kernelwright")
    torch.testing.assert_close(step(compiled, parameters, x), step(model, parameters, x))


def test_compile_is_torchs_with_our_options(recorder: Any, calls: list[str]) -> None:
    model, x, report = mlp(), torch.randn(4, 32), Report()
    run = kernelwright.compile(model, fullgraph=True, answers=recorder(), devices="cpu", report=report)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert calls == ["bias,gelu", "bias"] and len(report.replaced) == 2


def test_replaced_products_infer_as_eager_does(recorder: Any, calls: list[str]) -> None:
    model, x, report = mlp(), torch.randn(2, 4, 32), Report()
    options = {"answers": recorder(), "devices": ("cpu",), "report": report}
    with torch.no_grad():
        got = torch.compile(model, backend="kernelwright", options=options)(x)
        torch.testing.assert_close(got, model(x))
    assert calls == ["bias,gelu", "bias"]
    assert len(report.replaced) == 2
    assert "2 of 2 products replaced" in str(report)


def test_replaced_products_train_as_eager_does(recorder: Any, calls: list[str]) -> None:
    model, x = mlp(), torch.randn(8, 32)
    parameters = list(model.parameters())
    compiled = torch.compile(model, backend=backend, options={"answers": recorder(), "devices": "cpu"})
    torch.testing.assert_close(step(compiled, parameters, x), step(model, parameters, x))
    assert sorted(calls) == ["", "", "", "bias", "bias"]


def test_operands_keep_the_strides_that_were_looked_up(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strides = []
    real = ops.by_torch

    def watched(a: torch.Tensor, *rest: Any) -> torch.Tensor:
        strides.append(a.stride())
        return real(a, *rest)

    monkeypatch.setattr(ops, "by_torch", watched)
    answers = recorder()
    x, y, w = torch.randn(16, 8), torch.randn(8, 16), torch.randn(16, 24)

    def model(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # What Inductor computes it may lay out as it likes, unless it is told otherwise.
        return (x.t() * y) @ w

    compiled = torch.compile(model, backend=backend, options={"answers": answers, "devices": ("cpu",)})
    torch.testing.assert_close(compiled(x, y, w), model(x, y, w))
    assert answers.asked[0].layouts["a"] == "col"
    assert strides == [(1, 8)]


def test_graph_breaks_and_mode_of_inductor(recorder: Any, calls: list[str]) -> None:
    first, second, x = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.randn(4, 8)
    report = Report()

    def model(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(first(x))
        torch._dynamo.graph_break()
        return torch.tanh(second(x))

    options = {"answers": recorder(), "devices": ("cpu",), "report": report, "mode": "max-autotune-no-cudagraphs"}
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend, options=options)(x), model(x))
    assert calls == ["bias,relu", "bias,tanh"]
    assert report.inductor_options["max_autotune"] is True


def test_broken_database_is_one_warning_and_no_replacement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "broken.db"
    path.write_bytes(b"this is not a database" * 100)
    report, x, w = Report(), torch.randn(4, 8), torch.randn(8, 4)
    options = {"db": f"sqlite:///{path}", "device": "h100", "devices": ("cpu",), "report": report}
    got = torch.compile(lambda x, w: x @ w, backend="kernelwright", options=options)(x, w)
    torch.testing.assert_close(got, x @ w)
    assert "not a database" in report.warnings[0]
    ours = [r for r in caplog.records if r.name.startswith("kernelwright") and r.levelno >= logging.WARNING]
    assert len(ours) == 1


def test_whatever_fails_on_our_side_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ArithmeticError("planted")

    monkeypatch.setattr(kernelwright_backend, "local_answers", fail)
    report, x, w = Report(), torch.randn(4, 8), torch.randn(8, 4)
    options = {"devices": ("cpu",), "report": report}
    torch.testing.assert_close(torch.compile(torch.mm, backend=backend, options=options)(x, w), x @ w)
    assert report.warnings == ["planted"]


def test_a_model_on_the_cpu_asks_for_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernelwright_backend, "local_answers", lambda *args: asked.append(args))
    x, w = torch.randn(4, 8), torch.randn(8, 4)
    torch.testing.assert_close(torch.compile(torch.mm, backend=backend)(x, w), x @ w)
    assert asked == []


def test_our_options_are_told_from_inductors() -> None:
    ours, patches = split_options("reduce-overhead", {"how": "nearest", "epilogue_fusion": False})
    assert ours == Options(how=("nearest",))
    assert patches == {"triton.cudagraphs": True, "epilogue_fusion": False}


def test_mode_may_come_among_the_options() -> None:
    assert split_options(None, {"mode": "max-autotune-no-cudagraphs"})[1]["max_autotune"] is True


@pytest.mark.parametrize(
    ("options", "error"), [({"how": "guessed"}, UsageError), ({"no_such_setting": 1}, RuntimeError)]
)
def test_misuse_is_told(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"guessed|no_such_setting"):
        split_options(None, options)


class Named(CustomGraphPass):
    def __init__(self, name: str | None) -> None:
        self.name = name
        self.seen: list[Any] = []

    def __call__(self, graph: Any) -> None:
        self.seen.append(graph)

    def uuid(self) -> str | None:
        return self.name


def test_passes_of_the_user_run_before_ours() -> None:
    theirs, ours = Named("theirs"), Named("ours")
    both = joined(theirs, ours)
    both("graph")  # type: ignore[arg-type]
    assert theirs.seen == ours.seen == ["graph"]
    assert both.uuid() == ("theirs", "ours")
    assert joined(None, ours) is ours


def test_a_pass_without_identity_keeps_graphs_out_of_the_cache() -> None:
    assert PassSequence([Named("ours"), Named(None)]).uuid() is None
    assert PassSequence([Named("ours"), lambda graph: None]).uuid() is None


def test_a_report_keeps_graphs_out_of_the_cache_unless_it_is_asked_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    Store.open(url).close()
    kept = {}
    asked: dict[str, dict[str, bool]] = {"yes": {"fx_graph_cache": True}, "no": {"fx_graph_cache": False}, "plain": {}}
    for name, cached in asked.items():
        ours, patches = split_options(None, {"db": url, "device": "h100", "report": Report(), **cached})
        settings = {**patches, **kernel_settings(ours, patches)}
        kept[name] = (settings["fx_graph_cache"], settings[SLOT].uuid() is not None)
    assert kept == {"yes": (True, True), "no": (False, False), "plain": (False, False)}


def test_a_new_record_is_seen_in_spite_of_the_graph_cache(tmp_path: Path, calls: list[str], record_of: Any) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    Store.open(url).close()
    x, w = torch.randn(4, 8), torch.randn(8, 4)
    options = {"db": url, "device": "h100", "devices": ("cpu",)}

    def run() -> int:
        torch._dynamo.reset()
        before = len(calls)
        torch.testing.assert_close(torch.compile(torch.mm, backend=backend, options=options)(x, w), x @ w)
        return len(calls) - before

    assert [run(), run()] == [0, 0]
    with Store.open(url) as store:
        store.put_winner(record_of(matmul_workload(4, 4, 8, "fp32", "nn")))
    torch._dynamo.utils.counters.clear()
    assert [run(), run()] == [1, 1]
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1
