"""Settings come from the environment, and misuse of them is told."""

from __future__ import annotations

import pytest

from kernelwright.errors import UsageError
from kernelwright.service.settings import PREFIX, Settings, load_settings


def test_defaults_serve_this_machine_only() -> None:
    settings = load_settings()
    assert settings.host == "127.0.0.1"
    assert settings.db is None and settings.url is None


def test_environment_is_read_and_given_values_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}DB", "sqlite:///env.db")
    monkeypatch.setenv(f"{PREFIX}PORT", "9000")
    assert load_settings(db=None).db == "sqlite:///env.db"
    assert load_settings(db="sqlite:///given.db").db == "sqlite:///given.db"
    assert load_settings().port == 9000


def test_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}PORT", "many")
    with pytest.raises(UsageError, match=r"KERNELWRIGHT_PORT.*integer.*'many'"):
        load_settings()


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_help(name: str) -> None:
    assert (Settings.model_fields[name].description or "").endswith(".")
