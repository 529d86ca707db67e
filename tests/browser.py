"""A real browser for tests of a page: Chromium without a window, driven over its debugging pipe.

Widths below 500 px, dark mode, console and requests need the protocol: its command line offers none of them.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    """Path of the first browser that is installed; None without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser, as a context manager. problems: errors of console and page; requests: URLs asked for."""

    def __init__(self, program: str, profile: Path, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        self._number = 0
        self._buffer = b""
        ours, its_output = os.pipe()
        its_input, to_it = os.pipe()
        self._from, self._to = ours, to_it

        def wire() -> None:  # the protocol is on file descriptors 3 and 4, which may be taken here
            copies = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (its_input, its_output)]
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        arguments = [program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(arguments, close_fds=False, preexec_fn=wire, **quiet)
        os.close(its_input)
        os.close(its_output)
        self._session = ""

    def __enter__(self) -> Browser:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        os.close(self._to)

    def open(self, url: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size; returns when it has loaded. Clears problems and requests."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.evaluate("1")
        self.problems.clear()
        self.requests.clear()
        self.loaded = False
        self.call("Page.navigate", url=url)
        end = time.monotonic() + self.timeout
        while not self.loaded:
            self._handle(self._receive(end))

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        end = time.monotonic() + self.timeout
        while (answer := self._receive(end)).get("id") != self._number:
            self._handle(answer)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"the browser does not answer within {self.timeout:g} s")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _handle(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"]))
