"""Stored things in the form of the API: jobs, trials and workloads."""

from __future__ import annotations

from kernelwright.db import Job, StoredTrial
from kernelwright.service.schemas import JobOut, ParetoPoint, ScheduleOut, TrialOut, WorkloadOut
from kernelwright.types import Schedule, Trial, Workload


def tell_job(job: Job) -> JobOut:
    """A job and where to go on from it."""
    links = {"self": f"/v1/jobs/{job.id}", "events": f"/v1/jobs/{job.id}/events"}
    if job.record_id is not None:
        links["record"] = f"/v1/kernels/{job.record_id}"
        links["source"] = f"/v1/kernels/{job.record_id}/source"
    return JobOut(
        id=job.id,
        state=job.state.value,
        workload=job.workload.to_json(),
        label=str(job.workload),
        device=job.device,
        strategy=job.strategy,
        trials=job.trials,
        seconds=job.seconds,
        seed=job.seed,
        done=job.done,
        total=job.total,
        worker=job.worker,
        created_at=job.created_at,
        updated_at=job.updated_at,
        message=job.message,
        record_id=job.record_id,
        links=links,
    )


def tell_trial(stored: StoredTrial) -> TrialOut:
    """A trial with its number."""
    trial = stored.trial
    return TrialOut(
        number=stored.id,
        status=trial.measurement.status.value,
        schedule=tell_schedule(trial.schedule),
        median_us=trial.measurement.median_us,
        error=trial.measurement.error,
        message=trial.measurement.message,
        hardware=trial.device.slug,
        measured_at=trial.measured_at,
    )


def tell_point(trial: Trial) -> ParetoPoint:
    """A trial of the Pareto front."""
    return ParetoPoint(
        median_us=trial.measurement.median_us or 0.0,
        error=trial.measurement.error,
        schedule=tell_schedule(trial.schedule),
        measured_at=trial.measured_at,
    )


def tell_schedule(schedule: Schedule) -> ScheduleOut:
    """A schedule."""
    return ScheduleOut(template=schedule.template, knobs=dict(schedule.knobs))


def tell_workload(workload: Workload) -> WorkloadOut:
    """A workload and where to go on from it."""
    place = f"/v1/workloads/{workload.key}"
    links = {"self": place, "trials": f"{place}/trials", "pareto": f"{place}/pareto"}
    return WorkloadOut(key=workload.key, label=str(workload), workload=workload.to_json(), links=links)
