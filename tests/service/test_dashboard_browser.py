"""The pages in a real Chromium: find a winner, watch a job finish live, read the plots.

SCREENSHOTS=docs/images pytest tests/service/test_dashboard_browser.py renews the pictures in the documentation.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import uvicorn

from kernelwright.search import load_recorded, recorded_path, save_recorded
from kernelwright.service.app import create_app
from kernelwright.service.demo import LEFT_OUT, demonstration
from kernelwright.service.settings import Settings
from kernelwright.service.workload_args import args_of
from kernelwright.types import Workload
from tests.service.browser import Browser, missing, open_browser

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LAPTOP, PHONE = (1280, 900), (390, 844)


def recorded_workloads() -> list[Workload]:
    """A few, the last of them with more than 60 schedules to try."""
    trials = Counter(trial.workload for trial in load_recorded(recorded_path("h100")))
    few = list(trials)[:LEFT_OUT]
    return [*few, next(w for w, count in trials.items() if w not in few and count > 90 and args_of(w))]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo on a few of the recorded workloads; the last one is left to be tuned."""
    recorded, few = tmp_path_factory.mktemp("recorded"), recorded_workloads()
    trials = (trial for trial in load_recorded(recorded_path("h100")) if trial.workload in few)
    save_recorded(trials, recorded / "h100" / "matmul.parquet")
    with demonstration(Settings(recorded=recorded, event_seconds=0.1), pace=0.03) as settings:
        server = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_config=None))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """On a laptop, in light; nothing that the pages need may be missing or blocked."""
    chromium.appear(*LAPTOP)
    yield chromium
    assert chromium.problems() == []


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return Path(os.environ.get("SCREENSHOTS", tmp_path))


def picture(browser: Browser, path: Path, most: int = 1500) -> None:
    """Of the whole page, up to a height; nothing may stick out at the side."""
    width, tall = browser.run("return [innerWidth, document.documentElement.scrollHeight]")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    dark = browser.run("return matchMedia('(prefers-color-scheme: dark)').matches")
    browser.appear(width, min(tall, most), dark=dark)
    browser.screenshot(path)


def test_watch_a_job_finish_live(service: str, browser: Browser, pictures: Path) -> None:
    args = args_of(recorded_workloads()[-1])
    assert args is not None
    browser.open(f"{service}/jobs?{urlencode({**args.query(), 'hardware': 'h100'})}")
    browser.type("[name=trials]", "60")
    browser.click("form[method=post] button")
    browser.wait(lambda: "/jobs/" in browser.url, "the job's page")
    browser.run("window.same = true")
    browser.wait(lambda: 4 < int(browser.text("#done") or 0) < 60, "progress", 40)
    browser.wait(lambda: browser.text(".state") == "running", "the running state")
    browser.appear(*PHONE, dark=True)
    browser.wait(lambda: browser.count("#convergence circle") > 4, "the plot of the running search")
    picture(browser, pictures / "job-running-phone.png", 1100)
    browser.wait(lambda: browser.text(".state") == "done", "the end", 40)
    assert browser.run("return window.same")
    assert browser.text("#done") == "60"
    browser.appear(*LAPTOP)
    picture(browser, pictures / "job-done.png")
    browser.click("#live .button")
    assert "NVIDIA H100" in browser.text(".sub")
    assert browser.count("#convergence circle") >= 50


def test_find_a_winner(service: str, browser: Browser, pictures: Path) -> None:
    browser.open(f"{service}/winners?hardware=h100&order=speedup")
    assert browser.count("tbody tr") == 25
    picture(browser, pictures / "winners.png", 1000)
    browser.open(service)
    browser.type("[name=shape]", "M=8,N=4096,K=4096")
    browser.click("form[role=search] button")
    browser.wait(lambda: "/workload" in browser.url, "the answer")
    assert browser.text("h1") == "matmul M=8 N=4096 K=4096 bf16 nt"
    assert browser.text(".how") == "measured"
    assert "roofline" in browser.text(".figures")
    picture(browser, pictures / "workload.png")
    browser.appear(*PHONE, dark=True)
    picture(browser, pictures / "workload-phone.png", 2200)


def test_read_the_plots(service: str, browser: Browser, pictures: Path) -> None:
    browser.open(f"{service}/roofline?hardware=h100")
    assert browser.count("#roofline .ours circle") + browser.count("#roofline .faint circle") == 165
    browser.click("#roofline summary")
    assert browser.count("#roofline tbody tr") == 165
    assert "N=" in browser.text("#roofline tbody")
    browser.click("#roofline summary")
    picture(browser, pictures / "roofline.png", 1000)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = browser.run(ground)
    browser.appear(*PHONE, dark=True)
    assert browser.run(ground) != light
    picture(browser, pictures / "roofline-phone.png", 1000)
    browser.appear(*LAPTOP)
    browser.open(f"{service}/model")
    assert "trees" in browser.text("main")
    assert browser.count("#calibration circle") >= 5
    picture(browser, pictures / "model.png", 1200)


def test_every_page_fits_a_phone_and_names_its_fields(service: str, browser: Browser, tmp_path: Path) -> None:
    browser.appear(*PHONE)
    nameless = (
        "return [...document.querySelectorAll('input:not([type=hidden]), select')].filter(x => !x.labels.length).length"
    )
    for page in ("/", "/winners", "/jobs", "/hardware", "/model", "/api", "/login"):
        browser.open(service + page)
        picture(browser, tmp_path / "page.png")
        assert browser.run(nameless) == 0, page
        assert browser.count("h1") == 1, page
