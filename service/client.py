"""A client of the service, with the API's own types in and out."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from kernelwright.errors import ServiceError, UsageError
from kernelwright.service.schemas import BestKernel, DeviceList, DeviceOut, Health, JobIn, JobOut
from kernelwright.service.workload_args import WorkloadArgs, format_shape

M = TypeVar("M", bound=BaseModel)

DEFAULT_URL = "http://127.0.0.1:8765"

FINAL_STATES = frozenset({"done", "failed", "cancelled"})


class Client:
    """Talks to one service. Every method raises ServiceError when it cannot be reached or answers with an error.

    timeout: seconds to wait for one answer. transport: replaces the network, for tests. UsageError for a URL that is
    no address of a service.
    """

    def __init__(
        self, url: str = DEFAULT_URL, timeout: float = 30.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = _checked(url)
        self._http = httpx.Client(base_url=self.url, timeout=timeout, transport=transport)

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

    def source(self, record_id: str) -> str:
        """The standalone file of a record's kernel."""
        return self._send("GET", f"/v1/kernels/{quote(record_id, safe='')}/source").text

    def best_source(self, args: WorkloadArgs, hardware: str) -> str:
        """The standalone file of the best kernel for a workload on a named GPU."""
        return self._send("GET", "/v1/kernels/best/source", params={**args.query(), "hardware": hardware}).text

    def submit(self, args: WorkloadArgs, device: str, **options: Any) -> JobOut:
        """Ask for a workload to be tuned on a device ("cuda", "replay:h100").

        options: strategy, trials, seconds and seed, as in JobIn; UsageError for values that it does not take.
        """
        try:
            body = _job_of(args, device, options)
        except ValidationError as error:
            raise UsageError("; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in error.errors())) from error
        return self._parsed(JobOut, self._send("POST", "/v1/jobs", json=body.model_dump(exclude_none=True)))

    def job(self, job_id: str) -> JobOut:
        """A job as it is now."""
        return self._parsed(JobOut, self._send("GET", f"/v1/jobs/{quote(job_id, safe='')}"))

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
        raise ServiceError(f"the service at {self.url} answered {response.status_code}: {_detail(response)}")

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


def _job_of(args: WorkloadArgs, device: str, options: dict[str, Any]) -> JobIn:
    return JobIn(
        operator=args.operator,
        shape=format_shape(args.dims),
        dtype=args.dtype,
        layout=args.layout,
        epilogue=list(args.epilogue),
        out_dtype=args.out_dtype,
        error_budget=args.error_budget,
        device=device,
        **options,
    )


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
