"""`kernelwright keys` and `kernelwright audit`: who may use the service, and who changed what."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from kernelwright.db import ApiKey, Store
from kernelwright.service import cli_options as options
from kernelwright.service.auth import SCOPES, make_key, rotate_key
from kernelwright.service.cli_output import print_json, to_stderr
from kernelwright.service.missing import NotFound
from kernelwright.service.settings import load_settings

WHO = "cli"
"""Who the audit log says made a change on the command line."""

KeyId = Annotated[str, typer.Argument(help="Id of the key, from `keys list`.")]
Name = Annotated[str, typer.Argument(help="Who or what uses the key.")]
Scopes = Annotated[
    list[str] | None,
    typer.Option("--scope", help=f"{', '.join(SCOPES)}; each includes those before it. [default: read]"),
]

keys_app = typer.Typer(help="Keys of the API: once one was made, the service asks for one.", no_args_is_help=True)


@keys_app.command("create")
def create(name: Name, scope: Scopes = None, db: options.Database = None, json: options.Json = False) -> None:
    """Make a key and print it; it is stored hashed and cannot be shown again."""
    with Store.open(load_settings(db=db).db) as store:
        key_id, key = make_key(store, name, tuple(scope or ("read",)))
        store.audit(WHO, "key.create", key_id, f"{name}: {' '.join(scope or ('read',))}")
    _tell(key_id, key, json)


@keys_app.command("rotate")
def rotate(key_id: KeyId, db: options.Database = None, json: options.Json = False) -> None:
    """Make a new key with the same name and scopes and revoke the old one."""
    with Store.open(load_settings(db=db).db) as store:
        new_id, key = rotate_key(store, key_id)
        store.audit(WHO, "key.rotate", new_id, f"in place of {key_id}")
    _tell(new_id, key, json)


@keys_app.command("revoke")
def revoke(key_id: KeyId, db: options.Database = None, json: options.Json = False) -> None:
    """Make a key useless; running services notice within a second."""
    with Store.open(load_settings(db=db).db) as store:
        if not store.revoke_key(key_id):
            raise NotFound(f"no good key has the id {key_id!r}; kernelwright keys list shows them")
        store.audit(WHO, "key.revoke", key_id)
    if json:
        print_json({"revoked": key_id})
    else:
        to_stderr(f"revoked {key_id}")


@keys_app.command("list")
def list_(db: options.Database = None, json: options.Json = False) -> None:
    """Every key that was made, without its secret."""
    with Store.open(load_settings(db=db).db) as store:
        keys = store.list_keys()
    if json:
        print_json({"keys": [dataclasses.asdict(key) | {"scopes": sorted(key.scopes)} for key in keys]})
        return
    for key in keys:
        typer.echo(_line(key))


def audit(
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most entries to show.")] = 50,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Who changed what, newest first."""
    with Store.open(load_settings(db=db).db) as store:
        entries = store.audit_entries(limit)
    if json:
        print_json({"entries": [dataclasses.asdict(entry) for entry in entries]})
        return
    for entry in entries:
        typer.echo(f"{entry.at}  {entry.who}  {entry.action}  {entry.subject}  {entry.detail}".rstrip())


def _line(key: ApiKey) -> str:
    scopes = ",".join(scope for scope in SCOPES if scope in key.scopes)
    end = f"revoked {key.revoked_at}" if key.revoked_at else f"last used {key.last_used_at or 'never'}"
    return f"{key.id}  {key.name}  {scopes}  made {key.created_at}  {end}"


def _tell(key_id: str, key: str, json: bool) -> None:
    if json:
        print_json({"id": key_id, "key": key})
    else:
        to_stderr(f"key {key_id}; keep it safe, it is not shown again:")
        typer.echo(key)
