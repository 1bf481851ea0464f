"""The lines of an archive as a Parquet file, for analysis with other tools: one row a line, its parts in columns.

The columns of _READ hold the line; the others repeat figures from it for those who read the table, and an import does
not look at them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kernelwright.db.archive_lines import Line, damaged, encode, not_ours, parse, unreadable
from kernelwright.errors import ArchiveError
from kernelwright.types import canonical_json

MAGIC = b"PAR1"
MAX_ROWS = 100_000_000
MAX_GROUP_BYTES = 1 << 30

_GROUP = 20_000
_PARTS = ("workload", "device", "toolchain", "schedule")
_READ = ("kind", *_PARTS, "rest", "line")
_TEXTS = (*_READ, "operator", "hardware", "status")
_FLOATS = ("median_us", "error", "vendor_us")
_SCHEMA = pa.schema(
    [pa.field(name, pa.string()) for name in _TEXTS] + [pa.field(name, pa.float64()) for name in _FLOATS],
    metadata={b"kernelwright.archive": b"2"},
)


def is_parquet(path: Path) -> bool:
    """Whether a file begins like a Parquet file; OSError as ever."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def write_parquet(path: Path, lines: Iterable[Line]) -> None:
    """Write lines to a file; OSError as ever."""
    rows = (_row(line) for line in lines)
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd", use_dictionary=list(_TEXTS)) as writer:
        while group := list(itertools.islice(rows, _GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=_SCHEMA))


def read_parquet(path: Path) -> Iterator[tuple[Line, str]]:
    """Each line with the SHA-256 of all before it; ArchiveError for what is damaged, not ours or too large."""
    seen = hashlib.sha256()
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            _check(path, file)
            number = 0
            for batch in file.iter_batches(batch_size=500, columns=list(_READ), use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    line = _line(path, number, row)
                    yield line, seen.hexdigest()
                    seen.update(encode(line))
    except OSError as error:
        raise unreadable(path, error) from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise damaged(path, 0, str(error)) from error


def _check(path: Path, file: pq.ParquetFile) -> None:
    told = file.metadata
    if b"kernelwright.archive" not in (told.metadata or {}):
        raise not_ours(path)
    names = {field.name: field.type for field in file.schema_arrow}
    if any(names.get(name) != pa.string() for name in _READ):
        raise damaged(path, 0, f"it must have the columns {', '.join(_READ)}, all texts")
    if told.num_rows > MAX_ROWS:
        raise ArchiveError(f"{path} says that it has {told.num_rows} rows, an archive has at most {MAX_ROWS}")
    if any(told.row_group(place).total_byte_size > MAX_GROUP_BYTES for place in range(told.num_row_groups)):
        raise ArchiveError(f"{path} has a row group of over {MAX_GROUP_BYTES} bytes, which no export writes")


def _row(line: Line) -> dict[str, Any]:
    kind = next((kind for kind in ("trial", "record") if kind in line), "")
    if not kind:
        return {"kind": "", "line": canonical_json(line)}
    value = line[kind]
    rest = {name: part for name, part in value.items() if name not in _PARTS}
    marks = {name: mark for name, mark in line.items() if name != kind}
    seen = value["measurement"]
    return {
        "kind": kind,
        **{name: canonical_json(value[name]) for name in _PARTS},
        "rest": canonical_json(rest),
        "line": canonical_json(marks),
        "operator": value["workload"]["operator"],
        "hardware": value["device"]["slug"],
        "status": seen["status"],
        "median_us": seen.get("median_us"),
        "error": seen.get("error"),
        "vendor_us": value.get("vendor_us"),
    }


def _line(path: Path, number: int, row: dict[str, str | None]) -> Line:
    texts = {name: (text or "{}").encode("utf-8", "replace") for name, text in row.items()}
    line = parse(path, number, texts["line"])
    kind = row["kind"]
    if kind:
        parts = {name: parse(path, number, texts[name]) for name in _PARTS}
        line[kind] = parse(path, number, texts["rest"]) | parts
    return line
