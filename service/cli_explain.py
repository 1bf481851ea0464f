"""`kernelwright explain model.py`: what torch.compile's backend would replace in a model, and why not the rest."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kernelwright.errors import UsageError
from kernelwright.kernels.child_process import ChildProcess, ChildRaised
from kernelwright.kernels.device import named_device
from kernelwright.service import cli_options as options
from kernelwright.service.cli_output import print_json, print_table, to_stderr
from kernelwright.service.opening import open_store
from kernelwright.service.settings import load_settings

_EXPLAIN = "kernelwright.compiler.explain:explain_file"
_TIMEOUT_S = 1800.0

Model = Annotated[str, typer.Argument(help="A Python file with `model` and `inputs`, or FILE.py:FUNCTION.")]
Hardware = Annotated[str, typer.Option("--hardware", help="Name of the GPU to answer for, such as h100.")]
Page = Annotated[Path | None, typer.Option("--html", help="Write a page with the same table here.")]

COLUMNS = ("calls", "product", "runs", "ours", "vendor", "saved", "why")


def explain(
    model: Model,
    hardware: Hardware = "h100",
    db: options.Database = None,
    url: options.Url = None,
    page: Page = None,
    json: options.Json = False,
) -> None:
    """Tell, product by product, what torch.compile(backend="kernelwright") would do with a model; needs no GPU."""
    settings = load_settings(db=db, url=url)
    if settings.url is None:
        open_store(settings).close()
    job = {"target": model, "device": named_device(hardware).slug, "db": settings.db, "url": settings.url}
    with ChildProcess(_EXPLAIN) as child:
        try:
            found: dict[str, Any] = child.call(job, _TIMEOUT_S)
        except ChildRaised as error:
            raise UsageError(f"{model} cannot be explained: {error}") from error
    for warning in found["warnings"]:
        to_stderr(f"warning: {warning}")
    if json:
        print_json(found)
    else:
        table = Table(*COLUMNS, title=headline(found["products"]), caption=run_with(found["toolchain"]))
        for product in found["products"]:
            table.add_row(*(Text(text) for text in cells(product)))
        print_table(table)
    if page is not None:
        _write(page, page_of(model, hardware, found))


def _write(page: Path, text: str) -> None:
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{page} cannot be written: {error.strerror or error}; choose another path") from error


def headline(products: list[dict[str, Any]]) -> str:
    """How many of the products are replaced, and what that saves by the records' own times."""
    calls, ours = (sum(p["calls"] for p in products if every or p["replaced"]) for every in (True, False))
    saved = sum(product["saved_us"] for product in products)
    return f"{ours} of {calls} products replaced, {saved:,.1f} us a step saved by the records' times"


def run_with(toolchain: Mapping[str, Any]) -> str:
    """What the kernels are taken to run with: times of other software would be stale."""
    return f"with torch {toolchain['torch']}, Triton {toolchain['triton']}, driver {toolchain['driver']}"


def cells(product: dict[str, Any]) -> tuple[str, ...]:
    """A product's row, as words."""
    times = ("-" if product[name] is None else f"{product[name]:.2f} us" for name in ("ours_us", "vendor_us"))
    saved = f"{product['saved_us']:.2f} us" if product["replaced"] else ""
    runs = "our kernel" if product["replaced"] else "Inductor's choice"
    return (str(product["calls"]), product["workload"] or "-", runs, *times, saved, product["reason"])


def page_of(model: str, hardware: str, found: Mapping[str, Any]) -> str:
    """The table as a page of its own. found: what `kernelwright.compiler.explain.explain_file` gives."""

    def row(texts: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    title = html.escape(f"{Path(model.partition(':')[0]).name} on {hardware}")
    rows = "\n".join(row(cells(product), "td") for product in found["products"])
    said = html.escape(f"{headline(found['products'])}, {run_with(found['toolchain'])}")
    return _PAGE.format(title=title, headline=said, head=row(COLUMNS, "th"), rows=rows)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ padding: .35rem .6rem; text-align: left; border-bottom: 1px solid #8884; }}
td:nth-child(1), td:nth-child(4), td:nth-child(5), td:nth-child(6) {{ text-align: right; white-space: nowrap; }}
</style>
<h1>{title}</h1>
<p>{headline}</p>
<div><table><thead>{head}</thead><tbody>
{rows}
</tbody></table></div>
</html>
"""
