"""The command line as it is typed: pure JSON on standard output, plain errors, exit codes 0, 1 and 2."""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from kernelwright.db import JobRequest, Store
from kernelwright.service import cli_tune
from kernelwright.service.auth import digest_of
from kernelwright.service.client import Client
from kernelwright.service.workload_args import WorkloadArgs
from tests.service.command_line import CommandLine

PROBLEM = ["matmul", "--shape", "M=2048,N=4096,K=4096", "--dtype", "bf16"]


def test_tune_then_query_as_written(cli: CommandLine) -> None:
    db = ["--db", "sqlite:///t.db"]
    tuned = cli.json("tune", *PROBLEM, "--device", "replay:h100", "--trials", "24", *db)
    asked = cli.json("query", *PROBLEM, "--hardware", "h100", *db)
    run = tuned.pop("run")
    assert tuned == asked
    assert asked["how"] == "measured" and asked["choice"] == "kernel" and asked["speedup"] > 1
    assert (run["strategy"], run["known_trials"]) == ("model", 0) and run["new_trials"] >= 24
    assert Path("t.db").exists()


def test_tune_again_goes_on(cli: CommandLine) -> None:
    tune = ["tune", *PROBLEM, "--device", "replay:h100", "--strategy", "random"]
    first = cli.json(*tune, "--trials", "6")["run"]
    second = cli.json(*tune, "--trials", "12")["run"]
    assert (first["new_trials"], second["known_trials"], second["new_trials"]) == (6, 6, 6)


def test_exhaustive(cli: CommandLine) -> None:
    run = cli.json("tune", *PROBLEM, "--device", "replay:h100", "--exhaustive")["run"]
    assert run["strategy"] == "exhaustive" and run["new_trials"] == 40 and run["failed_trials"] == 4


def test_interrupt_keeps_the_trials(cli: CommandLine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cli_tune.tune_and_store

    def interrupted(*given: Any) -> Any:
        def stop(trial: Any, progress: Any) -> None:
            if progress.trials == 5:
                raise KeyboardInterrupt

        return real(*given[:3], stop)

    monkeypatch.setattr(cli_tune, "tune_and_store", interrupted)
    tune = ["tune", *PROBLEM, "--device", "replay:h100", "--strategy", "random", "--trials", "12"]
    code, out, err = cli.run(*tune, "--json")
    assert (code, out) == (1, "") and "same command again" in err and "Traceback" not in err
    assert len(list(store.trials())) == 5
    monkeypatch.undo()


def test_tables_for_people(cli: CommandLine) -> None:
    code, out, err = cli.run("tune", *PROBLEM, "--device", "replay:h100", "--trials", "8", "--strategy", "random")
    assert code == 0 and "measured" in out and "torch.mm" in out and "8 new trials" in err
    code, out, err = cli.run("query", *PROBLEM, "--device", "replay:h100")
    assert code == 0 and "measured" in out and "toolchain" in out


def test_miss_is_no_error(cli: CommandLine) -> None:
    answer = cli.json("query", "matmul", "--shape", "M=64,N=64,K=64", "--hardware", "l4")
    assert answer["choice"] == "vendor" and answer["how"] in ("predicted", "vendor")
    assert cli.run("query", "matmul", "--shape", "M=64,N=64,K=64", "--hardware", "l4")[0] == 0


def test_source_by_workload_and_by_record(cli: CommandLine, tmp_path: Path) -> None:
    tuned = cli.json("tune", *PROBLEM, "--device", "replay:h100", "--trials", "8", "--strategy", "random")
    code, by_id, _ = cli.run("source", tuned["record_id"])
    assert code == 0 and tuned["record_id"] in by_id and "torch.mm 200.00 us" in by_id
    code, out, _ = cli.run("source", *PROBLEM, "--hardware", "h100", "-o", "kernel.py")
    assert (code, out) == (0, "")
    assert compileall.compile_file("kernel.py", quiet=1)
    assert cli.json("source", tuned["record_id"]) == {"source": by_id, "file": None}


def test_query_a_service(cli: CommandLine, app: FastAPI, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = cli.json("tune", *PROBLEM, "--device", "replay:h100", "--trials", "8", "--strategy", "random")
    monkeypatch.setattr("kernelwright.service.cli_query.Client", lambda url, timeout, key: client)
    monkeypatch.setenv("KERNELWRIGHT_URL", "http://test")
    assert cli.json("query", *PROBLEM, "--hardware", "h100")["record_id"] == tuned["record_id"]
    assert app.state.shared.metrics.queries.labels("measured")._value.get() == 1
    assert cli.json("query", *PROBLEM, "--hardware", "h100", "--db", "sqlite:///other.db")["record_id"] is None


def test_worker_does_one_job(cli: CommandLine, store: Store, args: WorkloadArgs) -> None:
    assert cli.json("worker", "--once") == {"job": None}
    store.submit(JobRequest(args.workload(), "replay:h100", "random", trials=6))
    assert cli.json("worker", "--once")["job"]["state"] == "done"
    store.submit(JobRequest(args.workload(), "replay:l4"))
    code, out, _ = cli.run("worker", "--once")
    assert code == 1 and "failed" in out and "l4" in out


@pytest.mark.usefixtures("no_gpu")
def test_devices(cli: CommandLine) -> None:
    found = {device["slug"]: device for device in cli.json("devices")["devices"]}
    assert found["h100"]["replay"]
    code, out, _ = cli.run("devices")
    assert code == 0 and "sm_90" in out


def test_db_upgrade(cli: CommandLine) -> None:
    told = cli.json("db", "upgrade", "--db", "sqlite:///new.db")
    assert told["before"] is None and told["after"]
    assert "up to date" in cli.run("db", "upgrade", "--db", "sqlite:///new.db")[1]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["tune", "matmull", "--shape", "M=1,N=1,K=1"], 2, "operator must be one of matmul"),
        (["tune", *PROBLEM, "--device", "replay:h1000"], 2, "h100"),
        (["tune", *PROBLEM, "--device", "toaster"], 2, "replay:"),
        (["tune", *PROBLEM, "--device", "replay:h100", "--strategy", "guess"], 2, "random, exhaustive"),
        (["tune", *PROBLEM, "--device", "replay:h100", "--trials", "0"], 2, "above 0"),
        (["tune", "matmul", "--shape", "M=8,N=8,K=8", "--device", "replay:h100"], 2, "nearest"),
        (["query", "matmul", "--shape", "M=-1,N=8,K=8", "--hardware", "h100"], 2, "whole number"),
        (["query", *PROBLEM, "--hardware", "h100", "--device", "replay:l4"], 2, "same GPU"),
        (["query", *PROBLEM, "--hardware", "h100", "--db", "sqlite:///a.db", "--url", "http://b"], 2, "either"),
        (["query", *PROBLEM, "--hardware", "h100", "--db", "sqlite:////no/such/folder/a.db"], 1, "directory"),
        (["query", *PROBLEM, "--hardware", "h100", "--db", "mysql://a"], 1, "sqlite:///"),
        (["query", *PROBLEM, "--hardware", "h100", "--url", "http://127.0.0.1:9"], 1, "kernelwright serve"),
        (["source", "0123"], 2, "--shape"),
        (["import", "missing.jsonl"], 1, "missing.jsonl"),
        (["worker", "--once", "--device", "toaster"], 2, "toaster"),
        (["tune", "matmul"], 2, "--shape"),
        (["brew"], 2, "brew"),
    ],
)
def test_misuse_is_told_plainly(cli: CommandLine, argv: list[str], code: int, words: str) -> None:
    found, out, err = cli.run(*argv)
    assert found == code, err
    assert out == "" and words in err and "Traceback" not in err


@pytest.mark.parametrize("argv", [[], ["--host", "::1"], ["--host", "0.0.0.0", "--insecure-open"]])
def test_serve(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    served: list[Any] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self: served.append(self))
    monkeypatch.setattr("sys.setswitchinterval", lambda seconds: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("gc.set_threshold", lambda *numbers: None)
    code, _, err = cli.run("serve", *argv, "--port", "9123")
    (server,) = served
    state = server.config.app.state.shared
    server.handle_exit(15, None)
    state.store.close()
    assert code == 0 and (server.config.port, server.config.host) == (9123, (argv or ["", "127.0.0.1"])[1])
    assert state.stopping.is_set() and server.should_exit
    assert ("nothing asks them" in err) == ("0.0.0.0" in argv)


def test_serve_does_not_let_everybody_in(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda self: pytest.fail("it was served"))
    code, _, err = cli.run("serve", "--host", "0.0.0.0")
    assert code == 2 and "keys create" in err and "--insecure-open" in err


def test_keys_are_made_listed_rotated_and_revoked(cli: CommandLine, store: Store) -> None:
    made = cli.json("keys", "create", "ci", "--scope", "read", "--scope", "tune")
    assert made["key"].startswith("kw_")
    found = store.find_key_by_hash(digest_of(made["key"]))
    assert found is not None and (found.id, found.name, found.scopes) == (made["id"], "ci", {"read", "tune"})

    rotated = cli.json("keys", "rotate", made["id"])
    assert store.find_key_by_hash(digest_of(made["key"])) is None
    assert cli.json("keys", "revoke", rotated["id"]) == {"revoked": rotated["id"]}
    assert store.find_key_by_hash(digest_of(rotated["key"])) is None
    assert cli.run("keys", "revoke", rotated["id"])[0] == 2

    listed = cli.json("keys", "list")["keys"]
    assert {key["id"] for key in listed} == {made["id"], rotated["id"]} and all(key["revoked_at"] for key in listed)
    assert made["key"] not in cli.run("keys", "list")[1]
    done = [entry["action"] for entry in cli.json("audit")["entries"]]
    assert done == ["key.revoke", "key.rotate", "key.create"]
    code, out, err = cli.run("keys", "create", "people")
    assert code == 0 and out.startswith("kw_") and len(out.splitlines()) == 1 and "not shown again" in err


def test_version_and_help(cli: CommandLine) -> None:
    assert cli.run("--version")[1].count(".") >= 1
    code, out, _ = cli.run("--help")
    for command in ("tune", "query", "source", "serve", "worker", "devices", "db", "export", "import", "keys", "audit"):
        assert command in out, command
    assert code == 0


def test_query_needs_no_web_framework_and_no_torch(tmp_path: Path, db_url: str) -> None:
    code = (
        "import sys\nfrom kernelwright.service.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print(sorted({'fastapi', 'uvicorn', 'torch', 'triton'} & set(sys.modules)), file=sys.stderr)\n"
    )
    argv = ["query", *PROBLEM, "--hardware", "h100", "--db", db_url, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "KERNELWRIGHT_PRETUNED": "0"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["how"] in ("predicted", "vendor")
    assert done.stderr.strip().splitlines()[-1] == "[]"
