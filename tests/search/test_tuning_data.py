from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kernelwright.errors import UsageError
from kernelwright.search.tuning_data import find_tuning_data, load_tuning_data
from kernelwright.types import Schedule, Status

CACHE: dict[str, Any] = {
    "device_name": "A",
    "kernel_name": "k",
    "tune_params_keys": ["x", "y"],
    "tune_params": {"x": [1, 2], "y": ["a", "b"]},
    "restrictions": ["x < 3", "no expression here", "a_function"],
    "cache": {
        "1,a": {"x": 1, "y": "a", "time": 2.0, "compile_time": 500.0, "benchmark_time": 250.0},
        "2,a": {"x": 2, "y": "a", "time": "RuntimeFailedConfig", "compile_time": 500.0},
        "1,b": {"x": 1, "y": "b", "time": "CompilationFailedConfig", "compile_time": 500.0},
        "2,b": {"x": 2, "y": "b", "time": 1e20, "compile_time": 500.0},
    },
}

T4: dict[str, Any] = {
    "schema_version": "1.0.0",
    "results": [
        {
            "configuration": {"x": 1, "y": 2},
            "invalidity": "correct",
            "times": {"compilation_time": 100.0, "benchmark": 20.0, "runtimes": [1.0, 2.0]},
            "measurements": [{"name": "power", "value": 9.0}, {"name": "time", "value": 1.5, "unit": "ms"}],
            "objectives": ["time"],
        },
        {"configuration": {"x": 2, "y": 2}, "invalidity": "compile", "times": {"compilation_time": 10.0}},
        {"configuration": {"x": 3, "y": 2}, "invalidity": "constraints"},
    ],
}


def test_a_kernel_tuner_cache(tmp_path: Path) -> None:
    path = tmp_path / "conv__gpu.json.gz"
    path.write_bytes(gzip.compress(json.dumps(CACHE).encode()))
    data = load_tuning_data(path)
    assert data.name == "conv__gpu"
    found = {(s.knobs["x"], s.knobs["y"]): (m.status, m.median_us) for s, m in data.measurements.items()}
    assert found == {
        (1, "a"): (Status.OK, 2000.0),
        (2, "a"): (Status.CRASHED, None),
        (1, "b"): (Status.BUILD_ERROR, None),
        (2, "b"): (Status.CRASHED, None),
    }
    assert [r.text for r in data.space.restrictions] == ["x < 3"]
    assert data.seconds[Schedule("conv__gpu", {"x": 1, "y": "a"})] == pytest.approx(0.75)  # type: ignore[arg-type]


def test_a_t4_file_leaves_out_what_is_outside_the_space(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    path.write_text(json.dumps(T4))
    data = load_tuning_data(path)
    assert [(m.status, m.median_us) for m in data.measurements.values()] == [
        (Status.OK, 1500.0),
        (Status.BUILD_ERROR, None),
    ]
    assert list(data.seconds.values()) == pytest.approx([0.12, 0.01])


def test_a_table_with_its_space_and_what_a_folder_holds(tmp_path: Path) -> None:
    table = "x,y,status,time_ms,compile_ms,bench_ms\n1,1,ok,0.5,1000,500\n2,1,runtime_error,,1000,\n"
    (tmp_path / "k__g.csv.gz").write_bytes(gzip.compress(table.encode()))
    described = {"values": {"x": [1, 2], "y": [1]}, "restrictions": ["x <= 2"]}
    (tmp_path / "k__g.space.json").write_text(json.dumps(described))
    (tmp_path / "lonely.csv.gz").write_bytes(b"")
    (tmp_path / "other.json").write_text("{}")
    assert [path.name for path in find_tuning_data(tmp_path)] == ["k__g.csv.gz", "other.json"]
    data = load_tuning_data(tmp_path / "k__g.csv.gz")
    assert [m.median_us for m in data.measurements.values()] == [500.0, None]
    assert list(data.seconds.values()) == [1.5, 1.0]


@pytest.mark.parametrize("text", ["{}", "[", '{"cache": {}}', '{"results": [{"configuration": {"x": 1}}]}'])
def test_what_is_no_tuning_data_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="bad"):
        load_tuning_data(path)
