"""The commands that carry data elsewhere, let go of it, and measure it again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kernelwright.db import Store, Trust
from kernelwright.search import ReplayRunner
from kernelwright.service.refreshing import Refreshed, refresh
from kernelwright.service.tool_exports import tool_files
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import FrozenMap, Measurement, Schedule, Status, Trial, TuningRecord, Workload
from tests.service.command_line import CommandLine

PROBLEM = ["matmul", "--shape", "M=2048,N=4096,K=4096", "--dtype", "bf16"]
TUNE = ["tune", *PROBLEM, "--device", "replay:h100", "--trials", "8", "--strategy", "random"]
QUERY = ["query", *PROBLEM, "--hardware", "h100"]
KEY = "a secret of the whole team"


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz", "all.parquet"])
def test_an_unsigned_import_is_stale_until_it_is_measured_here(cli: CommandLine, name: str) -> None:
    cli.json(*TUNE)
    assert cli.json("export", name) == {"file": name, "trials": 8, "records": 1, "signed": False}
    db = ["--db", "sqlite:///copy.db"]
    assert cli.json("import", name, *db) == {"file": name, "trials": 8, "records": 1, "trusted": False}
    assert cli.json("import", name, *db)["trials"] == 0
    assert [(entry["action"], entry["subject"]) for entry in cli.json("audit", *db)["entries"]] == [
        ("import", name)
    ] * 2
    answer = cli.json(*QUERY, *db)
    assert answer["how"] == "stale" and "without a valid signature" in answer["note"]
    done = cli.json("refresh", "--device", "replay:h100", *db)
    assert (done["measured"], done["quarantined"]) == (1, 0)
    assert cli.json(*QUERY, *db)["how"] == "measured"
    assert cli.json("refresh", "--device", "replay:h100", *db)["records"] == []


def test_a_signed_import_is_measured(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELWRIGHT_SHARE_KEY", KEY)
    cli.json(*TUNE)
    assert cli.json("export", "all.jsonl")["signed"]
    db = ["--db", "sqlite:///copy.db"]
    assert cli.json("import", "all.jsonl", *db)["trusted"]
    assert cli.json(*QUERY, *db)["how"] == "measured"


def test_export_wants_a_format_that_there_is(cli: CommandLine) -> None:
    for argv, said in (
        (["x", "--format", "csv"], "must be one of jsonl"),
        (["x", "--format", "parquet"], "must end in"),
    ):
        code, _, err = cli.run("export", *argv)
        assert code == 2 and said in err
    assert cli.json("export", "none.jsonl", "--hardware", "l4")["trials"] == 0


def test_prune_tells_and_does(cli: CommandLine) -> None:
    cli.json(*TUNE)
    told = cli.json("db", "prune", "--sample", "2", "--dry-run")
    assert told["trials"] == 8 and told["removed"] > 0
    assert cli.json("db", "prune", "--sample", "2") == {**told, "dry_run": False}
    assert cli.json("db", "prune", "--sample", "2")["removed"] == 0
    assert "removed 0 of" in cli.run("db", "prune", "--sample", "2")[1]
    assert cli.json(*QUERY)["how"] == "measured"


def test_an_empty_database_begins_with_the_records_of_the_package(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KERNELWRIGHT_PRETUNED")
    first = cli.json(
        "query", "matmul", "--shape", "M=4096,N=4096,K=4096", "--hardware", "h100", "--db", "sqlite:///n.db"
    )
    assert first["how"] in ("measured", "stale") and first["record_id"]
    with Store.open("sqlite:///n.db") as store:
        state = store.record_state(first["record_id"])
        assert state is not None and (state.trust, state.source) == (Trust.TRUSTED, "pretuned")
        assert {record.origin for record in store.records(limit=None)} == {"pretuned"}


def winner(store: Store, runner: ReplayRunner, args: WorkloadArgs, **changes: Any) -> TuningRecord:
    """A stored record of the recorded workload, changed."""
    workload = args.workload()
    schedule, seen = next((s, m) for s, m in runner.measure(workload, list(runner.space(workload))) if m.ok)
    prints = runner.fingerprints(workload)
    made = TuningRecord(
        workload, runner.device, runner.toolchain, schedule, seen, prints[schedule.template], "tune", "2026-01-01"
    )
    changed = dataclasses.replace(made, **changes)
    store.put_winner(changed)
    return changed


def refreshed(store: Store, runner: ReplayRunner, limit: int | None = None) -> list[Refreshed]:
    told: list[Refreshed] = []
    done = refresh(store, runner, limit, told.append)
    assert done == told
    return done


def test_each_part_of_a_toolchain_makes_stale_and_is_named(
    store: Store, runner: ReplayRunner, args: WorkloadArgs
) -> None:
    current = winner(store, runner, args)
    assert refreshed(store, runner) == []
    for part, old in (("triton", "3.0"), ("compiler", "ptxas 1"), ("driver", "1"), ("torch", "2.0"), ("timer", 0)):
        with Store.open("sqlite://") as other:
            software = dataclasses.replace(runner.toolchain, **{part: old})
            stale = winner(other, runner, args, toolchain=software)
            (one,) = refreshed(other, runner)
            assert (one.outcome, one.record) == ("measured", stale)
            assert str(old) in one.why and one.why.count("now") == 1
            assert one.now is not None and one.now.key == current.key and one.now.vendor_us == 200.0
            assert refreshed(other, runner) == []


def test_a_template_of_another_source_is_stale(store: Store, runner: ReplayRunner, args: WorkloadArgs) -> None:
    winner(store, runner, args, template_fingerprint="old")
    (one,) = refreshed(store, runner)
    assert one.outcome == "measured" and "another source of the template" in one.why


def test_what_fails_now_goes_into_quarantine(
    store: Store, args: WorkloadArgs, trials: list[Trial], runner: ReplayRunner
) -> None:
    stale = winner(store, runner, args, toolchain=dataclasses.replace(runner.toolchain, triton="3.0"))
    wrong = Measurement(Status.WRONG_RESULT, message="differs at [0, 0]")
    spoiled = [dataclasses.replace(t, measurement=wrong) if t.schedule == stale.schedule else t for t in trials]
    (one,) = refreshed(store, ReplayRunner(spoiled, runner.device))
    assert one.outcome == "quarantined" and "differs at [0, 0]" in one.detail
    assert store.find_records(stale.workload.key, runner.device.key) == []
    state = store.record_state(stale.key)
    assert state is not None and state.trust is Trust.QUARANTINED and "wrong_result" in state.reason
    assert store.count_trials() == {"wrong_result": 1}
    assert refreshed(store, runner) == []


def test_most_used_first_and_no_more_than_wanted(store: Store, args: WorkloadArgs, trials: list[Trial]) -> None:
    other = dataclasses.replace(args.workload(), dims=FrozenMap({"M": 1024, "N": 4096, "K": 4096}))
    runner = ReplayRunner([*trials, *(dataclasses.replace(t, workload=other) for t in trials)], trials[0].device)
    old = dataclasses.replace(runner.toolchain, triton="3.0")
    often = winner(store, runner, args, toolchain=old, created_at="2026-01-01")
    seldom = winner(store, runner, args, toolchain=old, workload=other, created_at="2026-02-01")
    store.count_use([seldom.key, often.key, often.key])
    assert [one.record for one in refreshed(store, runner, limit=1)] == [often]
    assert [one.record for one in refreshed(store, runner)] == [seldom]


def test_what_cannot_be_measured_here_is_left_alone(store: Store, runner: ReplayRunner, args: WorkloadArgs) -> None:
    elsewhere = dataclasses.replace(args.workload(), dims=FrozenMap({"M": 8, "N": 8, "K": 8}))
    winner(store, runner, args, toolchain=dataclasses.replace(runner.toolchain, triton="3.0"), workload=elsewhere)
    (one,) = refreshed(store, runner)
    assert one.outcome == "skipped" and one.detail
    assert store.count_trust() == {"measured": 1}


def exported(form: str, *records: TuningRecord) -> tuple[dict[str, Any], int]:
    made = tool_files(form, records)
    return {name: json.loads(text) for name, text in made.files.items()}, made.left_out


POINTER = Schedule(
    "pointer",
    FrozenMap(
        {"block_m": 128, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 3, "group_m": 8, "split_k": 1}
        | {"precision": "bf16"}
    ),
)


@pytest.fixture
def crowned(store: Store, runner: ReplayRunner, args: WorkloadArgs) -> TuningRecord:
    return winner(store, runner, args, schedule=POINTER)


def test_triton_configs_are_arguments_of_triton(crowned: TuningRecord) -> None:
    files, left_out = exported("triton", crowned)
    ((name, content),) = files.items()
    assert name == "NVIDIA_H100_SXM5_80_GB.triton.json" and left_out == 0
    config = content[str(crowned.workload)]["config"]
    assert (config["num_warps"], config["num_stages"], config["kwargs"]["BLOCK_M"]) == (4, 3, 128)


def test_vllm_files_are_named_and_made_as_vllm_reads_them(crowned: TuningRecord) -> None:
    fp8 = {"a": "fp8e4m3", "b": "fp8e4m3", "out": "bf16"}
    wanted = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
    wanted |= {"num_warps": 4, "num_stages": 3}

    def of(dims: dict[str, int], dtypes: dict[str, str]) -> TuningRecord:
        workload = Workload("matmul", FrozenMap(dims), FrozenMap(dtypes))
        return dataclasses.replace(crowned, workload=workload)

    records = [of({"M": m, "N": 4096, "K": 7168}, fp8) for m in (256, 16)]
    files, left_out = exported("vllm-fp8", crowned, *records)
    name = "N=4096,K=7168,device_name=NVIDIA_H100_SXM5_80_GB,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert files == {name: {"16": wanted, "256": wanted}} and left_out == 1
    assert list(files[name]) == ["16", "256"]
    moe = of({"E": 8, "M": 64, "N": 14336, "K": 4096}, {"a": "bf16", "b": "bf16", "out": "bf16"})
    files, left_out = exported("vllm-moe", crowned, moe)
    assert files == {"E=8,N=14336,device_name=NVIDIA_H100_SXM5_80_GB.json": {"64": wanted}} and left_out == 1


def test_inductor_finds_its_own_key(crowned: TuningRecord) -> None:
    skinny = dataclasses.replace(crowned, schedule=Schedule("skinny", FrozenMap({"block_m": 16})), created_at="2025")
    vendor = dataclasses.replace(crowned, vendor="torch.mm", vendor_us=1.0)
    (table,) = exported("inductor", crowned, skinny)[0].values()
    key = "((torch.bfloat16, [2048, 4096], [4096, 1]), (torch.bfloat16, [4096, 4096], [1, 4096]))+mm"
    ((found, (choice,)),) = table.items()
    assert found == key
    assert choice["template_id"] == "triton::mm" and (choice["BLOCK_M"], choice["EVEN_K"]) == (128, True)
    (table,) = exported("inductor", vendor)[0].values()
    assert table == {key: [{"template_id": "aten::mm"}]}
    assert exported("inductor", skinny) == ({}, 1)


def test_a_device_of_an_import_cannot_choose_the_path(crowned: TuningRecord) -> None:
    evil = dataclasses.replace(crowned, device=dataclasses.replace(crowned.device, name="../../etc/x"))
    assert list(exported("triton", evil)[0]) == ["etc_x.triton.json"]


def test_winners_for_other_tools_by_command(
    cli: CommandLine, store: Store, runner: ReplayRunner, args: WorkloadArgs
) -> None:
    winner(store, runner, args, schedule=POINTER)
    done = cli.json("export", "out", "--format", "inductor", "--hardware", "h100")
    assert done == {"folder": "out", "files": ["NVIDIA_H100_SXM5_80_GB.inductor.json"], "written": 1, "left_out": 0}
    assert json.loads(Path("out", done["files"][0]).read_text())
    assert cli.json("export", "out", "--format", "vllm-moe")["left_out"] == 1
    code, _, err = cli.run("export", "out/NVIDIA_H100_SXM5_80_GB.inductor.json", "--format", "triton")
    assert code == 2 and "cannot be written" in err
