"""What visitors type: the search form, the filters of the list, and the form of a new job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from pydantic import ValidationError

from kernelwright.db import JobRequest
from kernelwright.errors import UsageError
from kernelwright.kernels.device import named_device
from kernelwright.kernels.device_table import NAMED_DEVICES
from kernelwright.search import STRATEGIES
from kernelwright.service.routes.jobs import request_of
from kernelwright.service.schemas import MAX_TEXT, JobIn
from kernelwright.service.workload_args import (
    FORMS,
    WorkloadArgs,
    args_of,
    parse_attributes,
    parse_epilogue,
    parse_shape,
)
from kernelwright.types import DTYPES, DeviceSpec, FrozenMap, Workload

MAX_FORM_BYTES = 16_384

DEFAULTS = {
    "operator": "matmul",
    "shape": "",
    "dtype": "bf16",
    "layout": "",
    "epilogue": "",
    "out_dtype": "",
    "error_budget": "",
    "attributes": "",
    "hardware": "h100",
}
"""The fields of the search form with what stands in them at first."""


@dataclasses.dataclass(frozen=True)
class Search:
    """The search form as it was sent; `workload` and `device` check it."""

    fields: Mapping[str, str]

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Search:
        """Every field of the form, unknown ones left out; UsageError for one that is too long."""
        return cls({name: _short(name, query.get(name, default)) for name, default in DEFAULTS.items()})

    @classmethod
    def of(cls, workload: Workload, device: DeviceSpec) -> Search:
        """The form filled in for a workload; defaults where it cannot be typed."""
        args = args_of(workload)
        return cls({**DEFAULTS, **(args.query() if args else {}), "hardware": device.slug})

    def workload(self) -> Workload:
        """The checked workload; UnknownOperator, InvalidWorkload or UnsupportedDtype say what is wrong."""
        fields = self.fields
        return WorkloadArgs(
            fields["operator"],
            parse_shape(fields["shape"]),
            fields["dtype"],
            fields["layout"],
            parse_epilogue(fields["epilogue"]),
            fields["out_dtype"] or None,
            _budget(fields["error_budget"]),
            FrozenMap(parse_attributes(fields["attributes"])),
        ).workload()

    def device(self) -> DeviceSpec:
        """The GPU that was asked for; UnknownDevice names the known ones."""
        return named_device(self.fields["hardware"])

    def address(self, page: str = "/workload") -> str:
        """The address of a page about this workload."""
        return f"{page}?{urlencode({k: v for k, v in self.fields.items() if v})}"


def choices() -> dict[str, Any]:
    """What the forms offer."""
    return {
        "operators": list(FORMS),
        "shapes": {name: ",".join(f"{dim}=…" for dim in form.dims) for name, form in FORMS.items()},
        "dtypes": list(DTYPES),
        "layouts": list(dict.fromkeys(layout for form in FORMS.values() for layout in form.layouts)),
        "hardware": {slug: spec.name for slug, spec in NAMED_DEVICES.items()},
        "strategies": list(STRATEGIES),
    }


def read_form(body: bytes) -> dict[str, str]:
    """The fields of a form that was posted; UsageError when it is too large or no text."""
    if len(body) > MAX_FORM_BYTES:
        raise UsageError(f"a form may have at most {MAX_FORM_BYTES} bytes, got {len(body)}")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=40))
    except ValueError as error:
        raise UsageError(f"a form must be URL-encoded text with at most 40 fields: {error}") from error


def job_request(fields: Mapping[str, str]) -> JobRequest:
    """The job that was asked for, checked just as the API does."""
    sent = {name: fields[name] for name in JobIn.model_fields if fields.get(name)}
    try:
        return request_of(JobIn.model_validate(sent))
    except ValidationError as error:
        complaints = (f"{'.'.join(map(str, item['loc'])) or 'job'}: {item['msg']}" for item in error.errors())
        raise UsageError("; ".join(complaints)) from error


def _short(name: str, value: str) -> str:
    if len(value) > MAX_TEXT:
        raise UsageError(f"{name} must have at most {MAX_TEXT} letters, got {len(value)}")
    return value.strip()


def _budget(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError as error:
        raise UsageError(f"error budget must be a number such as 0.01, got {text!r}") from error
