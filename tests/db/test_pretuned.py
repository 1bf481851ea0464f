"""The records that ship with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.db import Store, Trust, pretuned
from kernelwright.db.pretuned import load_pretuned, pretuned_files
from kernelwright.errors import ArchiveError
from tests.db.values import trial


def test_an_empty_database_is_filled_once(store: Store) -> None:
    count = load_pretuned(store)
    records = store.records(limit=None)
    assert count == len(records) > 50
    assert store.count_trust() == {"trusted": count}
    assert {state.source for state in store.record_states(r.key for r in records).values()} == {"pretuned"}
    assert load_pretuned(store) == 0 and store.records(limit=None) == records


def test_a_database_with_trials_is_left_alone(store: Store) -> None:
    store.add_trial(trial(1))
    assert load_pretuned(store) == 0 and store.count_records() == 0


def test_our_own_measurement_comes_first(store: Store) -> None:
    load_pretuned(store)
    shipped = store.records(limit=1)[0]
    store.put_winner(shipped)
    state = store.record_state(shipped.key)
    assert state is not None and (state.trust, state.source) == (Trust.MEASURED, "")
    assert store.find_records(shipped.workload.key, shipped.device.key)[0] == shipped


def test_a_damaged_file_is_told_and_loads_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pretuned_files()[0]
    bad = tmp_path / "h100.jsonl.gz"
    bad.write_bytes(whole.read_bytes()[:-100])
    monkeypatch.setattr(pretuned, "pretuned_files", lambda: [bad])
    with pytest.raises(ArchiveError, match="cannot be read"):
        load_pretuned(store)
    assert store.count_records() == 0
