"""A client of the service, with the API's own types in and out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from kernelwright.errors import ServiceError, UsageError
from kernelwright.search.answer import Answer, check_schedule
from kernelwright.service.schemas import (
    BatchIn,
    BatchItem,
    BatchOut,
    BestKernel,
    DeviceList,
    DeviceOut,
    Health,
    JobIn,
    JobList,
    JobOut,
    ParetoOut,
    ParetoPoint,
    RecordList,
    RecordOut,
    TableOut,
    TrialList,
    TrialOut,
    WorkloadIn,
    WorkloadList,
    WorkloadOut,
)
from kernelwright.service.workload_args import WorkloadArgs, args_of, format_shape
from kernelwright.types import DeviceSpec, FrozenMap, Schedule, Toolchain, Workload

M = TypeVar("M", bound=BaseModel)

DEFAULT_URL = "http://127.0.0.1:8765"

PAGE = 500

BATCH = 200
"""Workloads in one request of `answers`; a service may be set to take fewer than its 500."""

FINAL_STATES = frozenset({"done", "failed", "cancelled"})


class Client:
    """Talks to one service. Every method raises ServiceError when it cannot be reached or answers with an error.

    timeout: seconds to wait for one answer. transport: replaces the network, for tests. key: an API key, where the
    service asks for one. UsageError for a URL that is no address of a service.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        timeout: float = 30.0,
        transport: httpx.BaseTransport | None = None,
        *,
        key: str | None = None,
    ) -> None:
        self.url = _checked(url)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=self.url, timeout=timeout, transport=transport, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def best(self, args: WorkloadArgs, hardware: str) -> BestKernel:
        """The best kernel that is known for a workload on a named GPU, and how it is known."""
        query = {**args.query(), "hardware": hardware}
        return self._parsed(BestKernel, self._send("GET", "/v1/kernels/best", params=query))

    def best_of(self, many: Sequence[WorkloadArgs], hardware: str, *, predict: bool = False) -> list[BatchItem]:
        """The best kernels for many workloads on one GPU, in their order, from one request. predict: where nothing was
        measured, the cost model's choice; at most 20 workloads then."""
        body = BatchIn(hardware=hardware, workloads=[_workload_in(args) for args in many], predict=predict)
        answer = self._send("POST", "/v1/kernels/best:batch", json=body.model_dump(exclude_none=True))
        return self._parsed(BatchOut, answer).results

    def answers(self, workloads: Sequence[Workload], device: DeviceSpec, toolchain: Toolchain) -> list[Answer]:
        """What is known of workloads on a GPU, in their order, from as few requests as can be.

        toolchain: what will run the kernels; a time that was measured with another one is "stale". A workload that
        cannot be typed, and one whose answer does not fit the question (another workload or GPU, a schedule that no
        template has, a time that is none), has a "vendor" answer that says so.
        """
        typed = [(place, args) for place, workload in enumerate(workloads) if (args := args_of(workload)) is not None]
        found = [Answer("vendor", w, device, note=f"{self.url} cannot be asked about it") for w in workloads]
        for start in range(0, len(typed), BATCH):
            part = typed[start : start + BATCH]
            items = self.best_of([args for _, args in part], device.slug)
            if len(items) != len(part):
                raise ServiceError(f"the service at {self.url} gave {len(items)} answers to {len(part)} questions")
            for (place, _), item in zip(part, items, strict=True):
                try:
                    found[place] = _answer(workloads[place], device, toolchain, item)
                except ValueError as error:
                    note = f"what {self.url} says of it cannot be: {error}"
                    found[place] = Answer("vendor", workloads[place], device, note=note)
        return found

    def table(self, args: WorkloadArgs, hardware: str, dim: str, values: Sequence[int]) -> TableOut:
        """A dispatch table: the best schedule for each of these sizes of one dimension, which `args` leaves out."""
        query = {**args.query(), "hardware": hardware, "dim": dim, "values": ",".join(map(str, values))}
        return self._parsed(TableOut, self._send("GET", "/v1/kernels/table", params=query))

    def records(self, operator: str | None = None, hardware: str | None = None) -> Iterator[RecordOut]:
        """All records, newest first, read a page at a time."""
        query = {"operator": operator, "hardware": hardware, "limit": PAGE}
        for page in self._pages(RecordList, "/v1/kernels", query):
            yield from page.records

    def workloads(self, operator: str | None = None) -> Iterator[WorkloadOut]:
        """All workloads by key, read a page at a time."""
        for page in self._pages(WorkloadList, "/v1/workloads", {"operator": operator, "limit": PAGE}):
            yield from page.workloads

    def trials(self, key: str, hardware: str | None = None, status: str | None = None) -> Iterator[TrialOut]:
        """What was tried on the workload with this key, oldest first, read a page at a time."""
        query = {"hardware": hardware, "status": status, "limit": PAGE}
        for page in self._pages(TrialList, f"/v1/workloads/{quote(key, safe='')}/trials", query):
            yield from page.trials

    def pareto(self, key: str, hardware: str) -> list[ParetoPoint]:
        """The trials of a workload that no other beats in time and error, fastest first."""
        path = f"/v1/workloads/{quote(key, safe='')}/pareto"
        return self._parsed(ParetoOut, self._send("GET", path, params={"hardware": hardware})).points

    def source(self, record_id: str) -> str:
        """The standalone file of a record's kernel."""
        return self._send("GET", f"/v1/kernels/{quote(record_id, safe='')}/source").text

    def best_source(self, args: WorkloadArgs, hardware: str) -> str:
        """The standalone file of the best kernel for a workload on a named GPU."""
        return self._send("GET", "/v1/kernels/best/source", params={**args.query(), "hardware": hardware}).text

    def submit(self, args: WorkloadArgs, device: str, *, idempotency_key: str | None = None, **options: Any) -> JobOut:
        """Ask for a workload to be tuned on a device ("cuda", "replay:h100").

        idempotency_key: a name for this request; sent again under it, it leads to the same job. options: strategy,
        trials, seconds and seed, as in JobIn; UsageError for values that it does not take.
        """
        try:
            body = _job_of(args, device, options)
        except ValidationError as error:
            raise UsageError("; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in error.errors())) from error
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        sent = body.model_dump(exclude_none=True)
        return self._parsed(JobOut, self._send("POST", "/v1/jobs", json=sent, headers=headers))

    def job(self, job_id: str) -> JobOut:
        """A job as it is now."""
        return self._parsed(JobOut, self._send("GET", f"/v1/jobs/{quote(job_id, safe='')}"))

    def jobs(self, state: str | None = None) -> Iterator[JobOut]:
        """All jobs, or those in one state, newest first, read a page at a time."""
        for page in self._pages(JobList, "/v1/jobs", {"state": state, "limit": PAGE}):
            yield from page.jobs

    def cancel(self, job_id: str) -> JobOut:
        """Cancel a job; ServiceError when it has ended already."""
        return self._parsed(JobOut, self._send("POST", f"/v1/jobs/{quote(job_id, safe='')}/cancel"))

    def events(self, job_id: str, after: int = 0) -> Iterator[JobOut | TrialOut]:
        """A job as it goes on: its trials past number `after`, and the job whenever it changed; ends when it does."""
        headers = {"Last-Event-ID": str(after)} if after else {}
        path = f"/v1/jobs/{quote(job_id, safe='')}/events"
        try:
            with self._http.stream("GET", path, headers=headers) as response:
                if not response.is_success:
                    response.read()
                    raise self._refused(response)
                kind = ""
                for line in response.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data":
                        model: type[JobOut] | type[TrialOut] = TrialOut if kind == "trial" else JobOut
                        yield model.model_validate_json(value)
        except (httpx.HTTPError, ValidationError) as error:
            raise ServiceError(f"the events of job {job_id} broke off: {error}; ask for them again") from error

    def wait(
        self,
        job_id: str,
        timeout: float | None = None,
        poll: float = 0.5,
        on_progress: Callable[[JobOut], None] | None = None,
    ) -> JobOut:
        """The job once it is done; ServiceError when it failed, was cancelled, or `timeout` seconds passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (job := self.job(job_id)).state not in FINAL_STATES:
            if on_progress:
                on_progress(job)
            if deadline is not None and time.monotonic() + poll > deadline:
                raise ServiceError(f"job {job_id} is still {job.state} after {timeout:g} s, {job.done} trials done")
            time.sleep(poll)
        if job.state != "done":
            raise ServiceError(f"job {job_id} {job.state}: {job.message or 'no reason given'}")
        return job

    def devices(self) -> list[DeviceOut]:
        """The GPUs that have a name."""
        return self._parsed(DeviceList, self._send("GET", "/v1/devices")).devices

    def health(self) -> Health:
        """Whether the service can do its work."""
        return self._parsed(Health, self._send("GET", "/healthz"))

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceError(
                f"no answer from the service at {self.url}: {error or type(error).__name__}; "
                "is `kernelwright serve` running there?"
            ) from error
        if response.is_success:
            return response
        raise self._refused(response)

    def _refused(self, response: httpx.Response) -> ServiceError:
        return ServiceError(f"the service at {self.url} answered {response.status_code}: {_detail(response)}")

    def _pages(self, model: type[M], path: str, query: dict[str, Any]) -> Iterator[M]:
        given = {name: value for name, value in query.items() if value is not None}
        page = self._parsed(model, self._send("GET", path, params=given))
        yield page
        while following := getattr(page, "next", None):
            page = self._parsed(model, self._send("GET", following))
            yield page

    def _parsed(self, model: type[M], response: httpx.Response) -> M:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise ServiceError(
                f"the service at {self.url} did not answer with a {model.__name__}; is it a kernelwright service?"
            ) from error


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"the service's address must be a URL such as {DEFAULT_URL}, got {url!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"the service's address must be a URL such as {DEFAULT_URL}, got {url!r}")
    return url.rstrip("/")


def _workload_in(args: WorkloadArgs) -> WorkloadIn:
    return WorkloadIn(
        operator=args.operator,
        shape=format_shape(args.dims),
        dtype=args.dtype,
        layout=args.layout,
        epilogue=list(args.epilogue),
        out_dtype=args.out_dtype,
        error_budget=args.error_budget,
        attributes=dict(args.attributes),
    )


def _job_of(args: WorkloadArgs, device: str, options: dict[str, Any]) -> JobIn:
    return JobIn(**_workload_in(args).model_dump(), device=device, **options)


def _answer(workload: Workload, device: DeviceSpec, toolchain: Toolchain, item: BatchItem) -> Answer:
    """An item of a batch as an Answer; ValueError where it does not fit the question."""
    best = item.best
    if best is None:
        raise ValueError(item.error or "neither an answer nor a reason")
    if (best.workload_key, best.hardware.key) != (workload.key, device.key):
        raise ValueError(f"it is about {best.label} on {best.hardware.name}")
    chosen = best.schedule
    schedule = None if chosen is None else Schedule(chosen.template, FrozenMap(chosen.knobs))
    if best.choice == "kernel":
        check_schedule(workload, device, schedule)
    for name, value in (("expected_us", best.expected_us), ("vendor_us", best.vendor_us)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}")
    measured_with = best.toolchain and Toolchain(**best.toolchain.model_dump())
    return Answer(
        "stale" if best.how == "measured" and measured_with != toolchain else best.how,
        workload,
        device,
        schedule,
        best.choice,
        best.expected_us,
        best.vendor,
        best.vendor_us,
        regret=best.regret,
        note=best.note,
    )


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
