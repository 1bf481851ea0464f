from __future__ import annotations

import dataclasses

import pytest

from kernelwright.cost_model.calibration import UNCALIBRATED
from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.cost_model.xgboost_model import XGBoostModel
from kernelwright.errors import InvalidWorkload, UnknownOperator
from kernelwright.kernels import Operator, get_operator
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.search import answer as answer_module
from kernelwright.search.answer import Answer, find_winner
from kernelwright.types import DeviceSpec, FrozenMap, Measurement, Schedule, Status, Toolchain, TuningRecord, Workload
from tests.search.fakes import DEVICE, TOOLCHAIN, WORKLOAD, workload

MATMUL = get_operator("matmul")
MEMBERS = [s for s in MATMUL.space(WORKLOAD, DEVICE) if s.template == "pointer"]
NEWER = dataclasses.replace(TOOLCHAIN, triton="3.8.0")


class Memory:
    """Records in a list, newest first."""

    def __init__(self, *records: TuningRecord) -> None:
        self.records = list(records)

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        return [r for r in self.records if (r.workload.key, r.device.key) == (workload_key, device_key)]

    def neighbours(self, workload: Workload, device_key: str, limit: int = 64) -> list[TuningRecord]:
        return [r for r in self.records if r.workload != workload and r.device.key == device_key][:limit]


def record(
    of: Workload = WORKLOAD,
    us: float = 80.0,
    vendor_us: float | None = 100.0,
    schedule: Schedule | None = None,
    toolchain: Toolchain = TOOLCHAIN,
    fingerprint: str | None = None,
    at: str = "2026-01-01",
) -> TuningRecord:
    chosen = MEMBERS[0] if schedule is None else schedule
    current = MATMUL.templates["pointer"].fingerprint if fingerprint is None else fingerprint
    seen = Measurement(Status.OK, us)
    vendor = "torch.mm" if vendor_us else ""
    return TuningRecord(
        WORKLOAD if of is None else of, DEVICE, toolchain, chosen, seen, current, "tune", at, vendor, vendor_us
    )


def ask(*records: TuningRecord, of: Workload = WORKLOAD, toolchain: Toolchain | None = None) -> Answer:
    return find_winner(of, DEVICE, Memory(*records), toolchain=toolchain)


def test_measured() -> None:
    found = record()
    answer = ask(found, toolchain=TOOLCHAIN)
    assert (answer.how, answer.choice, answer.schedule, answer.record) == ("measured", "kernel", MEMBERS[0], found)
    assert (answer.expected_us, answer.vendor, answer.vendor_us) == (80.0, "torch.mm", 100.0)


def test_without_a_toolchain_any_will_do() -> None:
    assert ask(record(toolchain=NEWER)).how == "measured"


def test_the_toolchain_asked_for_is_preferred() -> None:
    answer = ask(record(us=10.0, toolchain=NEWER), record(us=80.0), toolchain=TOOLCHAIN)
    assert (answer.how, answer.expected_us) == ("measured", 80.0)


def test_a_later_shorter_search_does_not_hide_a_better_result() -> None:
    assert ask(record(us=90.0, at="2026-02"), record(us=80.0)).expected_us == 80.0


def test_times_of_different_toolchains_are_not_compared() -> None:
    assert ask(record(us=90.0, toolchain=NEWER), record(us=80.0)).expected_us == 90.0


def test_a_vendor_winner_is_the_choice_but_ours_is_shown() -> None:
    answer = ask(record(us=120.0))
    assert (answer.choice, answer.schedule, answer.expected_us) == ("vendor", MEMBERS[0], 120.0)
    assert "torch.mm is as fast or faster" in answer.note


def test_an_older_toolchain_is_stale() -> None:
    answer = ask(record(), toolchain=NEWER)
    assert (answer.how, answer.choice, answer.expected_us) == ("stale", "kernel", 80.0)


def test_an_older_kernel_source_is_stale() -> None:
    assert ask(record(fingerprint="old")).how == "stale"


def test_the_fingerprints_can_be_given() -> None:
    memory = Memory(record(fingerprint="old"))
    assert find_winner(WORKLOAD, DEVICE, memory, fingerprints={"pointer": "old"}).how == "measured"


def test_a_stale_schedule_that_is_no_longer_legal_is_not_used() -> None:
    gone = Schedule("pointer", FrozenMap({"block_q": 1}))
    assert ask(record(fingerprint="old", schedule=gone)).how == "vendor"


def test_the_nearest_is_scaled_by_the_least_possible_times() -> None:
    near = record(of=workload(4096), us=200.0, vendor_us=300.0)
    answer = ask(record(of=workload(4000, 8192)), near)
    assert (answer.how, answer.record, answer.choice) == ("nearest", near, "kernel")
    assert answer.expected_us == pytest.approx(100.0, rel=0.05)
    assert (answer.vendor, answer.vendor_us) == ("torch.mm", None)
    assert "M=4096" in answer.note


@pytest.mark.parametrize(("m", "how"), [(4096, "nearest"), (4097, "vendor"), (1024, "nearest"), (1023, "vendor")])
def test_the_nearest_is_within_a_factor_of_two(m: int, how: str) -> None:
    assert ask(record(of=workload(m))).how == how


def test_the_nearest_must_be_legal_here() -> None:
    gone = Schedule("pointer", FrozenMap({"block_q": 1}))
    far = record(of=workload(3000))
    assert ask(record(of=workload(2047), schedule=gone), far).record == far


def test_no_more_neighbours_are_checked_than_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check may enumerate a space, and a compile meets dozens of workloads that nothing is known of."""
    checked: list[Schedule] = []
    real = answer_module._is_legal

    def counted(operator: Operator, of: Workload, device: DeviceSpec, schedule: Schedule) -> bool:
        checked.append(schedule)
        return real(operator, of, device, schedule)

    monkeypatch.setattr(answer_module, "_is_legal", counted)
    gone = Schedule("pointer", FrozenMap({"block_q": 1}))
    records = [record(of=workload(m)) for m in (3000, 1504, 3504)]
    assert ask(*records, record(of=workload(2056), schedule=gone)).record == records[1]
    assert checked == [gone, records[1].schedule]


def test_alignment_counts_as_distance() -> None:
    aligned, unaligned = record(of=workload(k=4104)), record(of=workload(k=4097))
    assert ask(unaligned, aligned).record == aligned
    assert ask(aligned, unaligned, of=workload(k=4099)).record == unaligned


def test_a_neighbour_that_the_vendor_won_chooses_the_vendor() -> None:
    assert ask(record(of=workload(4096), us=120.0)).choice == "vendor"


def test_empty_dimensions_have_no_neighbours() -> None:
    assert ask(record(of=workload(0)), of=workload(1)).how == "vendor"


def test_predicted_is_the_models_first_choice_and_leaves_the_vendor_the_safe_one() -> None:
    model = RooflineModel()
    answer = find_winner(WORKLOAD, DEVICE, Memory(), model=model)
    members = list(MATMUL.space(WORKLOAD, DEVICE))
    scores = model.predict(WORKLOAD, DEVICE, members)
    assert (answer.how, answer.choice) == ("predicted", "vendor")
    assert answer.schedule == members[int(scores.argmax())]
    assert answer.expected_us == pytest.approx(model.expected_us(WORKLOAD, DEVICE, [answer.schedule])[0])
    assert answer.regret == pytest.approx(UNCALIBRATED)
    assert answer.roofline is not None and 0 < answer.roofline <= 1


def test_the_model_says_what_a_neighbours_schedule_may_lose() -> None:
    memory = Memory(record(of=workload(4096)))
    answer = find_winner(WORKLOAD, DEVICE, memory, model=RooflineModel())
    assert answer.regret is not None and UNCALIBRATED - 1e-9 <= answer.regret < 1


def test_no_regret_is_told_where_nothing_was_ever_measured() -> None:
    """An untrained model of an operator without recordings chooses, but nobody knows what that loses."""
    convolution = conv2d_workload((2, 64, 14, 14), 64, 3, padding=1)
    answer = find_winner(convolution, DEVICE, Memory(), model=XGBoostModel("conv2d"))
    assert answer.how == "predicted" and answer.schedule is not None and answer.regret is None


def test_nothing_known_is_the_vendor() -> None:
    answer = ask()
    assert (answer.how, answer.choice, answer.schedule) == ("vendor", "vendor", None)
    assert "tune it" in answer.note


def test_a_device_without_rates_still_gets_an_answer() -> None:
    bare = dataclasses.replace(DEVICE, peak_tflops=FrozenMap())
    found = dataclasses.replace(record(of=workload(4096)), device=bare)
    answer = find_winner(WORKLOAD, bare, Memory(found))
    assert (answer.how, answer.expected_us, answer.roofline) == ("nearest", None, None)


def test_nonsense_is_told() -> None:
    with pytest.raises(UnknownOperator):
        ask(of=dataclasses.replace(WORKLOAD, operator="fft"))
    with pytest.raises(InvalidWorkload):
        ask(of=dataclasses.replace(WORKLOAD, dims=FrozenMap({"M": 4})))
