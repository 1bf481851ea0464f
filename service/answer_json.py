"""An answer in the form of the API: as plain values, as the model that describes them, and as JSON."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any
from urllib.parse import quote_plus

import pydantic_core

from kernelwright.search.answer import Answer
from kernelwright.service.schemas import BestKernel, HardwareOut
from kernelwright.service.workload_args import args_of, format_shape
from kernelwright.types import DeviceSpec, FrozenMap, Scalar, Toolchain, Workload

_PLAIN = re.compile(r"[A-Za-z0-9_.,=-]*")


def tell(answer: Answer) -> BestKernel:
    """The answer as the model that the API's document describes."""
    return BestKernel.model_validate(answer_fields(answer))


def answer_json(answer: Answer) -> bytes:
    """The JSON of `tell(answer)`, without making or checking the model, which takes most of the time."""
    return pydantic_core.to_json(answer_fields(answer), inf_nan_mode="null")


def answer_fields(answer: Answer) -> dict[str, Any]:
    """The fields of a `BestKernel`, in its order, as plain values."""
    record, workload, schedule = answer.record, answer.workload, answer.schedule
    form = _form(workload)
    return {
        "how": answer.how,
        "choice": answer.choice,
        "workload": {**form.body, "dims": dict(workload.dims)},
        "workload_key": workload.key,
        "label": str(workload),
        "hardware": _hardware(answer.device),
        "schedule": schedule and {"template": schedule.template, "knobs": dict(schedule.knobs)},
        "expected_us": answer.expected_us,
        "vendor": answer.vendor,
        "vendor_us": answer.vendor_us,
        "speedup": answer.vendor_us / answer.expected_us if answer.vendor_us and answer.expected_us else None,
        "roofline_percent": None if answer.roofline is None else 100 * answer.roofline,
        "regret": answer.regret,
        "note": answer.note,
        "record_id": record.key if record else None,
        "trials": record.trials if record else None,
        "measured_at": record.created_at if record else None,
        "toolchain": _toolchain(record.toolchain) if record else None,
        "links": _links(answer, form.path(workload, answer.device)),
    }


def question_path(workload: Workload, device: DeviceSpec) -> str | None:
    """The path that asks for a workload on a GPU; None where it cannot be typed."""
    return _form(workload).path(workload, device)


def tell_hardware(device: DeviceSpec) -> HardwareOut:
    """A GPU in short."""
    return HardwareOut.model_validate(_hardware(device))


def _links(answer: Answer, asked: str | None) -> dict[str, str | None]:
    record, source = answer.record, None
    if record is not None and record.workload.key == answer.workload.key:
        source = f"/v1/kernels/{record.key}/source"
    elif answer.schedule is not None and asked is not None:
        source = asked.replace("/best?", "/best/source?", 1)
    return {"self": f"/v1/kernels/{record.key}" if record else None, "source": source, "workload": asked}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What workloads that differ in their sizes only have in common; `example` is any of them."""

    operator: str
    dtypes: FrozenMap[str]
    layouts: FrozenMap[str]
    epilogue: tuple[str, ...]
    attributes: FrozenMap[Scalar]
    error_budget: float | None
    dims: tuple[str, ...]
    example: Workload = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class _Form:
    """How workloads of one kind are told. body: their JSON. dims: names of the sizes in the order in which they are
    typed. words: the query parameters for the rest, None for what cannot be typed."""

    body: dict[str, Any]
    dims: tuple[str, ...]
    words: str | None

    def path(self, workload: Workload, device: DeviceSpec) -> str | None:
        """The path that asks for a workload of this kind."""
        if self.words is None:
            return None
        shape = format_shape({name: workload.dims[name] for name in self.dims})
        words = f"operator={workload.operator}&shape={shape}{self.words}"
        return f"/v1/kernels/best?{words}&hardware={_quoted(device.slug)}"


def _form(w: Workload) -> _Form:
    return _form_of(_Kind(w.operator, w.dtypes, w.layouts, w.epilogue, w.attributes, w.error_budget, tuple(w.dims), w))


@functools.lru_cache(maxsize=1024)
def _form_of(kind: _Kind) -> _Form:
    args = args_of(kind.example)
    if args is None:
        return _Form(kind.example.to_json(), (), None)
    rest = {name: value for name, value in args.query().items() if name not in ("operator", "shape")}
    words = "".join(f"&{name}={_quoted(value)}" for name, value in rest.items())
    return _Form(kind.example.to_json(), tuple(args.dims), words)


# Both are asked for again and again, for few devices and toolchains; nobody may change what they give.
@functools.lru_cache(maxsize=256)
def _hardware(device: DeviceSpec) -> dict[str, str]:
    return {"slug": device.slug, "name": device.name, "architecture": device.architecture, "key": device.key}


@functools.lru_cache(maxsize=256)
def _toolchain(toolchain: Toolchain) -> dict[str, str | int]:
    return dataclasses.asdict(toolchain)


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else quote_plus(value, safe=",=")
