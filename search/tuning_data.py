"""Recorded tuning data of others, read as spaces to search: Kernel Tuner's cache and T4 files, and CSV with a space."""

from __future__ import annotations

import ast
import csv
import dataclasses
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import UsageError
from kernelwright.search.parameter_space import ParameterSpace
from kernelwright.types import Measurement, Scalar, Schedule, Status

_CSV = ".csv.gz"
_SPACE = ".space.json"
_MILLISECONDS = ("compile_ms", "bench_ms", "verify_ms", "framework_ms")
_CACHE_MILLISECONDS = ("compile_time", "benchmark_time", "verification_time", "framework_time")
_OUTSIDE = "constraints"
_STATUSES: Mapping[str, Status] = {
    "compile_error": Status.BUILD_ERROR,
    "compile": Status.BUILD_ERROR,
    "CompilationFailedConfig": Status.BUILD_ERROR,
    "runtime_error": Status.CRASHED,
    "runtime": Status.CRASHED,
    "RuntimeFailedConfig": Status.CRASHED,
    "timeout": Status.TIMEOUT,
    "correctness": Status.WRONG_RESULT,
    "InvalidConfig": Status.OUT_OF_RESOURCES,
}


@dataclasses.dataclass(frozen=True)
class TuningData:
    """One kernel on one GPU, every schedule of the space with what came of it.

    seconds: what trying each schedule took (compiling, running, checking); empty where that was not recorded.
    """

    name: str
    space: ParameterSpace
    measurements: Mapping[Schedule, Measurement]
    seconds: Mapping[Schedule, float]


Row = tuple[dict[str, Scalar], Measurement, float | None]


def find_tuning_data(folder: Path) -> list[Path]:
    """The files of a folder that `load_tuning_data` reads, in order of their names."""
    tables = [path for path in folder.glob(f"*{_CSV}") if _space_of(path).is_file()]
    others = [path for ending in ("*.json", "*.json.gz") for path in folder.glob(ending)]
    return sorted([*tables, *(path for path in others if not path.name.endswith(_SPACE))])


def load_tuning_data(path: Path) -> TuningData:
    """A `<name>.csv.gz` with `<name>.space.json` beside it, or a Kernel Tuner cache or T4 file (.json or .json.gz).

    UsageError when it is none of these, or when nothing in it worked.
    """
    try:
        if path.name.endswith(_CSV):
            return _from_csv(path)
        data = json.loads(_text(path))
        if isinstance(data, dict) and "cache" in data:
            return _from_cache(path, data)
        if isinstance(data, dict) and "results" in data:
            return _from_t4(path, data)
    except (OSError, KeyError, TypeError, ValueError, EOFError) as error:
        raise UsageError(f"{path} could not be read as tuning data: {type(error).__name__}: {error}") from error
    raise UsageError(f"{path} must be a Kernel Tuner cache or T4 file (with 'cache' or 'results'), or CSV with a space")


def _from_csv(path: Path) -> TuningData:
    described = json.loads(_space_of(path).read_text(encoding="utf-8"))
    values: dict[str, list[Scalar]] = described["values"]
    written = {name: {str(value): value for value in choices} for name, choices in values.items()}

    def rows() -> Iterator[Row]:
        for line in csv.DictReader(_text(path).splitlines()):
            knobs = {name: written[name][line[name]] for name in values}
            costs = [float(line[name]) for name in _MILLISECONDS if line.get(name)]
            seconds = float(line["seconds"]) if line.get("seconds") else sum(costs) / 1e3 if costs else None
            yield knobs, _measurement(line["time_ms"] or math.inf, line["status"]), seconds

    return _assembled(_stem(path), values, described.get("restrictions", ()), rows())


def _from_cache(path: Path, data: Mapping[str, Any]) -> TuningData:
    names = data["tune_params_keys"]

    def rows() -> Iterator[Row]:
        for entry in data["cache"].values():
            time = entry["time"]
            status = time if isinstance(time, str) else "ok"
            yield {name: entry[name] for name in names}, _measurement(time, status), _cost(entry, _CACHE_MILLISECONDS)

    values = {name: data["tune_params"][name] for name in names}
    return _assembled(_stem(path), values, _restrictions(data.get("restrictions", ())), rows())


def _from_t4(path: Path, data: Mapping[str, Any]) -> TuningData:
    kept = [result for result in data["results"] if result.get("invalidity") != _OUTSIDE]

    def rows() -> Iterator[Row]:
        for result in kept:
            times = result.get("times", {})
            values = {m["name"]: m["value"] for m in result.get("measurements", ())}
            objective = next(iter(result.get("objectives", ())), "time")
            status = result.get("invalidity", "correct")
            time = values.get(objective, next(iter(values.values()), math.inf))
            costs = (v for name, v in times.items() if name != "runtimes" and isinstance(v, int | float))
            cost = sum(costs) / 1e3 if times else None
            yield dict(result["configuration"]), _measurement(time, "ok" if status == "correct" else status), cost

    names = list(kept[0]["configuration"]) if kept else []
    found = {name: sorted({r["configuration"][name] for r in kept}, key=lambda v: (str(type(v)), v)) for name in names}
    return _assembled(_stem(path), found, _restrictions(_t1_restrictions(data)), rows())


def _t1_restrictions(data: Mapping[str, Any]) -> list[str]:
    conditions = data.get("ConfigurationSpace", {}).get("Conditions", ())
    return [condition["Expression"] for condition in conditions]


def _restrictions(found: Any) -> list[str]:
    """Those that are expressions; a cache may also hold the names of functions, which are of no use here."""
    texts = [text for text in found if isinstance(text, str)] if isinstance(found, Sequence) else []
    return [text for text in texts if _is_expression(text)]


def _is_expression(text: str) -> bool:
    try:
        return not isinstance(ast.parse(text, mode="eval").body, ast.Name | ast.Constant)
    except SyntaxError:
        return False


def _cost(entry: Mapping[str, Any], names: Sequence[str]) -> float | None:
    costs = [float(entry[name]) for name in names if isinstance(entry.get(name), int | float)]
    return sum(costs) / 1e3 if costs else None


def _measurement(time_ms: Any, status: str) -> Measurement:
    time = float(time_ms) if isinstance(time_ms, int | float) or _is_number(time_ms) else math.inf
    if status == "ok" and 0 < time < 1e19:
        return Measurement(Status.OK, time * 1e3)
    return Measurement(_STATUSES.get(status, Status.CRASHED), message=status)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _assembled(
    name: str, values: Mapping[str, Sequence[Scalar]], restrictions: Sequence[str], rows: Iterator[Row]
) -> TuningData:
    measurements: dict[Schedule, Measurement] = {}
    seconds: dict[Schedule, float] = {}
    for knobs, measurement, cost in rows:
        schedule = Schedule(name, knobs)  # type: ignore[arg-type]
        measurements[schedule] = measurement
        if cost is not None:
            seconds[schedule] = cost
    if not any(measurement.ok for measurement in measurements.values()):
        raise UsageError(f"{name} must hold at least one configuration that worked, got none of {len(measurements)}")
    space = ParameterSpace(name, values, restrictions, list(measurements))
    return TuningData(name, space, measurements, seconds if len(seconds) == len(measurements) else {})


def _space_of(path: Path) -> Path:
    return path.with_name(_stem(path) + _SPACE)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".json")


def _text(path: Path) -> str:
    if path.name.endswith(".gz"):
        return gzip.decompress(path.read_bytes()).decode("utf-8")
    return path.read_text(encoding="utf-8")
