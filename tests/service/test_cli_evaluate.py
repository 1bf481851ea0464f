from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelwright.service.cli import main

PUBLIC = Path(__file__).resolve().parents[2] / "benchmarks" / "replay"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "search", *words])
    return int(ended.value.code or 0)


def test_writes_rows_and_a_plot_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "results" / "search.json", tmp_path / "search.svg"
    common = ("--data", str(PUBLIC), "--spaces", "pnpoly", "--seeds", "2", "--limit", "32", "--json", str(out))
    assert run(*common, "--strategies", "random") == 0
    first = json.loads(out.read_text())
    assert [row["strategy"] for row in first["rows"]] == ["random (exact)", "random"]
    assert {"space", "seeds", "q16", "q32", "p10_32", "fscore_10_32", "intervals"} <= set(first["rows"][1])
    capsys.readouterr()
    assert run(*common, "--strategies", "random,evolutionary", "--plot", str(picture)) == 0
    second = json.loads(out.read_text())
    assert second["rows"][:2] == first["rows"]
    assert second["summary"]["evolutionary"]["spaces"] == 1
    told = capsys.readouterr()
    assert told.err.strip() == "pnpoly_kt__RTX_3090: evolutionary"
    assert "pnpoly_kt__RTX_3090" in told.out
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--strategies", "annealing"), "annealing"),
        (("--spaces", "nothing-like-this"), "nothing-like-this"),
    ],
)
def test_misuse_is_told(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--data", str(PUBLIC), *words) == 2
    assert message in capsys.readouterr().err


def test_rows_of_another_protocol_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "search.json"
    out.write_text(json.dumps({"seeds": 1, "limit": 32, "batch": 1, "rows": []}))
    assert run("--data", str(PUBLIC), "--seeds", "2", "--limit", "32", "--json", str(out)) == 2
    assert "give another file" in capsys.readouterr().err


def test_a_folder_without_data_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--data", str(tmp_path)) == 2
    assert "recorded data" in capsys.readouterr().err
