"""Who and what is let in: size limits, keys and their scopes, foreign web pages, rate limits. Denies by default."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernelwright.errors import KernelwrightError
from kernelwright.service.auth import Credentials, KeyRing, Principal, read_credentials
from kernelwright.service.loopback import is_loopback
from kernelwright.service.problems import answer_to_error
from kernelwright.service.rate_limit import RateLimit, retry_after
from kernelwright.service.refusal import Refused
from kernelwright.service.settings import Settings

MAX_HEADER_BYTES = 16 * 1024
MAX_TARGET_BYTES = 8 * 1024

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/login"})
OPEN_FOLDER = "/static/"
SIGN_IN = ("/login", "/logout")
READING_POSTS = frozenset({"/v1/kernels/best:batch"})
ADMIN_PATHS = ("/v1/audit",)
DEFAULT_RATE = 100.0


def needed_scope(method: str, path: str) -> str | None:
    """The scope that a request needs; None for what anybody may ask. What no rule names counts as a change."""
    if method in SAFE_METHODS and (path in OPEN_PATHS or path.startswith(OPEN_FOLDER)):
        return None
    if method == "POST" and path in SIGN_IN:
        return None
    if path.startswith(ADMIN_PATHS):
        return "admin"
    if method in SAFE_METHODS or path in READING_POSTS:
        return "read"
    return "tune"


class Guard:
    """Refuses what must not come in, with a problem document; tells the routes who asks (`scope["state"]`)."""

    def __init__(self, app: ASGIApp, settings: Settings, keys: KeyRing) -> None:
        self.app = app
        self._settings = settings
        self._keys = keys
        self._trusted = frozenset(name.strip().lower() for name in settings.trusted_hosts.split(",") if name.strip())
        self._open_limit = RateLimit(settings.rate_limit or 0.0, settings.rate_burst)
        rate = DEFAULT_RATE if settings.rate_limit is None else settings.rate_limit
        self._keyed_limit = RateLimit(rate, settings.rate_burst)
        self._lookup_limit = RateLimit(DEFAULT_RATE, settings.rate_burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            _check_sizes(scope, headers, self._settings.max_body_bytes)
            await self._admit(scope, headers)
            receive = await _bounded(headers, receive, self._settings.max_body_bytes)
        except KernelwrightError as error:
            await _refusal(scope, error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _admit(self, scope: Scope, headers: Headers) -> None:
        needs_key = await self._keys.needed()
        state = scope.setdefault("state", {})
        given = read_credentials(headers)
        if not needs_key:
            self._check_host(headers)
            _check_origin(scope["method"], headers, self._trusted)
            _limit(self._open_limit, _address(scope))
            state["principal"] = Principal.anybody(_address(scope))
            return
        principal = await self._find(given, _address(scope))
        _limit(self._keyed_limit, principal.id if principal else _address(scope))
        state["principal"] = principal
        if principal is not None:
            state["key_name"] = principal.name
            _check_origin(scope["method"], headers, self._trusted)
        _authorize(needed_scope(scope["method"], scope["path"]), principal, given)

    async def _find(self, given: Credentials | None, address: str) -> Principal | None:
        if given is None:
            return None
        if not self._keys.remembered(given):
            # Guessing keys costs the database a look each, so an address may do so only now and then.
            _limit(self._lookup_limit, address)
        return await self._keys.find(given)

    def _check_host(self, headers: Headers) -> None:
        """Without keys a web page could reach this machine by a name of its own that leads here (DNS rebinding)."""
        if not is_loopback(self._settings.host):
            return
        name = _host_name(headers.get("host", ""))
        if not is_loopback(name) and name not in self._trusted:
            raise Refused(
                403,
                f"the service must be addressed as localhost or 127.0.0.1 while it asks for no key, got {name[:80]!r}; "
                "name the host in KERNELWRIGHT_TRUSTED_HOSTS, or make a key: kernelwright keys create",
            )


def _refusal(scope: Scope, error: KernelwrightError) -> Response:
    """A problem document; for a browser without a key that wants a page, the way to the form that asks for one."""
    wants_page = "text/html" in Headers(scope=scope).get("accept", "") and not scope["path"].startswith("/v1/")
    if wants_page and scope["method"] in SAFE_METHODS and isinstance(error, Refused) and error.status == 401:
        target = scope["path"] + ("?" + scope["query_string"].decode("latin-1") if scope["query_string"] else "")
        return RedirectResponse(f"/login?{urlencode({'next': target})}", status_code=303)
    return answer_to_error(scope, error)


def _authorize(scope: str | None, principal: Principal | None, given: Credentials | None) -> None:
    if scope is None:
        return
    if principal is None:
        why = "this key is unknown or revoked" if given else "a key is needed"
        raise Refused(
            401,
            f"{why}; send one as Authorization: Bearer <key>, from: kernelwright keys create",
            {"WWW-Authenticate": 'Bearer realm="kernelwright", Basic realm="kernelwright"'},
        )
    if not principal.may(scope):
        raise Refused(403, f"this needs a key with the scope {scope}, the key {principal.name!r} has {principal.held}")


def _check_origin(method: str, headers: Mapping[str, str], trusted: frozenset[str]) -> None:
    """A page of another site must not change anything with the browser's own access."""
    if method in SAFE_METHODS:
        return
    origin = headers.get("origin")
    if origin is not None:
        host = urlsplit(origin).netloc.lower() if origin.isprintable() else ""
        foreign = host != headers.get("host", "").lower() and _host_name(host) not in trusted
    else:
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if foreign:
        raise Refused(403, "a page of another site may not change anything here; ask from the service's own pages")


def _host_name(host: str) -> str:
    """The name in "name:port" or "[::1]:port", in small letters."""
    name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def _address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "unknown"


def _limit(limit: RateLimit, client: str) -> None:
    wait = limit.take(client)
    if wait:
        seconds = retry_after(wait)
        raise Refused(
            429,
            f"no more than {limit.rate:g} requests a second, {limit.burst} at once; wait {seconds} s",
            {"Retry-After": seconds},
        )


def _check_sizes(scope: Scope, headers: Headers, most: int) -> None:
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
        raise Refused(414, f"path and query may have {MAX_TARGET_BYTES} bytes; put long questions into a batch")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise Refused(431, f"the headers may have {MAX_HEADER_BYTES} bytes together; send fewer or shorter ones")
    told = headers.get("content-length", "0")
    if not (told.isascii() and told.isdigit() and len(told) < 19):
        raise Refused(400, f"Content-Length must be a whole number, got {told[:40]!r}")
    if int(told) > most:
        raise _too_large(most)


def _too_large(most: int) -> Refused:
    return Refused(413, f"a body may have {most} bytes; send less, or in parts")


async def _bounded(headers: Headers, receive: Receive, most: int) -> Receive:
    """A body that comes in chunks does not tell its length, so it is read here up to the limit and handed on whole."""
    if "transfer-encoding" not in headers:
        return receive
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return _replay(message, receive)
        body += message.get("body", b"")
        if len(body) > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return _replay({"type": "http.request", "body": bytes(body), "more_body": False}, receive)


def _replay(message: Message, receive: Receive) -> Receive:
    waiting = [message]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
