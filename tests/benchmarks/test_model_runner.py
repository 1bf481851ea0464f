"""Models in processes of their own: failures, limits of time, several GPUs, resuming, and the table of results."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

model_job = pytest.importorskip("model_job")
model_run = pytest.importorskip("model_run")
model_runner = pytest.importorskip("model_runner")
run_compile = pytest.importorskip("run_compile")

JOB = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
row = {"model": job["model"], "ratio": 1.5, "group": "training", "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
row["contenders"] = {mode: {"ms": 1.0} for mode in job["plan"]["modes"]}
if job["model"] != "early":
    json.dump(row, open(job["out"], "w"))
print("now it happens", flush=True)
{"early": lambda: os.abort(), "bad": lambda: sys.exit("out of memory"), "hangs": lambda: time.sleep(60)}.get(
    job["model"], lambda: None)()
"""


def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """The rows of models that a job of this test runs, by name."""
    job = tmp_path / "job.py"
    job.write_text(JOB)
    monkeypatch.setattr(model_runner, "JOB", job)
    monkeypatch.setattr(model_runner, "LEAST_S", 0.1)
    plan = {"modes": ["default", "ours"], "db": f"sqlite:///{tmp_path / 'none.db'}"}
    given = {"gpus": ["0"], "total_seconds": 60.0, **fields}
    rows: list[dict[str, Any]] = []
    model_runner.run_batch(model_runner.Batch(names, plan, logs=tmp_path / "logs", **given), rows.append)
    return {row["model"]: row for row in rows}


def test_a_model_that_fails_leaves_the_others_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = batch(tmp_path, monkeypatch, "early", "bad", "good")
    assert rows["early"]["failure"] == "exit code -6: now it happens" and rows["early"]["ratio"] is None
    # what it said before it failed counts
    assert rows["bad"]["failure"] == "exit code 1: out of memory" and rows["bad"]["ratio"] == 1.5
    assert "failure" not in rows["good"]
    summary = run_compile.report.summary(list(rows.values()))
    assert {name: one["geomean"] for name, one in summary.items()} == {"all": 1.5, "training": 1.5}


def test_what_is_known_of_a_model_is_told_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "LOOK_S", 0.05)
    told: list[bool] = []
    taken: dict[str, Any] = {"gpus": ["0"], "total_seconds": 4.0}
    job = tmp_path / "job.py"
    job.write_text(JOB)
    monkeypatch.setattr(model_runner, "JOB", job)
    monkeypatch.setattr(model_runner, "LEAST_S", 0.1)
    one = model_runner.Batch(["hangs"], {"modes": ["ours"]}, logs=tmp_path / "logs", **taken)
    model_runner.run_batch(one, lambda row: told.append("failure" in row))
    assert told == [False, True]


def test_a_model_that_hangs_is_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    rows = batch(tmp_path, monkeypatch, "hangs", "good", total_seconds=6.0)
    assert time.monotonic() - began < 20
    assert rows["hangs"]["failure"].startswith("ended after 3 s") and rows["hangs"]["ratio"] == 1.5
    assert "failure" not in rows["good"]
    late = batch(tmp_path, monkeypatch, "good", total_seconds=0.0)
    assert late["good"]["failure"] == "no time left"


def test_several_gpus_share_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = batch(tmp_path, monkeypatch, "hangs", "a", "b", gpus=["0", "3"], total_seconds=12.0)
    assert {rows["a"]["gpu"], rows["b"]["gpu"]} == {"3"} and rows["hangs"]["gpu"] == "0"


def test_a_model_is_tuned_before_it_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import sys; sys.argv[1:3] == ['tune', 'small.py'] or sys.exit(1); open(sys.argv[-1], 'w').write('tuned')"
    monkeypatch.setattr(model_runner, "_TUNE", said)
    monkeypatch.setattr(model_runner, "target_of", lambda name: f"{name}.py")
    monkeypatch.chdir(tmp_path)
    db = str(tmp_path / "tuned")
    plan = {"modes": ["ours"], "db": db}
    monkeypatch.setattr(model_runner, "JOB", tmp_path / "job.py")
    (tmp_path / "job.py").write_text(JOB.replace('"ratio": 1.5', f'"ratio": len(open({db!r}).read())'))
    given = model_runner.Batch(["small"], plan, ["0"], 60.0, tmp_path / "logs", tune_seconds=5.0)
    rows: list[dict[str, Any]] = []
    model_runner.run_batch(given, rows.append)
    assert rows[-1]["ratio"] == len("tuned") and "failure" not in rows[-1]


def test_a_job_leaves_a_whole_row_whenever_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_model(name: str, plan: Any, until: float, keep: Any) -> None:
        assert plan == model_run.Plan("x.db", ("default", "ours"), {}, None, 2)
        assert 0 < until - time.monotonic() <= 30
        for place in range(2):
            keep({"model": name, "place": place})
            assert json.loads(out.read_text()) == {"model": "small", "place": place}
        raise KeyboardInterrupt

    out, job = tmp_path / "row.json", tmp_path / "job.json"
    plan = {"db": "x.db", "modes": ["default", "ours"], "extra": {}, "cache": None, "compiles": 2}
    job.write_text(json.dumps({"model": "small", "plan": plan, "seconds": 30, "out": str(out)}))
    monkeypatch.setattr(model_job, "run_model", run_model)
    monkeypatch.setattr(sys, "argv", ["model_job.py", str(job)])
    with pytest.raises(KeyboardInterrupt):
        model_job.main()
    assert json.loads(out.read_text())["place"] == 1


def test_a_run_goes_on_with_what_its_file_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, **times: float) -> dict[str, Any]:
        return {"model": name, "ratio": 1.0, "contenders": {mode: {"ms": ms} for mode, ms in times.items()}}

    out = tmp_path / "models.json"
    before = [row("done", default=1.0, ours=1.0), row("part", default=1.0), row("other", ours=1.0)]
    out.write_text(json.dumps({"rows": before}))
    ran: list[str] = []

    def run_batch(batch: Any, keep: Any) -> None:
        ran.extend(batch.names)
        keep(row("part"))
        keep(row("new", default=2.0, ours=2.0))

    monkeypatch.setattr(run_compile, "run_batch", run_batch)
    monkeypatch.setattr(run_compile, "told", lambda row: [])
    monkeypatch.setattr(run_compile, "write", lambda out, rows, before: out.write_text(json.dumps({"rows": rows})))
    monkeypatch.setattr(run_compile.report, "clocks", lambda: "")
    monkeypatch.setattr(run_compile.report, "origin", lambda: {"commit": "this"})
    words = ["x", "--models", "done,part,new", "--modes", "default,ours", "--resume", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    run_compile.main()
    assert ran == ["part", "new"]
    # what came further before stays, and what is new tells where it is from
    new = {**row("new", default=2.0, ours=2.0), "measured": {"commit": "this"}}
    assert json.loads(out.read_text())["rows"] == [*before, new]


def test_runs_are_put_together_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer row stands for its model unless it has fewer times; what another run said of the model is kept."""

    def file(day: str, **models: tuple[float, ...]) -> str:
        rows = []
        for model, times in models.items():
            found = {
                name: {"ms": ms, "compile_s": ms / 2} for name, ms in zip(("ours", "default"), times, strict=False)
            }
            over = {"default": times[1] / times[0]} if len(times) > 1 else {}
            row = {"model": model, "ratio": over.get("default"), "over": over, "contenders": found}
            rows.append(row | {"aa_ratio": 1.01})
        path = tmp_path / f"{day}.json"
        head = {"commit": f"c{day}", "date": day, "command": f"run {day}", "gpu": f"gpu {day}"}
        path.write_text(json.dumps({**head, "rows": rows}))
        return str(path)

    files = [
        file("1", a=(1.0, 2.0), b=(1.0, 3.0)),
        file("2", a=(1.0, 4.0), b=(1.0,)),
        file("3", a=(1.0, 5.0), c=(2.0,)),
    ]
    out = tmp_path / "all.json"
    monkeypatch.setattr(sys, "argv", ["run_compile.py", "--merge", *files, "--out", str(out)])
    run_compile.main()
    content = json.loads(out.read_text())
    rows = {row["model"]: row for row in content["rows"]}
    assert {name: (row["ratio"], row["measured"]["commit"]) for name, row in rows.items()} == {
        "a": (5.0, "c3"),
        "b": (3.0, "c1"),
        "c": (None, "c3"),
    }
    assert [(one["measured"]["date"], one["over"]) for one in rows["a"]["others"]] == [
        ("1", {"default": 2.0}),
        ("2", {"default": 4.0}),
    ]
    assert rows["b"]["others"] == [
        {
            "measured": {"commit": "c2", "date": "2", "command": "run 2"},
            "over": {},
            "compile_s": {"ours": 0.5},
            "aa_ratio": 1.01,
        }
    ]
    assert (content["gpu"], content["summary"]["all"]["geomean"]) == ("gpu 3", 3.873)
    monkeypatch.setattr(sys, "argv", ["run_compile.py", "--merge", str(out), files[2], "--out", str(out)])
    run_compile.main()
    again = {row["model"]: row for row in json.loads(out.read_text())["rows"]}
    assert again == rows, "these rows were in it already"


def test_table_tells_ratios_over_both_rivals(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, mode: str, over: dict[str, float], over_max: dict[str, float]) -> dict[str, Any]:
        found = {
            "ours": {"ms": 2.0, "compile_s": 11.0, "peak_gb": 2.0, "error": 0.003},
            "default": {"ms": 3.0, "compile_s": 10.0, "peak_gb": 2.0, "error": 0.004},
        }
        told = {"model": name, "mode": mode, "over": over, "over_max": over_max, "replaced": 1, "places": 4}
        return {**told, "contenders": found}

    first, second = tmp_path / "a.json", tmp_path / "b.json"
    both = {"default": 2.0, "max_autotune": 1.0}
    old = row("gpt2", "inference", {"default": 9.0}, {})
    first.write_text(json.dumps({"rows": [row("vit:training", "training", both, {}), old]}))
    better = row("gpt2", "inference", {"default": 0.5}, {"default": 1.25})
    second.write_text(json.dumps({"rows": [better, {"model": "moe", "ratio": None, "failure": "it broke"}]}))
    monkeypatch.setattr(sys, "argv", ["x", "--table", str(first), str(second)])
    run_compile.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| gpt2 | 3.000 | - | 2.000 | - | 0.500 | - | 1.250 | - | 1 of 4 | 1.10 | 1.00 | 0.75 |")
    assert lines[3].startswith("| vit:training | ")
    cells = {line.split(" | ")[0].strip("| *"): line.split(" | ")[5:9] for line in lines[4:10]}
    assert cells["geomean, inference"] == ["0.500 (1)", "-", "1.250 (1)", "-"]
    assert cells["geomean, all"] == ["1.000 (2)", "1.000 (1)", "1.250 (1)", "-"]
    assert cells["worst, all"] == ["0.500 (2)", "1.000 (1)", "1.250 (1)", "-"]
    assert lines[-1] == "moe: it broke" and len({line.count("|") for line in lines[:10]}) == 1
