"""Chromium by the WebDriver protocol, in a few lines: Debian's chromium and chromium-driver, no package of ours."""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip


def missing() -> str | None:
    """What has to be installed for the browser tests; None when all is there."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found; on Debian: apt install chromium chromium-driver" if lacking else None


class Browser:
    """One browser window. Elements are named by CSS selectors."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver = driver
        self._session = session

    def open(self, url: str) -> None:
        """Go to an address and wait until it is loaded."""
        self._post("url", {"url": url})

    @property
    def url(self) -> str:
        """Where it is."""
        return str(self._get("url"))

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's `return`."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The visible text of the first such element."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        """How many there are."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def type(self, selector: str, text: str) -> None:
        """Replace what stands in a field."""
        self._post(f"element/{self._find(selector)}/clear", {})
        self._post(f"element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Click the first such element."""
        self._post(f"element/{self._find(selector)}/click", {})

    def wait(self, ready: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
        """Wait until it is so; AssertionError says what did not come."""
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, f"{what} did not come in {seconds} s; the page says:\n{self.text('main')}"
            time.sleep(0.05)

    def appear(self, width: int, height: int, *, dark: bool = False) -> None:
        """Take on the size of a screen, a phone below 600 pixels, and light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._cdp("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", {"features": [scheme]})

    def screenshot(self, path: Path) -> None:
        """Write the window as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._get("screenshot")))

    def problems(self) -> list[str]:
        """Errors that the browser noted since this was last called, such as blocked or missing files."""
        noted = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in noted if entry["level"] == "SEVERE"]

    def _cdp(self, command: str, parameters: dict[str, Any]) -> None:
        self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def _find(self, selector: str) -> str:
        found = self._post("element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def _get(self, command: str) -> Any:
        return _value(self._driver.get(f"/session/{self._session}/{command}"))

    def _post(self, command: str, body: dict[str, Any]) -> Any:
        return _value(self._driver.post(f"/session/{self._session}/{command}", json=body))


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser of its own with an empty profile."""
    process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        started = (re.search(r"successfully on port (\d+)", line) for line in process.stdout)
        port = next(match for match in started if match)[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as driver:
            options = {"args": list(ARGUMENTS), "binary": shutil.which("chromium")}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = _value(driver.post("/session", json={"capabilities": {"alwaysMatch": wanted}}))["sessionId"]
            yield Browser(driver, session)
            driver.delete(f"/session/{session}")
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _value(answer: httpx.Response) -> Any:
    value = answer.json()["value"]
    assert answer.status_code == 200, f"{value['error']}: {value['message']}"
    return value
