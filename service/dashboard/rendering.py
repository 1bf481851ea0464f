"""From a template and its values to a page: escaped, without scripts or styles from elsewhere, never kept by caches."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from kernelwright.service.dashboard.plots import short
from kernelwright.service.workload_args import args_of, format_attributes, format_shape
from kernelwright.types import Workload

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""What every page is sent with: a browser that obeys runs nothing that came in with a name."""

NOTHING = "\N{EN DASH}"
"""Stands where there is no figure."""


@functools.cache
def environment() -> Environment:
    """The templates, with escaping on for all of them and the filters that they use."""
    made = Environment(
        loader=PackageLoader("kernelwright.service.dashboard", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(us=_us, share=_share, number=short, day=_day, brief=_brief, times=_times, size=_size)
    made.globals["version"] = importlib.metadata.version("kernelwright")
    return made


def page(template: str, code: int = 200, **values: Any) -> HTMLResponse:
    """A page as a response; code: its HTTP status."""
    text = environment().get_template(template).render(values)
    return HTMLResponse(text, code, headers=HEADERS)


def _brief(workload: Workload) -> str:
    """The workload as people type it; in its full form where it cannot be typed."""
    args = args_of(workload)
    if args is None:
        return str(workload)
    parts = [args.operator, format_shape(args.dims).replace(",", " "), args.dtype, args.layout]
    parts += [f"to {args.out_dtype}"] if args.out_dtype else []
    parts += ["+" + "+".join(args.epilogue)] if args.epilogue else []
    parts += [format_attributes(args.attributes)] if args.attributes else []
    parts += [f"error \N{LESS-THAN OR EQUAL TO} {args.error_budget:g}"] if args.error_budget else []
    return " ".join(parts)


def _us(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.2f} µs" if value < 1e3 else f"{value / 1e3:,.2f} ms"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}\N{MULTIPLICATION SIGN}"


def _day(moment: str | None) -> str:
    return NOTHING if not moment else moment[:16].replace("T", " ") + " UTC"


def _size(count: int) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.4g} {unit}"
    return f"{count} B"
