"""Settings of the service, the worker and the command line: the one place that reads the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

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
    models: Path | None = Field(
        None, description="Folder of your own cost models, <operator>.json each; default: those packaged."
    )
    pretuned: bool = Field(
        True, description="Whether `serve` and `query` fill an empty database with the records that ship with us."
    )
    share_key: str | None = Field(
        None, min_length=16, repr=False, description="Secret shared by a team: signs exports, and vouches for imports."
    )
    log_level: str = Field(
        "info", pattern="^(critical|error|warning|info|debug)$", description="Least severity that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="How `serve` and `worker` log: text for people, json for one object a line."
    )
    api_key: str | None = Field(None, repr=False, description="API key that the client sends to a service.")
    require_keys: bool = Field(
        False, description="Whether the API asks for a key even before one was made; once one is, it always asks."
    )
    insecure_open: bool = Field(
        False, description="Whether `serve` may listen for other machines although nothing asks for a key."
    )
    trusted_hosts: str = Field(
        "", description="Host names, with commas, by which browsers may reach a service that asks for no key."
    )
    forwarded_allow_ips: str = Field(
        "127.0.0.1", description="Addresses of proxies, with commas, whose X-Forwarded-For and -Proto are believed."
    )
    tls_certificate: Path | None = Field(None, description="PEM file with the certificate chain; `serve` speaks TLS.")
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    rate_limit: float | None = Field(
        None,
        ge=0,
        description="Requests a second for each key or address, 0 for no limit; default: 100, none without keys.",
    )
    rate_burst: int = Field(200, ge=1, description="Requests that may come at once before the rate limit holds.")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="Largest request body in bytes.")
    max_batch: int = Field(500, ge=1, le=10_000, description="Most workloads in one batch query.")
    cache_bytes: int = Field(
        48 << 20, ge=0, description="Memory for answers that were given before, in bytes; 0 keeps none."
    )
    cache_seconds: float = Field(
        1.0, gt=0, le=60, description="Most seconds until an answer shows what another process wrote."
    )
    model_processes: int = Field(
        1, ge=0, le=16, description="Processes beside `serve` that ask the cost model; 0 asks in a thread of its own."
    )
    event_seconds: float = Field(
        0.5, ge=0.05, description="Seconds between two looks at a job whose progress is being watched."
    )
    shutdown_seconds: int = Field(
        10, ge=1, description="Most seconds that `serve` takes to answer what it has begun when it is told to stop."
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
