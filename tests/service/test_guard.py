"""Who and what is let in: keys and scopes, open mode, foreign pages, sizes, rates."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from kernelwright.db import Store
from kernelwright.errors import UsageError
from kernelwright.service.app import create_app
from kernelwright.service.auth import digest_of, make_key, new_key, rotate_key
from kernelwright.service.cli_service import refuse_open
from kernelwright.service.guard import needed_scope
from kernelwright.service.loopback import is_loopback
from kernelwright.service.missing import NotFound
from kernelwright.service.rate_limit import MAX_CLIENTS, RateLimit
from kernelwright.service.settings import Settings
from tests.service.conftest import AppTransport

JOB = {"shape": "M=64,N=64,K=64", "device": "replay:h100"}

Keyed = Callable[..., httpx.Client]


@pytest.fixture
def make_app(db_url: str, recorded: Any) -> Iterator[Callable[..., FastAPI]]:
    made: list[FastAPI] = []

    def make(**given: Any) -> FastAPI:
        made.append(create_app(Settings(db=db_url, recorded=recorded, pretuned=False, **given)))
        return made[-1]

    yield make
    for app in made:
        app.state.shared.store.close()


def client_of(app: FastAPI, key: str | None = None, base: str = "http://127.0.0.1") -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(transport=AppTransport(app), base_url=base, headers=headers)


def test_scopes_of_requests() -> None:
    assert needed_scope("GET", "/healthz") is None
    assert needed_scope("GET", "/anything/else") == "read"
    assert needed_scope("POST", "/v1/kernels/best:batch") == "read"
    assert needed_scope("POST", "/anything/else") == "tune"
    assert needed_scope("BREW", "/") == "tune"
    assert needed_scope("GET", "/v1/audit") == "admin"
    assert is_loopback("127.0.0.1") and is_loopback("[::1]") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("10.0.0.1") and not is_loopback("example.org")


def test_without_a_key_nothing_is_read_or_changed(app: FastAPI, store: Store) -> None:
    make_key(store, "somebody", ("admin",))
    http = client_of(app)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path not in ("/healthz", "/login", "/logout"):
            path = route.path.replace("{", "").replace("}", "")
            for method in route.methods:
                assert http.request(method, path).status_code == 401, (method, path)
    for path in ("/docs", "/openapi.json", "/no/such/page"):
        assert http.get(path).status_code == 401
    assert http.get("/healthz").json() == {"status": "ok"} | dict.fromkeys(
        ("version", "database", "schema_version", "records")
    )
    assert not store.jobs()


@pytest.mark.parametrize(
    ("scopes", "read", "tune", "admin"),
    [(("read",), 200, 403, 403), (("tune",), 200, 202, 403), (("admin",), 200, 202, 200), ((), 403, 403, 403)],
)
def test_a_key_opens_what_its_scopes_say(
    app: FastAPI, store: Store, scopes: tuple[str, ...], read: int, tune: int, admin: int
) -> None:
    key = new_key()
    store.add_key("somebody", digest_of(key), scopes)
    http = client_of(app, key)
    assert http.get("/v1/jobs").status_code == read
    assert http.get("/metrics").status_code == read
    assert http.post("/v1/jobs", json=JOB).status_code == tune
    assert http.get("/v1/audit").status_code == admin


def test_ways_to_send_a_key(app: FastAPI, store: Store) -> None:
    _, key = make_key(store, "somebody", ("read",))
    http = client_of(app)
    basic = base64.b64encode(f"me:{key}".encode()).decode()
    for good in ({"X-API-Key": key}, {"Authorization": f"Basic {basic}"}, {"Authorization": f"bearer {key}"}):
        assert http.get("/v1/jobs", headers=good).status_code == 200, good
    bad = [
        {"X-API-Key": new_key()},
        {"X-API-Key": key[:-1]},
        {"Authorization": f"Basic {key}"},
        {"Authorization": "Basic !"},
        {"Authorization": "Digest x"},
        {"Authorization": key},
    ]
    for headers in bad:
        refused = http.get("/v1/jobs", headers=headers)
        assert refused.status_code == 401 and "Bearer" in refused.headers["www-authenticate"], headers


def test_a_revoked_key_is_useless_and_the_service_stays_shut(make_app: Callable[..., FastAPI], store: Store) -> None:
    key_id, key = make_key(store, "somebody", ("read",))
    app = make_app()
    now = [0.0]
    app.state.shared.keys._clock = lambda: now[0]
    http = client_of(app, key)
    assert http.get("/v1/jobs").status_code == 200
    store.revoke_key(key_id)
    now[0] = 1.1
    assert http.get("/v1/jobs").status_code == 401
    assert client_of(app).get("/v1/jobs").status_code == 401


def test_the_first_key_shuts_an_open_service(app: FastAPI, store: Store) -> None:
    now = [0.0]
    app.state.shared.keys._clock = lambda: now[0]
    assert client_of(app).get("/v1/jobs").status_code == 200
    make_key(store, "somebody", ("read",))
    now[0] = 1.1
    assert client_of(app).get("/v1/jobs").status_code == 401


def test_keys_may_be_asked_for_before_there_are_any(make_app: Callable[..., FastAPI]) -> None:
    assert client_of(make_app(require_keys=True)).get("/v1/jobs").status_code == 401


def test_rotation_makes_a_new_key_and_ends_the_old(store: Store) -> None:
    old_id, old = make_key(store, "somebody", ("read", "tune"))
    new_id, new = rotate_key(store, old_id)
    assert store.find_key_by_hash(digest_of(old)) is None
    found = store.find_key_by_hash(digest_of(new))
    assert found is not None and (found.id, found.name) == (new_id, "somebody")
    assert found.scopes == {"read", "tune"}
    with pytest.raises(NotFound):
        rotate_key(store, old_id)


def test_the_database_holds_no_key(store: Store, db_url: str) -> None:
    _, key = make_key(store, "somebody", ("read",))
    store.close()
    for file in Path(db_url.removeprefix("sqlite:///")).parent.glob("tuning.db*"):
        assert key.encode() not in file.read_bytes()


@pytest.mark.parametrize(("name", "scopes"), [("", ("read",)), ("x" * 81, ("read",)), ("a", ()), ("a", ("all",))])
def test_keys_that_cannot_be(store: Store, name: str, scopes: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        make_key(store, name, scopes)


def test_who_changed_what_is_kept(app: FastAPI, store: Store) -> None:
    key_id, key = make_key(store, "somebody", ("admin",))
    http = client_of(app, key)
    job = http.post("/v1/jobs", json=JOB).json()["id"]
    http.post(f"/v1/jobs/{job}/cancel")
    entries = http.get("/v1/audit", params={"limit": 1}).json()
    assert [(e["who"], e["action"], e["subject"]) for e in entries["entries"]] == [(key_id, "job.cancel", job)]
    older = http.get(entries["next"]).json()
    assert [e["action"] for e in older["entries"]] == ["job.submit"] and older["next"] is None


def test_open_mode_answers_to_names_of_this_machine_only(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(trusted_hosts="kernels.lan")
    for good in ("localhost", "127.0.0.1:8765", "[::1]:8765", "KERNELS.lan:80"):
        assert client_of(app).get("/v1/jobs", headers={"Host": good}).status_code == 200, good
    for bad in ("evil.example", "127.0.0.1.evil.example", ""):
        refused = client_of(app).get("/v1/jobs", headers={"Host": bad})
        assert refused.status_code == 403 and "TRUSTED_HOSTS" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"Origin": "http://127.0.0.1"}, 202),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:9999"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 202),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_a_foreign_page_changes_nothing(http: httpx.Client, headers: dict[str, str], status: int) -> None:
    assert http.post("/v1/jobs", json=JOB, headers=headers).status_code == status


def test_sizes_are_limited(make_app: Callable[..., FastAPI]) -> None:
    http = client_of(make_app(max_body_bytes=1024))
    assert http.post("/v1/jobs", content=b"x" * 1025).status_code == 413
    assert http.post("/v1/jobs", content=iter([b"x" * 600, b"x" * 600])).status_code == 413
    assert http.post("/v1/jobs", content=iter([b"{", b"}"])).status_code == 422
    assert http.get("/v1/jobs", headers={"X-Long": "x" * 20_000}).status_code == 431
    assert http.get("/v1/jobs", params={"x": "y" * 9_000}).status_code == 414
    assert http.post("/v1/jobs", content=b"[" * 1000).status_code in (400, 422)


def test_rates_are_limited(make_app: Callable[..., FastAPI]) -> None:
    http = client_of(make_app(rate_limit=0.01, rate_burst=3))
    answers = [http.get("/v1/operators") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert answers[-1].json()["type"] == "urn:kernelwright:too-many-requests"


def test_each_key_has_a_rate_of_its_own(make_app: Callable[..., FastAPI], store: Store) -> None:
    keys = [make_key(store, name, ("read",))[1] for name in ("one", "two")]
    app = make_app(rate_limit=0.01, rate_burst=1)
    assert [client_of(app, key).get("/v1/operators").status_code for key in keys] == [200, 200]
    assert client_of(app, keys[0]).get("/v1/operators").status_code == 429


def test_token_bucket() -> None:
    now = [0.0]
    limit = RateLimit(2.0, 4, lambda: now[0])
    assert [limit.take("a") for _ in range(4)] == [0.0] * 4
    assert limit.take("a") == pytest.approx(0.5)
    assert limit.take("b") == 0.0
    now[0] = 0.5
    assert limit.take("a") == 0.0 and limit.take("a") > 0
    for number in range(MAX_CLIENTS + 5):
        limit.take(str(number))
    assert len(limit._buckets) == MAX_CLIENTS
    assert RateLimit(0.0, 1).take("a") == 0.0


def test_other_machines_are_not_let_in_without_a_key(db_url: str, store: Store) -> None:
    refuse_open(Settings(db=db_url))
    with pytest.raises(UsageError, match="keys create"):
        refuse_open(Settings(db=db_url, host="0.0.0.0"))
    refuse_open(Settings(db=db_url, host="0.0.0.0", insecure_open=True))
    refuse_open(Settings(db=db_url, host="0.0.0.0", require_keys=True))
    make_key(store, "somebody", ("read",))
    refuse_open(Settings(db=db_url, host="0.0.0.0"))
