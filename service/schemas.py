"""What the API takes and gives, as pydantic models; the command line's --json prints the same ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TEXT = 200

MAX_DIMS = 16
MAX_STEPS = 16

How = Literal["measured", "stale", "nearest", "predicted", "vendor"]
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
TrialStatus = Literal["ok", "wrong_result", "build_error", "out_of_resources", "crashed", "timeout"]
ShortText = Annotated[str, Field(max_length=MAX_TEXT)]
Shape = ShortText | Annotated[dict[ShortText, int], Field(max_length=MAX_DIMS)]
AttributeValue = (
    bool | Annotated[int, Field(ge=-(2**63), lt=2**63)] | Annotated[float, Field(allow_inf_nan=False)] | ShortText
)
Attributes = ShortText | Annotated[dict[ShortText, AttributeValue], Field(max_length=MAX_DIMS)]
Epilogue = ShortText | Annotated[list[ShortText], Field(max_length=MAX_STEPS)]
Next = Annotated[str | None, Field(description="Where the next page is, as in the Link header; None on the last page.")]


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


class RecordList(BaseModel):
    """A page of records, newest first."""

    records: list[RecordOut]
    next: Next = None


LAYOUT_TEXT = "For a matmul nt (an nn.Linear), nn, tn or tt; the operator's usual one when left out."
ATTRIBUTES_TEXT = "What else the operator is told."


class WorkloadIn(BaseModel):
    """A workload as people type it."""

    model_config = ConfigDict(extra="forbid")

    operator: ShortText = Field("matmul", description="Name of the operator.", examples=["matmul"])
    shape: Shape = Field(
        description="Sizes by name.", examples=["M=2048,N=4096,K=4096", {"M": 2048, "N": 4096, "K": 4096}]
    )
    dtype: ShortText = Field("bf16", description="Element type of the operands.", examples=["bf16"])
    layout: ShortText = Field("", description=LAYOUT_TEXT, examples=["nt"])
    epilogue: Epilogue = Field("", description="Steps done on the result.", examples=["bias,gelu"])
    out_dtype: ShortText | None = Field(None, description="Element type of the result, if another.")
    error_budget: float | None = Field(None, description="Largest relative error allowed, between 0 and 1.")
    attributes: Attributes = Field("", description=ATTRIBUTES_TEXT, examples=["deterministic=true"])


class JobIn(WorkloadIn):
    """A request to tune one workload on one device."""

    device: ShortText = Field("cuda", description="What to measure on.", examples=["cuda", "replay:h100"])
    strategy: ShortText = Field("model", description="model, random or exhaustive.", examples=["model"])
    trials: int | None = Field(None, ge=1, le=1_000_000, description="Trial budget; 64 when neither budget is given.")
    seconds: float | None = Field(None, gt=0, le=604_800, allow_inf_nan=False, description="Time budget.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Makes random choices repeatable.")


class BatchIn(BaseModel):
    """Many questions about one GPU, such as all matrix products of a model."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "hardware": "h100",
                    "workloads": [
                        {"operator": "matmul", "shape": "M=2048,N=4096,K=4096"},
                        {"operator": "matmul", "shape": {"M": 2048, "N": 14336, "K": 4096}, "epilogue": ["gelu"]},
                    ],
                }
            ]
        },
    )

    hardware: ShortText = Field(description="Name of the GPU.", examples=["h100"])
    workloads: list[WorkloadIn] = Field(min_length=1, max_length=10_000)
    predict: bool = Field(
        False,
        description="Whether the cost model answers where nothing was measured, which can take a second a workload; "
        "at most 20 workloads may be asked at once then.",
    )


class BatchItem(BaseModel):
    """One answer of a batch: either `best`, or why there is none."""

    best: BestKernel | None
    error: str | None


class BatchOut(BaseModel):
    """The answers, in the order of the workloads."""

    results: list[BatchItem]


class TableRow(BaseModel):
    """A range of sizes with one answer. The figures are those of its first size."""

    low: int = Field(description="The first size of the range.")
    high: int | None = Field(description="The last size of the range, None for the last range, which is open.")
    values: list[int] = Field(description="The sizes in the range that were asked for.")
    how: list[How] = Field(description="How the answer for each of these sizes is known.")
    choice: Literal["kernel", "vendor"]
    schedule: ScheduleOut | None
    expected_us: list[float | None] = Field(description="For each of these sizes, in microseconds.")


class TableOut(BaseModel):
    """A dispatch table: the best schedule by the size of one dimension, neighbours with one answer merged."""

    operator: str
    hardware: HardwareOut
    dim: str
    fixed: dict[str, int] = Field(description="Sizes of the other dimensions.")
    rows: list[TableRow]


class WorkloadOut(BaseModel):
    """A workload that trials or jobs exist for."""

    key: str
    label: str
    workload: dict[str, Any]
    links: dict[str, str]


class WorkloadList(BaseModel):
    """A page of workloads, by key."""

    workloads: list[WorkloadOut]
    next: Next = None


class TrialOut(BaseModel):
    """One schedule that was tried, with what came of it. Later ones have larger numbers."""

    number: int
    status: TrialStatus
    schedule: ScheduleOut
    median_us: float | None = Field(description="Median time of one call in microseconds; None for a failure.")
    error: float | None = Field(description="Relative error against the reference (Frobenius norm).")
    message: str = Field(description="Why it failed.")
    hardware: str = Field(description="Short name of the GPU.")
    measured_at: str


class TrialList(BaseModel):
    """A page of trials, oldest first."""

    trials: list[TrialOut]
    next: Next = None


class ParetoPoint(BaseModel):
    """A trial that no other beats in both time and error."""

    median_us: float
    error: float | None
    schedule: ScheduleOut
    measured_at: str


class ParetoOut(BaseModel):
    """The Pareto front of a workload on a GPU, fastest first."""

    points: list[ParetoPoint]


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
    """A page of jobs, newest first."""

    jobs: list[JobOut]
    next: Next = None


class AuditOut(BaseModel):
    """One change: who made it, when, and to what. who: the id of a key, "open" where none is asked for, "cli"."""

    id: int
    at: str
    who: str
    action: str
    subject: str
    detail: str


class AuditList(BaseModel):
    """A page of the audit log, newest first."""

    entries: list[AuditOut]
    next: Next = None


class DeviceOut(BaseModel):
    """A GPU that can be named in a query."""

    slug: str
    key: str
    present: bool | None = Field(description="Whether it is in the machine that answers; None: nobody looked.")
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
    """Whether the service can do its work. Where keys are asked for, those without one learn the status only."""

    status: Literal["ok"]
    version: str | None = None
    database: str | None = None
    schema_version: str | None = None
    records: int | None = None


class Problem(BaseModel):
    """An error, by RFC 9457; every error of this API has this form."""

    type: str = Field("about:blank", description="A name for the kind of error.")
    title: str
    status: int
    detail: str
    instance: str
    errors: list[str] = Field(default_factory=list, description="The single complaints, where there are several.")
