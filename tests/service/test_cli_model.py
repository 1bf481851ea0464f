"""`model train` and `model evaluate` as typed, and what becomes of a model file that cannot be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelwright.cost_model import RooflineModel, XGBoostModel, load_model, own_model, packaged_model
from kernelwright.db import Store
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search import save_recorded
from kernelwright.service.answering import Answers
from kernelwright.service.cli import main
from kernelwright.types import DeviceSpec, Trial
from tests.service.conftest import synthetic_trials

SHAPES = ((64, 512, 512), (512, 512, 512), (256, 1024, 512), (256, 512, 1024), (2048, 2048, 2048))
QUICK = ["--rounds", "8", "--folds", "2", "--jobs", "1"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; its exit code, standard output and standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(argv)
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err  # type: ignore[return-value]

    return run


@pytest.fixture(scope="module")
def sweep(device: DeviceSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    trials = [trial for shape in SHAPES for trial in synthetic_trials(matmul_workload(*shape), device)]
    folder = tmp_path_factory.mktemp("sweep")
    save_recorded(trials, folder / "h100" / "matmul.parquet")
    return folder


def test_train_writes_a_calibrated_model_with_its_evaluation(run: Run, sweep: Path, tmp_path: Path) -> None:
    path = tmp_path / "models" / "matmul.json"
    code, out, err = run("model", "train", "matmul", "--from", str(sweep), "--out", str(path), *QUICK, "--json")
    assert code == 0, err
    told = json.loads(out)
    model = load_model(path, "matmul")
    assert isinstance(model, XGBoostModel) and model.calibration is not None
    assert told == {"file": str(path), **model.metadata}
    assert (told["examples"], told["groups"], told["failures"]) == (200, 5, 20), "failures are learned from"
    assert {"top1_mean", "shortlist_p10"} <= set(told["evaluation"]) & set(told["evaluation_by_workload"])
    assert told["calibration"]["workloads"] == 5 and told["calibration"]["command"].startswith("kernelwright")


def test_train_from_a_database(run: Run, trials: list[Trial], store: Store, db_url: str, tmp_path: Path) -> None:
    other = [t for shape in SHAPES[:2] for t in synthetic_trials(matmul_workload(*shape), trials[0].device)]
    store.add_trials([*trials, *other])
    path = tmp_path / "m.json"
    code, out, err = run("model", "train", "matmul", "--db", db_url, "--out", str(path), *QUICK)
    assert code == 0, err
    assert "120 trials of 3 workloads" in out and "first choice" in out and path.stat().st_size < 5e6


def test_evaluate_compares_objectives_with_both_groupings(run: Run, sweep: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    ask = ["model", "evaluate", "matmul", "--from", str(sweep), "--objectives", "log,rank", "--grouping", "both"]
    code, out, err = run(*ask, "--no-online", "--out", str(path), *QUICK)
    assert code == 0, err
    assert "left out by family: 4 groups" in out and "left out by workload: 5 groups" in out
    result = json.loads(path.read_text())
    assert set(result["summary"]) == {"family", "workload"}
    assert set(result["summary"]["family"]) == {"random", "roofline", "xgboost:log", "xgboost:rank"}
    assert len(result["family"]["rows"]) == 4 * 5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--from", "absent"], "absent must be a recording"),
        (["--objective", "guess"], "objective must be one of log, residual"),
        (["--db", "sqlite:///new.db"], "there must be trials of matmul"),
    ],
)
def test_misuse_of_train_is_told(
    run: Run, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = [] if {"--from", "--db"} & set(argv) else ["--from", str(sweep)]
    code, _, err = run("model", "train", "matmul", "--out", "m.json", *source, *argv, *QUICK)
    assert code == 2 and message in err
    assert not Path("m.json").exists()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a model file for features of another version."""
    source = Path(__file__).resolve().parents[2] / "cost_model" / "models" / "matmul.json"
    data = json.loads(source.read_text())
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "matmul.json").write_text(json.dumps({**data, "feature_version": 0}))
    return folder


def test_a_model_of_other_features_is_refused_and_the_engine_goes_on(
    run: Run,
    models: Path,
    db_url: str,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KERNELWRIGHT_DB", db_url)
    monkeypatch.setenv("KERNELWRIGHT_RECORDED", str(recorded))
    monkeypatch.setenv("KERNELWRIGHT_MODELS", str(models))
    monkeypatch.setenv("KERNELWRIGHT_PRETUNED", "0")
    ask = ["query", "matmul", "--shape", "M=333,N=1024,K=1024", "--hardware", "h100", "--json"]
    code, out, err = run(*ask)
    assert code == 0, err
    predicted = json.loads(out)
    assert predicted["how"] == "predicted" and 0 < predicted["regret"] < 1
    assert "must be for features of version" in caplog.text and "going on with the packaged model" in caplog.text
    caplog.clear()
    tune = ["tune", "matmul", "--shape", "M=2048,N=4096,K=4096", "--device", "replay:h100", "--trials", "8", "--json"]
    code, out, err = run(*tune)
    assert code == 0, err
    assert json.loads(out)["how"] == "measured" and "going on with the packaged model" in caplog.text


def test_a_packaged_model_that_is_refused_leaves_the_analytic_one(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: models.parent)
    assert isinstance(packaged_model("matmul"), RooflineModel)
    assert "going on with the analytic model" in caplog.text


def test_ones_own_model_is_used_for_answers(
    run: Run, sweep: Path, store: Store, device: DeviceSpec, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    assert run("model", "train", "matmul", "--from", str(sweep), "--out", str(folder / "matmul.json"), *QUICK)[0] == 0
    workload = matmul_workload(320, 512, 512)
    own: Any = own_model("matmul", folder)
    assert own.metadata["rounds"] == 8
    asked, plain = (Answers(store, models).best(workload, device) for models in (folder, None))
    assert asked.how == plain.how == "predicted" and asked.regret != plain.regret
    shutil.rmtree(folder)
    assert type(own_model("matmul", folder)) is type(packaged_model("matmul"))
