"""Whether a value from a foreign file is one that our own code could have written: types, sizes, and plain text."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from kernelwright.types import FrozenMap, Trial, TuningRecord

MAX_TEXT = 1000
MAX_MESSAGE = 200_000
MAX_ENTRIES = 10_000


def check_value(value: Trial | TuningRecord) -> None:
    """Raise ValueError, naming the field, unless every field has the type that its class declares, within limits.

    Texts must be printable, in one line: they go into comments, tables and names of files. Only the message of a
    measurement may hold anything.
    """
    _check(value, type(value), type(value).__name__)


def check_text(text: object, name: str) -> None:
    """Raise ValueError unless this is a short, printable text."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a text, got {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise ValueError(f"{name} must have at most {MAX_TEXT} characters, got {len(text)}")
    if not text.isprintable():
        raise ValueError(f"{name} must be printable, got {text[:80]!r}")


@functools.cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _check(value: object, hint: Any, name: str) -> None:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        _check_union(value, typing.get_args(hint), name)
    elif origin is FrozenMap:
        _check_map(value, typing.get_args(hint)[0], name)
    elif origin is tuple:
        _check_tuple(value, typing.get_args(hint)[0], name)
    elif hint is str:
        _check_str(value, name)
    elif hint in (int, float, bool):
        _check_number(value, hint, name)
    elif not isinstance(value, hint):
        raise ValueError(f"{name} must be a {hint.__name__}, got {type(value).__name__}")
    elif not isinstance(value, enum.Enum):
        for field, kind in _hints(type(value)).items():  # type: ignore[arg-type]
            _check(getattr(value, field), kind, f"{name}.{field}")


def _check_str(value: object, name: str) -> None:
    if name.endswith(".message") and isinstance(value, str):
        if len(value) > MAX_MESSAGE:
            raise ValueError(f"{name} must have at most {MAX_MESSAGE} characters, got {len(value)}")
    else:
        check_text(value, name)


def _check_union(value: object, choices: tuple[Any, ...], name: str) -> None:
    if value is None and type(None) in choices:
        return
    left = [choice for choice in choices if choice is not type(None)]
    if len(left) == 1:
        return _check(value, left[0], name)
    if type(value) not in left:
        raise ValueError(f"{name} must be a number, a text or a truth value, got {type(value).__name__}")
    _check(value, type(value), name)


def _check_number(value: object, kind: type, name: str) -> None:
    allowed = {int: (int,), float: (int, float), bool: (bool,)}[kind]
    if not isinstance(value, allowed) or isinstance(value, bool) is not (kind is bool):
        raise ValueError(f"{name} must be {'a whole number' if kind is int else kind.__name__}, got {value!r:.80}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit into 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def _check_map(value: object, kind: Any, name: str) -> None:
    if not isinstance(value, FrozenMap) or len(value) > MAX_ENTRIES:
        raise ValueError(f"{name} must be a mapping of at most {MAX_ENTRIES} entries")
    for key, entry in value.items():
        check_text(key, f"a name in {name}")
        _check(entry, kind, f"{name}.{key[:80]}")


def _check_tuple(value: object, kind: Any, name: str) -> None:
    if not isinstance(value, tuple) or len(value) > MAX_ENTRIES:
        raise ValueError(f"{name} must be a list of at most {MAX_ENTRIES} entries")
    for entry in value:
        _check(entry, kind, f"an entry of {name}")
