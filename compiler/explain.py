"""What the backend would do with a model, product by product, without compiling it: `kernelwright explain model.py`.

The pass looks at a copy of each graph, so no GPU is needed: answers can be those for any GPU that has a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph

from kernelwright.compiler.backend import Options, known_answers, known_pieces, source_of
from kernelwright.compiler.collect import DEVICES, copied, load_model, visit
from kernelwright.compiler.dispatch import device_of, opened
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.pieces import Pieces
from kernelwright.compiler.report import Decision, Report
from kernelwright.compiler.service_answers import service_answers
from kernelwright.errors import DatabaseError, ServiceError
from kernelwright.kernels.device import gpu_count, present_device
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.answer import Answer
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import Toolchain, TuningRecord, Workload


def explain(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    answers: Callable[[Workload], Answer],
    how: Sequence[str],
    pieces: Pieces | None = None,
) -> Report:
    """The pass's decisions over one step of the model, with answers of these kinds trusted."""
    report = Report()
    judge = Replace(answers, how=how, devices=DEVICES, report=report, pieces=pieces)

    def look(graph: Graph) -> None:
        judge(copied(graph))

    visit(model, inputs, None, look)
    return report


def explain_file(job: Mapping[str, Any]) -> dict[str, Any]:
    """The decisions as JSON values: `products`, the same ones counted together, `warnings`, and the `toolchain` that
    the kernels are taken to run with.

    job: `target`, a model as for `load_model`, and the options `device`, `db` and `url` of the backend.
    """
    options = Options(**{name: job[name] for name in ("device", "db", "url")})
    toolchain = software(options)
    answers, pieces = known_answers(options, toolchain), known_pieces(options, toolchain)
    report = explain(*load_model(job["target"]), answers, options.how, pieces)
    alike = Counter(dataclasses.replace(decision, node="") for decision in report.decisions)
    products = [_told(decision, calls) for decision, calls in alike.items()]
    # the service as it was asked just now
    said = service_answers(source_of(options.url, options, toolchain)).warnings if options.url else []
    return {"products": products, "warnings": [*report.warnings, *said], "toolchain": toolchain.to_json()}


def software(options: Options) -> Toolchain:
    """What the kernels will run with: where a GPU of that name is here, the software here; elsewhere, that of the
    newest record of one in the database or else of the service, and the software here where neither has any."""
    here, device = current_toolchain(TIMER_VERSION), device_of(options.device)
    if gpu_count() and present_device().key == device.key:
        return here
    with contextlib.suppress(DatabaseError), opened(options.db) as store:
        for record in store.records(device_key=device.key, limit=1, trusted=True):
            return record.toolchain
    if options.url:
        with contextlib.suppress(ServiceError), source_of(options.url, options).client() as client:
            for found in client.records(hardware=device.slug):
                return TuningRecord.from_json(found.record).toolchain
    return here


def _told(decision: Decision, calls: int) -> dict[str, Any]:
    ours, vendor = decision.expected_us, decision.vendor_us
    saved = calls * (vendor - ours) if decision.replaced and ours is not None and vendor is not None else 0.0
    return {
        "workload": None if decision.workload is None else str(decision.workload),
        "calls": calls,
        "replaced": decision.replaced,
        "reason": decision.reason,
        "schedule": None if decision.schedule is None else str(decision.schedule),
        "ours_us": ours,
        "vendor_us": vendor,
        "saved_us": round(saved, 3),
    }
