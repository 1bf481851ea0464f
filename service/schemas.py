"""What the API takes and gives, as pydantic models; the command line's --json prints the same ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TEXT = 200

How = Literal["measured", "stale", "nearest", "predicted", "vendor"]
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
ShortText = Annotated[str, Field(max_length=MAX_TEXT)]


class ScheduleOut(BaseModel):
    """A template and the values of its knobs."""

    template: str
    knobs: dict[str, int | float | str | bool]


class HardwareOut(BaseModel):
    """The GPU that an answer is for."""

    slug: str
    name: str
    architecture: str
    key: str


class ToolchainOut(BaseModel):
    """The software that a time was measured with."""

    triton: str
    torch: str
    driver: str
    compiler: str
    timer: int


class Links(BaseModel):
    """Where to go on from an answer; paths on the same service, None where there is nothing."""

    self: str | None = Field(None, description="The record that the answer rests on.")
    source: str | None = Field(None, description="The standalone kernel file for this very workload.")
    workload: str | None = Field(None, description="The question in its canonical form.")


class BestKernel(BaseModel):
    """The answer to "what is fastest here?", with how it is known."""

    how: How = Field(
        description="measured: this workload, GPU and toolchain; stale: another toolchain or kernel source; nearest: "
        "a measured neighbour's schedule; predicted: the cost model's choice; vendor: nothing of ours is known."
    )
    choice: Literal["kernel", "vendor"] = Field(description="What to run: our kernel, or the vendor library's call.")
    workload: dict[str, Any]
    workload_key: str
    label: str = Field(description="The workload in one line.")
    hardware: HardwareOut
    schedule: ScheduleOut | None
    expected_us: float | None = Field(
        description="Time of a call of our kernel in microseconds, measured or estimated."
    )
    vendor: str = Field(description="The vendor call it was compared with; empty if there is none.")
    vendor_us: float | None
    speedup: float | None = Field(description="vendor_us over expected_us: above 1 our kernel is faster.")
    roofline_percent: float | None = Field(description="Least possible time over the expected time, in percent.")
    regret: float | None = Field(description="Share by which the best possible may be faster, as far as it is known.")
    note: str
    record_id: str | None
    trials: int | None = Field(description="How many schedules were tried for the record.")
    measured_at: str | None = Field(description="UTC, ISO 8601.")
    toolchain: ToolchainOut | None
    links: Links


class RunOut(BaseModel):
    """What one tuning run did."""

    strategy: str
    seed: int
    new_trials: int
    known_trials: int = Field(description="Trials found in the database, not measured again.")
    failed_trials: int = Field(description="New trials that did not end in a right and timed result.")
    seconds: float


class TuneReport(BestKernel):
    """The answer after tuning, with what the run did."""

    run: RunOut


class RecordOut(BaseModel):
    """A tuning record in full."""

    id: str
    winner: Literal["kernel", "vendor"]
    speedup: float | None
    record: dict[str, Any]
    links: Links


class JobIn(BaseModel):
    """A request to tune one workload on one device."""

    model_config = ConfigDict(extra="forbid")

    operator: ShortText = "matmul"
    shape: ShortText | dict[ShortText, int] = Field(
        examples=["M=2048,N=4096,K=4096", {"M": 2048, "N": 4096, "K": 4096}]
    )
    dtype: ShortText = "bf16"
    layout: ShortText = "nt"
    epilogue: ShortText | list[ShortText] = Field("", examples=["bias,gelu"])
    out_dtype: ShortText | None = None
    error_budget: float | None = None
    device: ShortText = Field("cuda", examples=["cuda", "replay:h100"])
    strategy: ShortText = "model"
    trials: int | None = Field(None, ge=1, le=1_000_000, description="Trial budget; 64 when neither budget is given.")
    seconds: float | None = Field(None, gt=0, le=604_800, allow_inf_nan=False, description="Time budget.")
    seed: int = Field(0, ge=0, le=2**31 - 1)


class JobOut(BaseModel):
    """A job and how far it is."""

    id: str
    state: JobState
    workload: dict[str, Any]
    label: str
    device: str
    strategy: str
    trials: int | None
    seconds: float | None
    seed: int
    done: int = Field(description="Trials measured so far.")
    total: int | None = Field(description="Trials to measure in all, None where only time limits.")
    worker: str | None
    created_at: str
    updated_at: str
    message: str
    record_id: str | None
    links: dict[str, str]


class JobList(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobOut]


class DeviceOut(BaseModel):
    """A GPU that can be named in a query."""

    slug: str
    key: str
    present: bool = Field(description="Whether it is in the machine that answers.")
    replay: bool = Field(description="Whether recorded trials of it can be tuned on as replay:<slug>.")
    spec: dict[str, Any]


class DeviceList(BaseModel):
    """All GPUs that have a name."""

    devices: list[DeviceOut]


class OperatorOut(BaseModel):
    """An operator, and how its workloads are typed."""

    name: str
    dims: list[str]
    templates: dict[str, str] = Field(description="Fingerprint by template.")


class OperatorList(BaseModel):
    """All operators."""

    operators: list[OperatorOut]


class Health(BaseModel):
    """Whether the service can do its work."""

    status: Literal["ok"]
    version: str
    database: str
    schema_version: str
    records: int


class Problem(BaseModel):
    """An error, by RFC 9457; every error of this API has this form."""

    type: str = Field("about:blank", description="A name for the kind of error.")
    title: str
    status: int
    detail: str
    instance: str
    errors: list[str] = Field(default_factory=list, description="The single complaints, where there are several.")
