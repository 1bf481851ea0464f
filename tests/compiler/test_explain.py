"""What the backend would do with a model is told without a GPU and without compiling, as a table, a page and JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelwright.compiler import explain as explain_module
from kernelwright.compiler.backend import Options, known_answers
from kernelwright.compiler.collect import load_model
from kernelwright.compiler.explain import explain, explain_file
from kernelwright.compiler.piece_file import wanted_of
from kernelwright.compiler.pieces import KnownPieces, WantedPiece
from kernelwright.compiler.service_answers import Source
from kernelwright.db.store import Store
from kernelwright.errors import ServiceError
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.pieces import PieceTimes
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.service import cli_explain
from kernelwright.service.answering import tell_record
from kernelwright.service.cli import main
from kernelwright.service.schemas import RecordOut
from kernelwright.types import TuningRecord

MODEL = """
import torch
layers = [torch.nn.Linear(64, 64, dtype=torch.float16) for _ in range(2)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 32, bias=False, dtype=torch.float16)).requires_grad_(False)
inputs = torch.zeros(16, 64, dtype=torch.float16)
"""
Maker = Callable[..., TuningRecord]


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "model.py"
    file.write_text(MODEL, encoding="utf-8")
    return str(file)


@pytest.fixture
def db(tmp_path: Path, record_of: Maker) -> str:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    with Store.open(url) as store:
        store.put_winner(record_of(matmul_workload(16, 64, 64, "fp16", epilogue=("bias",))))
        store.put_winner(record_of(matmul_workload(16, 32, 64, "fp16"), ours_us=120.0))
    return url


def test_forward_and_backward_are_explained_and_left_alone(recorder: Any) -> None:
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    report = explain(layer, [x], recorder(), ("measured",))
    assert len(report.replaced) == len(report.decisions) == 2
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(8, 8))


def test_the_same_products_are_counted_together(target: str, db: str) -> None:
    found = explain_file({"target": target, "device": "h100", "db": db, "url": None})
    first, second = found["products"]
    assert (first["calls"], first["replaced"], first["saved_us"]) == (2, True, 100.0)
    assert (second["calls"], second["replaced"], second["saved_us"]) == (1, False, 0.0)
    assert "torch.mm" in second["reason"] and found["warnings"] == []


def elsewhere(record: TuningRecord, day: int, **software: str) -> TuningRecord:
    """The record as another machine's, with other software, of another day."""
    toolchain = dataclasses.replace(record.toolchain, driver="1.2.3", **software)
    return dataclasses.replace(record, toolchain=toolchain, created_at=f"2026-02-{day:02d}T00:00:00Z")


def test_a_gpu_elsewhere_runs_with_the_software_of_its_newest_record(
    target: str, tmp_path: Path, record_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'team.db'}"
    many = record_of(matmul_workload(16, 64, 64, "fp16", epilogue=("bias",)))
    once = record_of(matmul_workload(16, 32, 64, "fp16"))
    with Store.open(url) as store:
        store.put_winner(elsewhere(once, 1, torch="2.9.0"))
        store.put_winner(elsewhere(many, 2, torch="2.10.0"))
    job = {"target": target, "device": "h100", "db": url, "url": None}
    found = explain_file(job)
    assert (found["toolchain"]["torch"], found["toolchain"]["driver"]) == ("2.10.0", "1.2.3")
    assert [product["replaced"] for product in found["products"]] == [True, False]
    assert "stale" in found["products"][1]["reason"]
    # with the GPU here its kernels run with what is here
    monkeypatch.setattr(explain_module, "gpu_count", lambda: 1)
    monkeypatch.setattr(explain_module, "present_device", lambda: many.device)
    found = explain_file(job)
    assert found["toolchain"] == current_toolchain(TIMER_VERSION).to_json()
    assert [product["replaced"] for product in found["products"]] == [False, False]


def test_a_service_says_with_what_software_its_records_came(
    tmp_path: Path, record_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = elsewhere(record_of(matmul_workload(16, 64, 64, "fp16")), 1, torch="2.10.0")
    asked: list[str | None] = []

    class Told:
        def records(self, hardware: str) -> Iterator[RecordOut]:
            asked.append(hardware)
            if len(asked) == 3:
                raise ServiceError("it is down")
            yield from [tell_record(record)] if len(asked) == 1 else []

    monkeypatch.setattr(Source, "client", lambda source: contextlib.nullcontext(Told()))
    options = Options(db=f"sqlite:///{tmp_path / 'none.db'}", url="http://127.0.0.1:1", device="h100")
    here = current_toolchain(TIMER_VERSION)
    assert [explain_module.software(options) for _ in range(3)] == [record.toolchain, here, here]
    assert asked == ["h100"] * 3


def test_the_command_prints_a_table_json_and_a_page(
    target: str, db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["explain", target, "--db", db, "--html", str(page), "--json"])
    assert ended.value.code == 0
    assert [product["calls"] for product in json.loads(capsys.readouterr().out)["products"]] == [2, 1]
    text = page.read_text(encoding="utf-8")
    assert "2 of 3 products replaced, 100.0 us a step" in text
    table = text[text.index("<table>") : text.index("</table>") + len("</table>")]
    rows = [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(table).iter("tr")]
    assert rows[1][0] == "2" and rows[1][2:6] == ["our kernel", "50.00 us", "100.00 us", "100.00 us"]


def test_a_new_database_has_the_winners_that_ship_with_us(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_explain, "ChildProcess", forked)
    with pytest.raises(SystemExit) as ended:
        main(["explain", target, "--db", f"sqlite:///{tmp_path / 'new.db'}", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0 and [product["calls"] for product in told["products"]] == [2, 1]
    with Store.open(f"sqlite:///{tmp_path / 'new.db'}") as store:
        device = named_device("h100").key
        (newest,) = store.records(device_key=device, limit=1)
        assert told["toolchain"] == newest.toolchain.to_json()


def test_a_table_that_no_terminal_shows_is_not_cut(
    target: str, db: str, capsys: pytest.CaptureFixture[str], forked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_explain, "ChildProcess", forked)
    with pytest.raises(SystemExit):
        main(["explain", target, "--db", db])
    out = capsys.readouterr().out
    assert str(matmul_workload(16, 64, 64, "fp16", epilogue=("bias",))) in out and "…" not in out


def test_a_file_that_is_no_model_is_misuse(
    tmp_path: Path, db: str, capsys: pytest.CaptureFixture[str], forked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_explain, "ChildProcess", forked)
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(tmp_path / "none.py"), "--db", db])
    assert ended.value.code == 2 and "must be a Python file" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_misuse_and_the_table_is_told(
    target: str, db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(cli_explain, "ChildProcess", forked)
    with pytest.raises(SystemExit) as ended:
        main(["explain", target, "--db", db, "--html", str(tmp_path / "none" / "page.html")])
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and "page.html cannot be written: No such file" in err and "2 of 3" in out


def test_a_service_that_is_down_is_warned_of(target: str, db: str) -> None:
    job = {"target": target, "device": "h100", "url": "http://127.0.0.1:1"}
    for where, replaced in ((db, 2), (f"{db}.none", 0)):
        found = explain_file({**job, "db": where})
        assert "no answer from the service at http://127.0.0.1:1" in found["warnings"][0]
        assert sum(product["calls"] for product in found["products"] if product["replaced"]) == replaced


def test_words_in_brackets_stay_in_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    product = {"calls": 1, "workload": "conv2d[n=1]", "replaced": False, "reason": "why [/not]", "saved_us": 0.0}
    found = {
        "products": [{**product, "ours_us": None, "vendor_us": None}],
        "warnings": [],
        "toolchain": {"torch": "2", "triton": "3", "driver": "none"},
    }
    monkeypatch.setattr(cli_explain.ChildProcess, "call", lambda *_: found)
    with pytest.raises(SystemExit) as ended:
        main(["explain", "model.py"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "conv2d[n=1]" in out and "why [/not]" in out


def test_times_of_whole_pieces_decide(target: str, db: str) -> None:
    """By the record the linear layers are worth replacing; in their place they are not."""
    options = Options(db=db, device="h100")
    (wanted,) = wanted_of(target, options)
    assert wanted.calls == 2 and str(wanted.piece) == "addmm"
    ((key, option),) = wanted.options.items()
    assert option.workload.epilogue == ("bias",)
    place = (wanted.piece.key, option.device.key, current_toolchain(TIMER_VERSION).key)
    with Store.open(db) as store:
        store.put_piece(PieceTimes(*place, str(wanted.piece), 40.0, {key: 45.0}, {}, 0.01))
    first, second = explain_file({"target": target, "device": "h100", "db": db, "url": None})["products"]
    assert (first["replaced"], first["ours_us"], first["vendor_us"], second["replaced"]) == (False, 45.0, 40.0, False)
    assert first["reason"] == "measured in place (addmm): no faster than Inductor's own"


RESIDUAL = """
import torch
import torch.nn.functional as functional

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(64, 64, dtype=torch.float16)

    def forward(self, x):
        mask = torch.ones(16, 16, dtype=torch.bool).tril()
        x = x + functional.dropout(self.inside(x), 0.1, self.training).clone()
        heads = x.view(1, 1, 16, 64)
        return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)

model = Block().eval().requires_grad_(False)
inputs = torch.zeros(16, 64, dtype=torch.float16)
"""


def test_pieces_of_a_model_are_those_that_a_compile_asks_for(tmp_path: Path, record_of: Maker) -> None:
    file, url = tmp_path / "block.py", f"sqlite:///{tmp_path / 'records.db'}"
    file.write_text(RESIDUAL, encoding="utf-8")
    with Store.open(url) as store:
        for epilogue in (("bias",), ("bias", "residual")):
            store.put_winner(record_of(matmul_workload(16, 64, 64, "fp16", epilogue=epilogue)))
    options = Options(db=url, device="h100")
    asked: dict[str, set[str]] = {}

    class Asked(KnownPieces):
        def measure(self, wanted: Callable[[], Sequence[WantedPiece]]) -> None:
            asked.update({one.piece.key: set(one.options) for one in wanted()})

    explain(*load_model(str(file)), known_answers(options), ("measured",), Asked([]))
    wanted = {one.piece.key: set(one.options) for one in wanted_of(str(file), options)}
    assert wanted == asked and [len(keys) for keys in asked.values()] == [2]
