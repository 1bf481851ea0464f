"""The pages: what each address shows."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles

from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.service.auth import COOKIE, credentials_of
from kernelwright.service.dashboard import views
from kernelwright.service.dashboard.forms import Search, choices, job_request, read_form
from kernelwright.service.dashboard.rendering import page
from kernelwright.service.missing import NotFound
from kernelwright.service.problems import status_of
from kernelwright.service.state import State, Who


class PageRoute(APIRoute):
    """A route whose errors are pages too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with our errors told as a page of the status that the API would use."""
        inner = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await inner(request)
            except KernelwrightError as error:
                status = status_of(error)
                return page("error.html", status, message=str(error), status=status)
            except RequestValidationError as error:
                return page(
                    "error.html", 422, message="; ".join(str(item["msg"]) for item in error.errors()), status=422
                )

        return handler


COOKIE_SECONDS = 12 * 3600

router = APIRouter(route_class=PageRoute, include_in_schema=False)


def install(app: FastAPI) -> None:
    """Put the pages and their files into the app."""
    app.include_router(router)
    app.mount("/static", StaticFiles(packages=[("kernelwright.service.dashboard", "static")]), name="static")


@router.get("/")
def home(state: State) -> Response:
    """The search form, what is known, and the newest jobs."""
    return page("home.html", **views.home(state), search=Search.read({}), choices=choices())


@router.get("/workload")
def workload(request: Request, state: State) -> Response:
    """What is known of the workload that was asked for; a mistake in the form is told above it."""
    search = Search.read(request.query_params)
    try:
        asked = views.of_question(state, search.workload(), search.device())
    except UsageError as error:
        return page("workload.html", 422, search=search, choices=choices(), view=None, mistake=str(error))
    return page("workload.html", search=search, choices=choices(), view=asked, mistake="")


@router.get("/records/{record_id}")
def record(state: State, record_id: str) -> Response:
    """What is known of a record's workload."""
    found = state.store.get_record(record_id)
    if found is None:
        raise NotFound(f"no record has the id {record_id[:80]!r}; the list of winners leads to those that there are")
    search = Search.of(found.workload, found.device)
    asked = views.of_question(state, found.workload, found.device)
    return page("workload.html", search=search, choices=choices(), view=asked, mistake="")


@router.get("/winners")
def winners(request: Request, state: State) -> Response:
    """The records that pass the filters, a page at a time."""
    return page("winners.html", **views.winners(state, request.query_params), choices=choices())


@router.get("/jobs")
def jobs(request: Request, state: State) -> Response:
    """Jobs, newest first, with the form for a new one."""
    fields = dict(request.query_params)
    return page("jobs.html", **views.jobs(state, fields.get("state", "")), choices=choices(), fields=fields, mistake="")


@router.post("/jobs")
async def submit(request: Request, state: State, who: Who) -> Response:
    """Queue a job and go to its page."""
    fields = read_form(await request.body())
    try:
        job = await to_thread.run_sync(views.submit, state, job_request(fields), who)
    except UsageError as error:
        listed = await to_thread.run_sync(views.jobs, state, "")
        return page("jobs.html", 422, **listed, choices=choices(), fields=fields, mistake=str(error))
    return RedirectResponse(f"/jobs/{job.id}", status_code=303)


@router.get("/jobs/{job_id}")
def job(state: State, job_id: str) -> Response:
    """A job, how far it is, and the plots of the trials that it has made."""
    return page("job.html", **views.job(state, job_id))


@router.get("/hardware")
def hardware(state: State) -> Response:
    """Every named GPU with its limits and rates."""
    return page("hardware.html", **views.hardware(state))


@router.get("/model")
def model(state: State, operator: str = "matmul") -> Response:
    """What the cost model was trained on and how far it can be trusted."""
    return page("model.html", **views.model_card(state, operator))


@router.get("/roofline")
def roofline(request: Request, state: State) -> Response:
    """Achieved rates of every record of a device under its roofs."""
    return page("roofline.html", **views.roofline(state, request.query_params), choices=choices())


@router.get("/api")
def api(request: Request) -> Response:
    """What the API offers, from its own document; unlike /docs it needs nothing from another machine."""
    return page("api.html", document=request.app.openapi())


@router.get("/login")
def login(next: str = "/") -> Response:
    """The form that asks for a key."""
    return page("login.html", next=_own_address(next), mistake="")


@router.post("/login")
async def enter(request: Request, state: State) -> Response:
    """Keep a good key in a cookie that no script can read and no other site's page can send."""
    fields = read_form(await request.body())
    onward = _own_address(fields.get("next", "/"))
    if await state.keys.needed() and await state.keys.find(credentials_of(fields.get("key", ""))) is None:
        return page("login.html", 401, next=onward, mistake="This key is unknown, expired or revoked.")
    answer = RedirectResponse(onward, status_code=303)
    answer.set_cookie(
        COOKIE,
        fields.get("key", ""),
        COOKIE_SECONDS,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
def leave() -> Response:
    """Forget the key."""
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _own_address(text: str) -> str:
    """The address if it is one of this service, else the first page: a link must not lead elsewhere by way of us."""
    ours = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable()
    return text if ours else "/"
