"""Whole-model runs: what is put together from readings and decisions, limits of time, and the models themselves."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelwright.compiler.collect import collect_workloads, load_model
from kernelwright.compiler.report import Decision, Report
from kernelwright.kernels.device import named_device

with warnings.catch_warnings():
    # Inductor imports parts of torch that torch itself has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._inductor.compile_fx

model_run = pytest.importorskip("model_run")
model_step = pytest.importorskip("model_step")
run_compile = pytest.importorskip("run_compile")


def decision(replaced: bool, ours_us: float, vendor_us: float) -> Decision:
    return Decision("mm", None, replaced, "because", None, ours_us, vendor_us)


def test_saving_counts_what_was_replaced() -> None:
    told = Report([decision(True, 10.0, 15.0), decision(True, 10.0, 12.5), decision(False, 1.0, 100.0)])
    row = model_run.saving(told, {"ours": [90.0, 92.0, 91.0], "default": [100.0, 101.0, 99.0]})
    assert (row["replaced"], row["places"]) == (2, 3)
    assert (row["predicted_saving_us"], row["measured_saving_us"]) == (7.5, 9.0)
    assert "measured_saving_us" not in model_run.saving(told, {"ours": [90.0]})


def test_ratio_is_that_of_the_strongest_rival() -> None:
    times = {"ours": [10.0], "ours_max": [9.0], "default": [12.0], "max_autotune": [11.0]}
    over_max = {"default": 1.3333, "max_autotune": 1.2222}
    assert model_run.compared(times) == {
        "ratio": 1.1,
        "over": {"default": 1.2, "max_autotune": 1.1},
        "over_max": over_max,
    }
    assert model_run.compared({"default": [1.0]}) == {"ratio": None, "over": {}, "over_max": {}}


def test_a_compile_that_takes_too_long_is_told() -> None:
    with pytest.raises(model_run.OutOfTime), model_run.within(0.05):
        time.sleep(1)
    with model_run.within(5):
        pass


def test_precise_result_leaves_the_model_as_it_was() -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(torch.bfloat16, memory_format=torch.channels_last).eval()
    before = model.weight.clone()
    (out,) = model_step.Step(model, [torch.randn(1, 3, 5, 5, dtype=torch.bfloat16)]).precise()
    assert out.dtype == torch.float32 and torch.equal(model.weight, before)
    assert model.weight.stride() == before.stride()


def test_a_training_step_gives_the_loss_and_a_gradient_of_each_weight() -> None:
    model = torch.nn.Linear(3, 1).train()
    x = torch.tensor([[1.0, 2.0, 3.0]])
    step = model_step.Step(model, [x])
    loss, weight, bias = step.run(lambda x: model(x).sum())
    assert step.trains and not loss.requires_grad and model.weight.grad is None
    torch.testing.assert_close(weight, x)
    torch.testing.assert_close(bias, torch.ones(1))
    assert not model_step.Step(model.eval(), [x]).trains


def test_errors_of_gradients_are_those_of_all_and_the_worst_one() -> None:
    want = [torch.ones(()), torch.full((4,), 3.0), torch.full((4,), 4.0), torch.zeros(2)]
    found = [torch.tensor(1.1), torch.full((4,), 3.3), torch.full((4,), 4.0), torch.zeros(2)]
    told = model_step.errors(found, want)
    assert told == {"error": 0.1, "gradient_error": 0.06, "worst_gradient": 0.1}
    assert model_step.errors(found[:1], want[:1]) == {"error": 0.1}
    # what should be nothing is measured by the largest gradient
    off = [*found[:3], torch.full((2,), 0.01)]
    assert model_step.errors(off, want)["worst_gradient"] == pytest.approx(2**0.5 * 0.01 / 8e-3, rel=1e-2)


def test_contenders_are_those_that_were_asked_for() -> None:
    found = model_run.contenders("sqlite:///x.db", Report(), ["max_autotune", "ours"], {"freezing": True})
    assert [one.name for one in found] == ["ours", "max_autotune"]
    assert found[0].options["options"]["db"] == "sqlite:///x.db"
    assert found[1].options["options"]["max_autotune"] is True
    assert all(one.options["options"]["freezing"] is True for one in found)


def test_compiling_again_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would find what it compiled the first time, in no time."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        seen.append(graph)
        return graph.forward

    step = model_step.Step(torch.nn.Linear(3, 1).eval().requires_grad_(False), [torch.ones(1, 3)])
    one = model_run.Contender("default", {"backend": backend}, compile_s=1e6)
    for count in (1, 2):
        model_run.compile_again(one, step)
        assert len(seen) == count and 0 < one.compile_s < 1e6


class FakeTimer:
    """Runs every call, and reads as many microseconds as it stands behind the first."""

    def __init__(self, l2_bytes: int) -> None:
        self.l2_bytes = l2_bytes

    def samples(self, calls: list[Any], effort: Any) -> list[list[float]]:
        for call in calls:
            call()
        return [[float(place + 1)] * 3 for place, _ in enumerate(calls)]


def run(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 300, first: bool = False, **plan: Any
) -> list[dict[str, Any]]:
    """The rows of a model with this source, compiled on the CPU, as they came. first: whether Inductor is really
    started before, which compiles two small graphs."""
    if not first:
        monkeypatch.setattr(model_run, "started", lambda device, plan: {"default": 0.1, "ours": 0.1})
    file = tmp_path / "small.py"
    file.write_text(source)
    monkeypatch.setattr(model_run, "target_of", lambda name: str(file))
    monkeypatch.setattr(model_run, "Timer", FakeTimer)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    # what lay there before the model counts for nothing
    allocated = itertools.chain([2**28], itertools.repeat(2**29))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(model_run, "present_device", lambda index: named_device("h100"))
    plan = {"modes": ("ours", "default"), **plan}
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + seconds
    model_run.run_model("small", model_run.Plan(f"sqlite:///{tmp_path / 'none.db'}", **plan), until, rows.append)
    assert list(rows[-1]["contenders"]) == list(plan["modes"])
    return rows


INFERENCE = """
import torch
model = torch.nn.Linear(8, 8).to(torch.bfloat16).eval().requires_grad_(False)
inputs = torch.ones(4, 8, dtype=torch.bfloat16)
"""

TRAINING = """
import torch
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x, kinds):
        return self.layer(x)[torch.arange(4), kinds].float().square().mean()
model = Loss().to(torch.bfloat16).train()
inputs = torch.ones(4, 8, dtype=torch.bfloat16), torch.tensor([0, 3, 2, 1])
"""


def test_a_model_is_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(INFERENCE, tmp_path, monkeypatch, first=True)[-1]
    assert row["mode"] == "inference" and row["start_s"].keys() == {"default", "ours"} and all(row["start_s"].values())
    for one in row["contenders"].values():
        assert "failure" not in one and one["peak_gb"] == 0.75 and one["compile_s"] > 0 and one["error"] < 1e-2
        assert "gradient_error" not in one
    assert row["ratio"] == 2.0 and row["replaced"] == 0 and row["aa_ratio"] == 3.0
    late = run(INFERENCE, tmp_path, monkeypatch, seconds=0)[-1]
    assert late["ratio"] is None and all(one["failure"] for one in late["contenders"].values())


def test_default_and_ours_are_told_before_max_autotune_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    compile_one = model_run.compile_one

    def compiled(one: Any, *rest: Any) -> None:
        begun.append(one.name)
        if one.name == "max_autotune":
            one.failure = "it ran out of memory"
            return
        compile_one(one, *rest)

    monkeypatch.setattr(model_run, "compile_one", compiled)
    cache = tmp_path / "cache"
    plan = {"modes": ("ours", "default", "max_autotune"), "compiles": 2, "cache": str(cache)}
    rows = run(INFERENCE, tmp_path, monkeypatch, **plan)
    assert begun == ["ours", "default", "max_autotune"]
    assert [sum(one["ms"] is not None for one in row["contenders"].values()) for row in rows] == [0, 2, 2, 2]
    assert rows[1]["contenders"]["max_autotune"]["ms"] is None and rows[1]["ratio"] == 2.0
    assert rows[-1]["contenders"]["max_autotune"]["failure"] == "it ran out of memory"
    assert rows[-1]["places"] == rows[1]["places"] == 0 and set(rows[-1]["start_s"]) == {"default", "ours"}
    stages = ["model", "first compile", "eager", *begun, "timing", "default again", "ours again"]
    assert sorted(rows[-1]["stages_s"]) == sorted(stages)


def test_only_max_autotune_finds_what_was_kept_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: dict[str, list[Path]] = {}

    def compiled(one: Any, step: Any, want: Any, folder: Path, base: int) -> None:
        folders.setdefault(one.name, []).append(folder)
        folder.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(model_run, "compile_one", compiled)
    modes = ("ours", "default", "max_autotune", "ours_max")
    first, again = (run(INFERENCE, tmp_path, monkeypatch, modes=modes, cache=str(tmp_path / "c"))[-1] for _ in "ab")
    assert first["from_cache"] == ["ours_max"] and again["from_cache"] == ["max_autotune", "ours_max"]
    assert {*folders["max_autotune"], *folders["ours_max"]} == {tmp_path / "c"}
    assert len({*folders["default"], *folders["ours"]}) == 4


def test_a_contender_finds_what_tuning_compiled_and_nothing_of_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    (shared / "kernel").mkdir(parents=True)
    (shared / "kernel" / "code").write_text("tuned")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for name in "ab":
        with model_run.caches_in(tmp_path / name):
            here = Path(os.environ["TRITON_CACHE_DIR"])
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / name)
            assert [path.name for path in here.iterdir()] == ["kernel"]
            (here / "other").mkdir()
    assert os.environ["TRITON_CACHE_DIR"] == str(shared) and "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert [path.name for path in shared.iterdir()] == ["kernel"]


def test_a_training_step_is_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(TRAINING, tmp_path, monkeypatch)[-1]
    assert row["mode"] == "training" and 0 < row["eager_gradient_error"] < 2e-2
    for one in row["contenders"].values():
        assert "failure" not in one and one["error"] < 2e-2 and 0 < one["gradient_error"] < 2e-2
        assert one["gradient_error"] <= one["worst_gradient"] < 5e-2


def test_a_model_that_no_graph_can_record_in_eager_mode_is_timed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeTimer):
        def samples(self, calls: list[Any], effort: Any) -> list[list[float]]:
            if len(calls) > 2:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().samples(calls, effort)

    monkeypatch.setattr(model_run, "Timer", Refusing)
    one = model_run.Contender("ours", {}, run=lambda: None)
    step = model_step.Step(torch.nn.Identity(), [torch.ones(1)])
    times, control = model_run.timed([one], step, Refusing(1))
    assert times == {"ours": [1.0] * 3} and control == {"eager_ms": None, "aa_ratio": 2.0}


def test_row_is_told_in_words() -> None:
    contenders = {"ours": {"ms": 1.0}, "default": {"ms": 1.2}}
    row: dict[str, Any] = {"model": "m", "mode": "training", "replaced": 1, "places": 2, "eager_error": 0.1}
    row["contenders"] = contenders
    row |= {"predicted_saving_us": 5.0, "measured_saving_us": 4.0, "over": {"default": 1.2}, "aa_ratio": 1.0}
    row |= {"over_max": {}, "start_s": {}, "failure": "exit code 1"}
    text = "\n".join(run_compile.told(row))
    assert (
        "m (training): 1 of 2 replaced" in text
        and "'eager_error': 0.1" in text
        and "5.0 us predicted, 4.0 us measured" in text
        and "exit code 1" in text
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the whole model")
def test_workloads_of_the_llama_like_model() -> None:
    found, left_out = collect_workloads(*load_model(model_run.target_of("llama_block")))
    (attention,) = [workload for workload in found if workload.operator == "attention"]
    assert found[attention] == 4 and left_out == []
    assert dict(attention.layouts) == dict.fromkeys(("q", "k", "v", "out"), "bshd")
    assert (attention.dims["Hq"], attention.dims["Hkv"], attention.attributes["causal"]) == (32, 8, "bottom_right")
    # two residuals and a gate of each layer are counted without their tensor, too
    assert found.total() == 4 * (8 + 3)


def test_models_in_one_process_share_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises takes no other with it, and none begins without time."""
    told: list[tuple[str, float]] = []

    def run_model(name: str, plan: Any, until: float, keep: Any) -> None:
        told.append((name, until - time.monotonic()))
        if name == "bad":
            raise ValueError("no such model")
        keep({"model": name, "ratio": 1.5})

    monkeypatch.setattr(run_compile, "run_model", run_model)
    rows: list[dict[str, Any]] = []
    plan = model_run.Plan("sqlite:///x.db", ("ours",))
    run_compile.run_together(["one", "bad", "two"], plan, 300.0, rows.append)
    assert [row.get("failure") for row in rows] == [None, "ValueError: no such model", None]
    # nobody used anything up, so that each could take two shares of what is left, the last two all of it
    assert [name for name, _ in told] == ["one", "bad", "two"]
    shares = zip(told, (200, 300, 300), strict=True)
    assert all(0.85 * share - 10 < left <= 0.85 * share for (_, left), share in shares)
    run_compile.run_together(["late"], plan, 1.0, rows.append)
    assert rows[-1]["failure"] == "no time left"


@pytest.mark.parametrize("more", [("--tune", "60"), ("--gpus", "1"), ("--gpus", "0,1")])
def test_one_process_neither_tunes_nor_chooses_gpus(
    more: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run_compile.py", "--out", "x.json", "--models", "vit", "--together", *more])
    with pytest.raises(SystemExit):
        run_compile.arguments()
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err
