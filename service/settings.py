"""Settings of the service, the worker and the command line: the one place that reads the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kernelwright.errors import UsageError

PREFIX = "KERNELWRIGHT_"


class Settings(BaseSettings):
    """Every setting, read from KERNELWRIGHT_<NAME> unless given; the description of a field is its help."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    db: str | None = Field(
        None, description="Database URL, such as sqlite:///tuning.db; default: a SQLite file in the user's data folder."
    )
    url: str | None = Field(
        None, description="Address of a running service, such as http://127.0.0.1:8765, to ask instead of a database."
    )
    host: str = Field(
        "127.0.0.1", description="Address that `serve` listens on; by default only this machine reaches it."
    )
    port: int = Field(8765, ge=0, le=65535, description="Port that `serve` listens on; 0 takes any free one.")
    timeout: float = Field(30.0, gt=0, description="Seconds that a client waits for one answer of the service.")
    poll_seconds: float = Field(1.0, gt=0, description="Seconds between two looks of an idle worker at the job queue.")
    heartbeat_seconds: float = Field(5.0, gt=0, description="Seconds between two signs of life of a busy worker.")
    stale_seconds: float = Field(
        30.0, gt=0, description="A job whose worker gave no sign of life for this many seconds goes back to the queue."
    )
    recorded: Path | None = Field(None, description="Folder of recordings for replay devices; default: those packaged.")
    log_level: str = Field(
        "info", pattern="^(critical|error|warning|info|debug)$", description="Least severity that is logged."
    )


def load_settings(**given: Any) -> Settings:
    """Settings from the environment, over which the `given` ones win unless None; UsageError names what is wrong."""
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise UsageError("; ".join(_complaint(dict(item)) for item in error.errors())) from error


def _complaint(item: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in item["loc"])
    return f"setting {name} ({PREFIX}{name.upper()}): {item['msg']}, got {item['input']!r}"
