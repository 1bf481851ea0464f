"""One list of the workloads of several models, each weighing the same."""

from __future__ import annotations

import functools
import json

import list_workloads
import pytest
import torch
from list_workloads import STEP_US, expected_us, listed

from kernelwright.kernels.device import named_device
from kernelwright.search.campaign import parse_shares

H200 = named_device("h200")


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the whole models")
def test_each_model_weighs_the_same_and_shared_workloads_count_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    # each model is looked through once
    monkeypatch.setattr(list_workloads, "collect_file", functools.cache(list_workloads.collect_file))

    def weight(names: list[str]) -> float:
        shares = parse_shares("\n".join(json.dumps(entry) for entry in listed(names, H200)))
        return sum(share.calls * expected_us(share.workload, H200) for share in shares)

    assert weight(["moe"]) == pytest.approx(STEP_US, rel=1e-3)
    assert weight(["moe", "llama_block", "moe"]) == pytest.approx(3 * STEP_US, rel=1e-3)
    assert len(listed(["moe", "moe"], H200)) == len(listed(["moe"], H200))
