"""A real browser for tests of pages: headless Chromium, driven over its DevTools pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)

# The pipe is file 3 for commands and file 4 for answers, which a child process has to arrange.
START = """
import fcntl, os, sys
given = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
for number, file in zip((3, 4), given):
    os.dup2(file, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def program() -> str | None:
    """The browser's path, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page, and what the browser said about it."""

    def __init__(self, to: int, answers: int):
        self._to, self._from = to, answers
        self._read = b""
        self._number, self._session = 0, None
        self.errors: list[str] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def open(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Loads a file and waits until its script has drawn it; fails on any error it reports."""
        if self._session is None:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Runtime", "Log", "Page", "Network"):
                self.send(f"{domain}.enable")
        self.errors.clear()
        self.resize(width, height)
        self.send("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + 30
        ready = "document.readyState == 'complete' && document.body.dataset.drawn"
        while not self.run(ready):
            assert time.monotonic() < end, f"the page was not drawn: {self.errors}"
            assert not self.errors, self.errors
            time.sleep(0.05)
        assert not self.errors, self.errors

    def resize(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def point(self, selector: str, number: int = 0) -> None:
        """Moves the pointer to the middle of the element of that number."""
        script = f"""(() => {{
            const node = document.querySelectorAll({json.dumps(selector)})[{number}];
            node.scrollIntoView({{block: "center"}});
            const box = node.getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2];
        }})()"""
        x, y = self.run(script)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """A key on the focused element, such as ArrowRight."""
        code = {"ArrowRight": 39, "ArrowLeft": 37}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._from], [], [], 30)[0], "the browser does not answer"
            new = os.read(self._from, 1 << 20)
            assert new, "the browser has ended"
            self._read += new
        answer, _, self._read = self._read.partition(b"\0")
        return json.loads(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    self.errors.append(f"asks the network for {url}")


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A running browser with one tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        commands, to = os.pipe()
        answers, back = os.pipe()
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", START, str(commands), str(back)),
                *(program(), *FLAGS, f"--user-data-dir={folder}"),
            ],
            pass_fds=(commands, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(back)
        tab = Tab(to, answers)
        try:
            yield tab
        finally:
            with contextlib.suppress(AssertionError, OSError):
                tab._session = None
                tab.send("Browser.close")
            os.close(to)
            os.close(answers)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
