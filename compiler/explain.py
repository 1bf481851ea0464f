"""What the backend would do with a model, product by product, without compiling it: `kernelwright explain model.py`.

The pass looks at a copy of each graph, so no GPU is needed: answers can be those for any GPU that has a name.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph

from kernelwright.compiler.backend import Options, known_answers, known_pieces
from kernelwright.compiler.collect import DEVICES, copied, load_model, visit
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.pieces import Pieces
from kernelwright.compiler.report import Decision, Report
from kernelwright.search.answer import Answer
from kernelwright.types import Workload


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
    """The decisions as JSON values: `products`, the same ones counted together, and `warnings`.

    job: `target`, a model as for `load_model`, and the options `device`, `db` and `url` of the backend.
    """
    options = Options(**{name: job[name] for name in ("device", "db", "url")})
    report = explain(*load_model(job["target"]), known_answers(options), options.how, known_pieces(options))
    alike = Counter(dataclasses.replace(decision, node="") for decision in report.decisions)
    return {"products": [_told(decision, calls) for decision, calls in alike.items()], "warnings": report.warnings}


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
