"""The vocabulary: six frozen value types and the toolchain that a measurement belongs to.

Every type is hashable, goes to and from JSON without loss, and has a `key`: a short digest of the fields that
identify it. Keys must be equal in every process, on every machine and in every release, so they are made from
canonical JSON (sorted keys, no white space) in which a field equal to its default is left out: a field that a later
release adds does not change the keys that exist.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar

Scalar = int | float | str | bool
V = TypeVar("V", bound=Scalar)

DTYPES: Mapping[str, int] = {
    "fp64": 64,
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8e4m3": 8,
    "fp8e5m2": 8,
    "int8": 8,
    "int32": 32,
    "int4": 4,
    "fp4": 4,
}
"""Element types by name, with their width in bits."""


class FrozenMap(Mapping[str, V]):
    """An immutable, hashable mapping from names to scalars; order of insertion does not matter."""

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items: dict[str, V] = {name: items[name] for name in sorted(items)} if items else {}
        self._hash = hash(tuple(self._items.items()))

    def __getitem__(self, name: str) -> V:
        return self._items[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._items.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMap):
            return self._items == other._items
        return isinstance(other, Mapping) and self._items == dict(other)

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenMap, (dict(self._items),))


def canonical_json(value: Any) -> str:
    """JSON text that is equal for equal values: sorted keys, no white space, NaN refused with ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def digest(value: Any, length: int = 20) -> str:
    """The first `length` hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, _Value):
        return value.to_json()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"numbers must be finite to be written as JSON, got {value}")
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


class _Value:
    """What the frozen types share: to_json, from_json and key."""

    _not_in_key: frozenset[str] = frozenset()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The value that `to_json` wrote; ValueError for unknown fields or values out of range."""
        return cls(**_nested(cls, data))

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary of JSON values; fields equal to their default are left out."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != _default(field):
                out[field.name] = _plain(value)
        return out

    @functools.cached_property
    def key(self) -> str:
        """A 20-digit hex digest of the identifying fields, equal in every process and release."""
        return digest({k: v for k, v in self.to_json().items() if k not in self._not_in_key})


def _freeze(instance: object, *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        if not isinstance(value, FrozenMap):
            object.__setattr__(instance, name, FrozenMap(value))


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `data` that are fields of `cls`; raises ValueError naming any other."""
    names = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - names)
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(names))}")
    return dict(data)


def _nested(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    out = _known(cls, data)
    for name, kind in _NESTED.items():
        if out.get(name) is not None:
            out[name] = kind.from_json(out[name])
    return out


@dataclasses.dataclass(frozen=True)
class Workload(_Value):
    """One problem: what must be computed, on which shapes and types, in which memory layout.

    operator: name in `kernelwright.kernels.OPERATORS`, such as "matmul".
    dims: named sizes, for a matmul M, N and K.
    dtypes: element type by tensor, names from DTYPES; for a matmul a, b and out.
    layouts: strides class by tensor; its grammar belongs to the operator.
    epilogue: pointwise steps done on the result before it is written, in order.
    attributes: what else the operator needs to know, such as causal or stride.
    error_budget: the largest relative error allowed (Frobenius norm, against fp64); None means what the
        operand types give when every product and sum keeps their full precision.
    """

    operator: str
    dims: FrozenMap[int]
    dtypes: FrozenMap[str]
    layouts: FrozenMap[str] = FrozenMap()
    epilogue: tuple[str, ...] = ()
    attributes: FrozenMap[Scalar] = FrozenMap()
    error_budget: float | None = None

    def __post_init__(self) -> None:
        _freeze(self, "dims", "dtypes", "layouts", "attributes")
        object.__setattr__(self, "epilogue", tuple(self.epilogue))
        for name, size in self.dims.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"dimension {name} must be a whole number of 0 or more, got {size!r}")
        for name, dtype in self.dtypes.items():
            if dtype not in DTYPES:
                raise ValueError(f"dtype of {name} must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if self.error_budget is not None and not 0 < self.error_budget < 1:
            raise ValueError(f"error_budget must lie between 0 and 1, got {self.error_budget!r}")

    def __str__(self) -> str:
        dims = ",".join(f"{k}={v}" for k, v in self.dims.items())
        types = "/".join(dict.fromkeys(self.dtypes.values()))
        layouts = ",".join(f"{k}:{v}" for k, v in self.layouts.items())
        tail = "+" + "+".join(self.epilogue) if self.epilogue else ""
        more = "".join(f" {name}={value}" for name, value in self.attributes.items())
        budget = f" error<={self.error_budget:g}" if self.error_budget is not None else ""
        return f"{self.operator}[{dims}] {types} {layouts}{tail}{more}{budget}"


@dataclasses.dataclass(frozen=True)
class DeviceSpec(_Value):
    """What a GPU is, as far as it changes which kernel wins.

    slug: the short name users type ("h100"). name: the marketing name. Neither is part of the key.
    architecture: "sm_90", "gfx942", ...; the compile target.
    multiprocessors: SMs or compute units. shared_memory_bytes: the most that one block may use.
    registers: 32-bit registers a multiprocessor. l2_bytes, memory_bytes: capacities.
    bandwidth_gbs: device memory, 10^9 bytes a second, by the datasheet.
    peak_tflops: dense rates by compute precision, 10^12 operations a second, by the datasheet.
    source: where the figures come from.
    """

    slug: str
    name: str
    vendor: str
    architecture: str
    multiprocessors: int
    shared_memory_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth_gbs: float
    peak_tflops: FrozenMap[float]
    registers: int = 65536
    warp_size: int = 32
    source: str = ""

    _not_in_key = frozenset({"slug", "name", "source", "memory_bytes", "peak_tflops"})

    def __post_init__(self) -> None:
        _freeze(self, "peak_tflops")


@dataclasses.dataclass(frozen=True)
class Toolchain(_Value):
    """The software under a measurement: a time is only comparable with times of the same toolchain.

    compiler: what turned the intermediate code into machine code, with its version ("ptxas 12.8.93").
    timer: version of the timing protocol in `kernelwright.search.timing`.
    """

    triton: str
    torch: str
    driver: str
    compiler: str
    timer: int


@dataclasses.dataclass(frozen=True)
class Schedule(_Value):
    """One way to run a workload: a template and a value for each of its knobs."""

    template: str
    knobs: FrozenMap[Scalar] = FrozenMap()

    def __post_init__(self) -> None:
        _freeze(self, "knobs")

    def __str__(self) -> str:
        return f"{self.template}({', '.join(f'{k}={v}' for k, v in self.knobs.items())})"


VENDOR_TEMPLATE = "vendor"
"""Template name of a schedule that stands for the vendor library; its only knob is `call`, such as "torch.mm"."""


class Status(enum.Enum):
    """How a trial ended. Everything but OK is a failure, kept as data."""

    OK = "ok"
    WRONG_RESULT = "wrong_result"
    BUILD_ERROR = "build_error"
    OUT_OF_RESOURCES = "out_of_resources"
    CRASHED = "crashed"
    TIMEOUT = "timeout"


@dataclasses.dataclass(frozen=True)
class Measurement(_Value):
    """What was seen when a schedule was built, checked and timed.

    median_us: median time of one call in microseconds, launch gaps taken out; None unless status is OK.
    samples_us: the single readings. error: relative error against the reference (Frobenius norm).
    registers, spills: a thread's 32-bit registers and its bytes of local memory. shared_bytes: a block's.
    compile_s: seconds in the compiler (0.0 when it came from a cache). message: why it failed.
    """

    status: Status
    median_us: float | None = None
    samples_us: tuple[float, ...] = ()
    error: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    compile_s: float | None = None
    message: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))
        object.__setattr__(self, "samples_us", tuple(self.samples_us))
        if (self.status is Status.OK) != (self.median_us is not None):
            raise ValueError(
                f"median_us must be given exactly when status is ok, got {self.status.value}, {self.median_us}"
            )

    @property
    def ok(self) -> bool:
        """Whether the schedule gave right numbers and a time."""
        return self.status is Status.OK


@dataclasses.dataclass(frozen=True)
class Trial(_Value):
    """One schedule tried on one workload, device and toolchain, with what came of it.

    origin: who ran it, such as "tune", "record" or "import:<file>". template_fingerprint: digest of the template's
    source. measured_at: UTC, ISO 8601 with seconds or finer. The key tells trials apart, so that merging the same
    file twice adds nothing.
    """

    workload: Workload
    device: DeviceSpec
    toolchain: Toolchain
    schedule: Schedule
    measurement: Measurement
    origin: str
    template_fingerprint: str = ""
    measured_at: str = ""

    @functools.cached_property
    def key(self) -> str:
        """Digest of the parts' keys, the fingerprint, the origin and the time of measuring."""
        parts = (self.workload.key, self.device.key, self.toolchain.key, self.schedule.key)
        return digest([*parts, self.template_fingerprint, self.origin, self.measured_at])


@dataclasses.dataclass(frozen=True)
class TuningRecord(_Value):
    """The outcome of tuning one workload on one device: our best schedule beside the vendor library.

    schedule, measurement: the best of our own kernels, timed in the final, interleaved round.
    vendor: the vendor call timed in the same round, "" if there was none; vendor_us: its median.
    noise: relative band inside which two times count as equal, from the A/A control of the final round.
    aa_ratio: that control, the vendor call against itself (1.0 is perfect).
    runner_up, runner_up_us: the second best. roofline: least possible time over our time, 0 to 1.
    trials: how many were tried. template_fingerprint, space_fingerprint: what was searched.
    """

    workload: Workload
    device: DeviceSpec
    toolchain: Toolchain
    schedule: Schedule
    measurement: Measurement
    template_fingerprint: str
    origin: str
    created_at: str
    vendor: str = ""
    vendor_us: float | None = None
    noise: float = 0.02
    aa_ratio: float | None = None
    runner_up: Schedule | None = None
    runner_up_us: float | None = None
    roofline: float | None = None
    trials: int = 0
    space_fingerprint: str = ""

    def __post_init__(self) -> None:
        if not self.measurement.ok:
            raise ValueError(f"a record needs a measurement that is ok, got {self.measurement.status.value}")

    @functools.cached_property
    def key(self) -> str:
        """Digest of the workload's, device's and toolchain's keys and the template fingerprint."""
        return digest([self.workload.key, self.device.key, self.toolchain.key, self.template_fingerprint])

    @property
    def speedup(self) -> float | None:
        """Vendor time over our time (above 1 we are faster); None without a vendor call."""
        if self.vendor_us is None or self.measurement.median_us is None:
            return None
        return self.vendor_us / self.measurement.median_us

    @property
    def winner(self) -> str:
        """ "kernel" where ours is faster than the vendor call by more than the noise, or there is no vendor call;
        otherwise "vendor": the library wins ties."""
        return "kernel" if self.speedup is None or self.speedup > 1 + self.noise else "vendor"


_NESTED: Mapping[str, type[_Value]] = {
    "workload": Workload,
    "device": DeviceSpec,
    "toolchain": Toolchain,
    "schedule": Schedule,
    "measurement": Measurement,
    "runner_up": Schedule,
}
"""Fields that hold another of these types, by name."""
