"""The lines of an archive as a text file: one JSON object a line, gzip where wanted."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from kernelwright.errors import ArchiveError
from kernelwright.types import canonical_json

Line = dict[str, Any]

MAX_LINE_BYTES = 1 << 20
MAX_RATIO = 200
"""Bytes unpacked from one packed byte; ours stay below 50."""

FREE_BYTES = 64 << 20
"""What may be unpacked from a file of any size."""

_GZIP = b"\x1f\x8b"


def encode(line: Line) -> bytes:
    """A line as it is counted in the checksum."""
    return canonical_json(line).encode() + b"\n"


def write_lines(path: Path, lines: Iterable[Line], *, packed: bool) -> None:
    """Write lines to a file; OSError as ever."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "wb"))
        if packed:
            file = cast("Any", stack.enter_context(gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0)))
        file.writelines(encode(line) for line in lines)


def read_lines(path: Path) -> Iterator[tuple[Line, str]]:
    """Each line with the SHA-256 of all before it; ArchiveError for what is damaged, not ours or too large."""
    seen = hashlib.sha256()
    try:
        for number, text in enumerate(_texts(path), start=1):
            yield parse(path, number, text), seen.hexdigest()
            seen.update(text)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def parse(path: Path, number: int, text: bytes) -> Line:
    """One line; ArchiveError unless it is a JSON object of finite numbers."""
    try:
        line = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise not_ours(path) if number == 1 else damaged(path, number, why) from error
    if not isinstance(line, dict):
        raise not_ours(path) if number == 1 else damaged(path, number, "it is not a JSON object")
    return line


def unreadable(path: Path, error: BaseException) -> ArchiveError:
    """What to say of a file that cannot be read."""
    reason = getattr(error, "strerror", None) or error
    return ArchiveError(f"{path} cannot be read: {reason}; check the path, or export it again")


def not_ours(path: Path) -> ArchiveError:
    """What to say of a file that is no archive."""
    return ArchiveError(f"{path} must be a file that `kernelwright export` wrote, but it does not begin like one")


def damaged(path: Path, number: int, why: str) -> ArchiveError:
    """What to say of a file that is wrong in a line, or as a whole (0)."""
    place = f" in line {number}" if number else ""
    return ArchiveError(f"{path} is damaged{place}: {why}; export it again")


def _texts(path: Path) -> Iterator[bytes]:
    allowed = path.stat().st_size * MAX_RATIO + FREE_BYTES
    number = 0
    with _opened(path) as file:
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            allowed -= len(text)
            if len(text) > MAX_LINE_BYTES:
                raise not_ours(path) if number == 1 else damaged(path, number, f"it has over {MAX_LINE_BYTES} bytes")
            if allowed < 0:
                raise ArchiveError(f"{path} unpacks to over {MAX_RATIO} times its size, which no export does")
            yield text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with open(path, "rb") as plain:
        if plain.read(2) != _GZIP:
            plain.seek(0)
            yield plain
            return
        plain.seek(0)
        with gzip.GzipFile(fileobj=plain) as unpacked:
            yield cast("IO[bytes]", unpacked)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"numbers must be finite, got {name}")
