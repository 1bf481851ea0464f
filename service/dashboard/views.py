"""What the pages show, gathered from store, catalog and cost model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from kernelwright.db import Job, JobRequest, JobState
from kernelwright.db.record_search import ORDERS, RecordFilter, devices_of_records, search_records
from kernelwright.errors import UsageError
from kernelwright.kernels import OPERATORS, get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.device_table import NAMED_DEVICES
from kernelwright.search import Answer
from kernelwright.search.recorded import recorded_devices
from kernelwright.service.answer_json import tell
from kernelwright.service.dashboard.charts import (
    Chart,
    calibration_chart,
    convergence_chart,
    pareto_chart,
    roofline_chart,
)
from kernelwright.service.dashboard.figures import by_status, of_search
from kernelwright.service.missing import NotFound
from kernelwright.service.state import AppState
from kernelwright.service.workload_args import FORMS, parse_shape
from kernelwright.types import DeviceSpec, FrozenMap, Trial, Workload

PAGE_ROWS = 25
MAX_TRIALS = 20_000
MAX_RECORDS = 2_000
RECENT_JOBS = 5

EVALUATIONS = {"evaluation": "families of workloads", "evaluation_by_workload": "workloads"}
"""What a model's metadata may hold of its judgement, and what was left out of its training for that."""

Values = dict[str, Any]
Query = Mapping[str, str]


def home(state: AppState) -> Values:
    """Counts and the newest jobs."""
    return {
        "records": state.store.count_records(),
        "devices": devices_of_records(state.store.engine),
        "recent": state.store.jobs(limit=RECENT_JOBS),
    }


def of_question(state: AppState, workload: Workload, device: DeviceSpec) -> Values:
    """The answer, and what the trials of the workload on the device show."""
    answer = state.best.whole(workload, device)
    trials = _trials(state, answer)
    measured = answer.record if answer.record and answer.record.workload == workload else None
    return {
        "answer": answer,
        "told": tell(answer),
        "record": answer.record,
        "trials": len(of_search(trials)),
        "statuses": by_status(of_search(trials)),
        "charts": _charts(trials, measured.vendor_us if measured else None),
    }


def winners(state: AppState, query: Query) -> Values:
    """A page of records and the filters that chose them."""
    fields = {
        name: query.get(name, "")[:200] for name in ("operator", "hardware", "dtype", "layout", "shape", "winner")
    }
    order = query.get("order") or "newest"
    number = _page_number(query.get("page", "1"))
    devices = devices_of_records(state.store.engine)
    mistake = ""
    try:
        wanted = _filter(fields, devices)
        found, total = search_records(state.store.engine, wanted, order, PAGE_ROWS, (number - 1) * PAGE_ROWS)
    except UsageError as error:
        found, total, mistake = [], 0, str(error)
    return {
        "found": found,
        "total": total,
        "number": number,
        "pages": max(1, -(-total // PAGE_ROWS)),
        "fields": {**fields, "order": order},
        "orders": ORDERS,
        "devices": devices,
        "mistake": mistake,
    }


def jobs(state: AppState, only: str) -> Values:
    """The newest jobs, all or those in one state."""
    known = only if only in list(JobState) else ""
    return {
        "jobs": state.store.jobs(state=known or None, limit=100),
        "counts": state.store.count_jobs(),
        "only": known,
        "states": [item.value for item in JobState],
    }


def submit(state: AppState, request: JobRequest, who: str) -> Job:
    """Queue a job, as the API does."""
    made = state.store.submit(request)
    state.store.audit(who, "job.submit", made.id, f"{made.workload} on {made.device}")
    return made


def job(state: AppState, job_id: str) -> Values:
    """One job with the plots of its trials; those that an earlier job made are not among them."""
    found = state.store.get_job(job_id)
    if found is None:
        raise NotFound(f"no job has the id {job_id[:80]!r}; the list of jobs leads to those that there are")
    trials = list(itertools.islice(state.store.trials_of_job(job_id), MAX_TRIALS))
    record = state.store.get_record(found.record_id) if found.record_id else None
    return {
        "job": found,
        "record": record,
        "statuses": by_status(of_search(trials)),
        "charts": _charts(trials, record.vendor_us if record else None),
    }


def hardware(state: AppState) -> Values:
    """Every GPU that has a name or a record. Which are in this machine is not asked: that would load torch."""
    found = devices_of_records(state.store.engine)
    return {
        "devices": {
            **NAMED_DEVICES,
            **{device.slug: device for device, _ in found if device.slug not in NAMED_DEVICES},
        },
        "counts": {device.key: count for device, count in found},
        "replayed": recorded_devices(state.settings.recorded),
    }


def roofline(state: AppState, query: Query) -> Values:
    """The roofline plot of a device's records."""
    devices = devices_of_records(state.store.engine)
    slug = query.get("hardware") or (devices[0][0].slug if devices else "h100")
    device = _device(slug, devices)
    operator = query.get("operator") or None
    dtype = query.get("dtype", "")[:20]
    wanted = RecordFilter(operator=operator, device_key=device.key, dtype=dtype or None)
    found, total = search_records(state.store.engine, wanted, limit=MAX_RECORDS)
    return {
        "device": device,
        "devices": devices,
        "chart": roofline_chart(device, found),
        "shown": len(found),
        "total": total,
        "fields": {"hardware": slug, "operator": operator or "", "dtype": dtype},
    }


def model_card(state: AppState, operator: str) -> Values:
    """The packaged cost model: its kind, what it was trained on, and its calibration."""
    get_operator(operator)
    model = state.answers.model(operator)
    metadata = dict(getattr(model, "metadata", {}))
    evaluations = {text: metadata.pop(name, None) for name, text in EVALUATIONS.items()}
    calibration = metadata.pop("calibration", None)
    return {
        "operator": operator,
        "operators": list(OPERATORS),
        "kind": type(model).__name__,
        "metadata": metadata,
        "evaluations": {text: figures for text, figures in evaluations.items() if figures},
        "calibration": calibration,
        "chart": calibration_chart(calibration) if calibration else None,
    }


def _charts(trials: Sequence[Trial], vendor_us: float | None) -> list[Chart]:
    made = (convergence_chart(trials, vendor_us), pareto_chart(trials, vendor_us))
    return [chart for chart in made if chart is not None]


def _trials(state: AppState, answer: Answer) -> list[Trial]:
    """The trials of the answer's workload; only those of the record's toolchain, whose times compare."""
    toolchain = answer.record.toolchain.key if answer.how in ("measured", "stale") and answer.record else None
    found = state.store.trials(workload_key=answer.workload.key, device_key=answer.device.key, toolchain_key=toolchain)
    return list(itertools.islice(found, MAX_TRIALS))


def _filter(fields: Query, devices: Sequence[tuple[DeviceSpec, int]]) -> RecordFilter:
    known = {name: tensors for form in FORMS.values() for name, tensors in form.layouts.items()}
    if fields["layout"] and fields["layout"] not in known:
        raise UsageError(f"layout must be one of {', '.join(known)}, got {fields['layout']!r}")
    layouts = known[fields["layout"]] if fields["layout"] else {}
    return RecordFilter(
        operator=fields["operator"] or None,
        device_key=_device(fields["hardware"], devices).key if fields["hardware"] else None,
        dtype=fields["dtype"] or None,
        layouts=FrozenMap(layouts),
        dims=FrozenMap(parse_shape(fields["shape"]) if fields["shape"] else {}),
        winner=fields["winner"] or None,
    )


def _device(slug: str, devices: Sequence[tuple[DeviceSpec, int]]) -> DeviceSpec:
    """A device by its name, among those of the records first: a database may hold some that have no name here."""
    return next((device for device, _ in devices if device.slug == slug), None) or named_device(slug)


def _page_number(text: str) -> int:
    return min(max(1, int(text)), 10**6) if text.isascii() and text.isdigit() and len(text) < 8 else 1
