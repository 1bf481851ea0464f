"""Recorded trials: one compact Parquet file for each device and operator, shipped with the package for replay.

Single readings (`samples_us`) are left out; everything else comes back as it was. The vendor call is recorded as a
trial whose schedule is `Schedule("vendor", {"call": ...})`.
"""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from kernelwright.errors import ArchiveError
from kernelwright.types import (
    VENDOR_TEMPLATE,
    DeviceSpec,
    FrozenMap,
    Measurement,
    Schedule,
    Status,
    Toolchain,
    Trial,
    TuningRecord,
    Workload,
    canonical_json,
)

T = TypeVar("T")

RECORDED_VERSION = 1
_VERSION_KEY = b"kernelwright.recorded"

_TEXTS = ("workload", "device", "toolchain", "template", "knobs", "status", "origin", "fingerprint")
_FLOATS = ("median_us", "error", "compile_s")
_INTS = ("registers", "spills", "shared_bytes")

_SCHEMA = pa.schema(
    [pa.field(name, pa.string()) for name in _TEXTS]
    + [pa.field(name, pa.float64()) for name in _FLOATS]
    + [pa.field(name, pa.int64()) for name in _INTS]
    + [pa.field("message", pa.string()), pa.field("measured_at", pa.string())],
    metadata={_VERSION_KEY: str(RECORDED_VERSION).encode()},
)


def recorded_path(slug: str, operator: str = "matmul") -> Path:
    """Where the packaged recording of an operator on a device lies, whether or not there is one."""
    return recorded_folder() / slug / f"{operator}.parquet"


def recorded_folder() -> Path:
    """The folder of the packaged recordings: one folder a device slug, one file an operator."""
    try:
        return Path(str(importlib.resources.files("kernelwright.recorded")))
    except ModuleNotFoundError:
        # A checkout that is run without being installed maps no packages outside its folders.
        return Path(__file__).resolve().parents[1] / "benchmarks" / "recorded"


def recorded_devices(folder: Path | None = None) -> list[str]:
    """Slugs of the devices that have recordings, in `folder` or among those packaged."""
    return sorted({path.parent.name for path in (folder or recorded_folder()).glob("*/*.parquet")})


def vendor_trial(record: TuningRecord) -> Trial | None:
    """The vendor call of a record's final round as a trial, for recording; None when there was no such call."""
    if record.vendor_us is None:
        return None
    return Trial(
        record.workload,
        record.device,
        record.toolchain,
        Schedule(VENDOR_TEMPLATE, FrozenMap({"call": record.vendor})),
        Measurement(Status.OK, record.vendor_us),
        record.origin,
        measured_at=record.created_at,
    )


def save_recorded(trials: Iterable[Trial], path: Path) -> int:
    """Write trials to a Parquet file, replacing it whole, in the order given; how many there were."""
    rows = [_row(trial) for trial in trials]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(
        table,
        unfinished,
        compression="zstd",
        compression_level=9,
        use_dictionary=[*_TEXTS, *_INTS, "message"],
        use_byte_stream_split=list(_FLOATS),
    )
    os.replace(unfinished, path)
    return len(rows)


def load_recorded(path: Path) -> list[Trial]:
    """The trials in a file that `save_recorded` wrote, in its order.

    FileNotFoundError when there is no such file; ArchiveError when it is damaged, of a later version, or not ours.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} must be a recording written by save_recorded, got no such file")
    try:
        table = pq.read_table(path, memory_map=True, partitioning=None)
        _check_version(table.schema.metadata, path)
        return _trials(table)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise ArchiveError(
            f"{path} must be a recording written by save_recorded, but it is damaged: {error}"
        ) from error


def _check_version(metadata: dict[bytes, bytes] | None, path: Path) -> None:
    version = (metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise ArchiveError(f"{path} must be a recording written by save_recorded, got some other Parquet file")
    if int(version) > RECORDED_VERSION:
        raise ArchiveError(
            f"{path} must be a recording of version {RECORDED_VERSION} or earlier, got {int(version)}; "
            "upgrade kernelwright to read it"
        )


def _row(trial: Trial) -> dict[str, Any]:
    seen = trial.measurement
    return {
        "workload": canonical_json(trial.workload.to_json()),
        "device": canonical_json(trial.device.to_json()),
        "toolchain": canonical_json(trial.toolchain.to_json()),
        "template": trial.schedule.template,
        "knobs": canonical_json(dict(trial.schedule.knobs)),
        "status": seen.status.value,
        "origin": trial.origin,
        "fingerprint": trial.template_fingerprint,
        "message": seen.message,
        "measured_at": trial.measured_at,
        **{name: getattr(seen, name) for name in (*_FLOATS, *_INTS)},
    }


def _trials(table: pa.Table) -> list[Trial]:
    columns = {name: table.column(name).to_pylist() for name in _SCHEMA.names}
    schedules = _parsed(
        list(zip(columns["template"], columns["knobs"], strict=True)),
        lambda pair: Schedule(pair[0], FrozenMap(json.loads(pair[1]))),
    )
    seen = [
        Measurement(status=status, samples_us=(), **dict(zip((*_FLOATS, *_INTS, "message"), values, strict=True)))
        for status, *values in zip(
            columns["status"], *(columns[name] for name in (*_FLOATS, *_INTS, "message")), strict=True
        )
    ]
    return [
        Trial(*parts)
        for parts in zip(
            _parsed(columns["workload"], lambda text: Workload.from_json(json.loads(text))),
            _parsed(columns["device"], lambda text: DeviceSpec.from_json(json.loads(text))),
            _parsed(columns["toolchain"], lambda text: Toolchain.from_json(json.loads(text))),
            schedules,
            seen,
            columns["origin"],
            columns["fingerprint"],
            columns["measured_at"],
            strict=True,
        )
    ]


def _parsed(texts: list[Any], parse: Callable[[Any], T]) -> list[T]:
    """Each entry parsed, equal entries once."""
    done = {text: parse(text) for text in dict.fromkeys(texts)}
    return [done[text] for text in texts]
