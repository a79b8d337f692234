"""A headless Chromium that tests drive: its DevTools protocol over a pair of pipes, as messages that end in a NUL."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_LIMIT_S = 60.0
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which a container does not let it have; it opens our own page alone
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
)


class Browser:
    """One page of a browser.

    Args:
        folder: folder of its profile, and of what it downloads.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True)
        to_browser, self._sends = os.pipe()
        self._receives, from_browser = os.pipe()
        # Out of the way of 3 and 4, from which the browser reads and to which it writes.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]

        def move() -> None:
            for end, number in zip(ends, (3, 4), strict=True):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder / 'profile'}"],
            pass_fds=(3, 4),
            preexec_fn=move,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*ends, to_browser, from_browser):
            os.close(end)
        self._numbers = itertools.count(1)
        self._read = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._sends)
        os.close(self._receives)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Result of a command of the protocol."""
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        said = {"id": number, "method": method, "params": parameters, **session}
        os.write(self._sends, json.dumps(said).encode() + b"\0")
        until = time.monotonic() + _LIMIT_S
        while True:
            message = self._next(until)
            if message.get("id") == number:
                assert "error" not in message, (method, message)
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            readable, _, _ = select.select([self._receives], [], [], max(0.0, until - time.monotonic()))
            assert readable, "the browser says nothing"
            self._read += os.read(self._receives, 1 << 20)
        first, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def open(self, page: Path, width: int) -> None:
        """Load a page from its file into a window of a width in pixels."""
        self.resize(width)
        self.load(page)

    def load(self, page: Path) -> None:
        """Load a page from its file, whose script may be switched off."""
        loaded = sum(event["method"] == "Page.loadEventFired" for event in self.events)
        self.call("Page.navigate", url=page.as_uri())
        until = time.monotonic() + _LIMIT_S
        while sum(event["method"] == "Page.loadEventFired" for event in self.events) == loaded:
            self.events.append(self._next(until))

    def resize(self, width: int) -> None:
        """Give the window another width in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def value_of(self, expression: str) -> Any:
        """Value of an expression of JavaScript in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + _LIMIT_S
        while not self.value_of(expression):
            assert time.monotonic() < until, expression
            time.sleep(0.02)

    def point_of(self, element: str) -> tuple[float, float]:
        """Middle of an element, which is scrolled into view."""
        return tuple(
            self.value_of(
                f"(() => {{ const element = {element}; element.scrollIntoView({{block: 'center'}});"
                "const box = element.getBoundingClientRect();"
                "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
            )
        )

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, element: str) -> None:
        """Click on the middle of an element, given as JavaScript."""
        x, y = self.point_of(element)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, text: str = "") -> None:
        """Press a key."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def write(self, text: str) -> None:
        """Write into what has the focus."""
        self.call("Input.insertText", text=text)

    def downloaded(self, ending: str) -> Path:
        """File of that ending, once it has been downloaded whole."""
        until = time.monotonic() + _LIMIT_S
        while True:
            whole = [path for path in self.downloads.iterdir() if path.name.endswith(ending)]
            if whole:
                return whole[0]
            assert time.monotonic() < until, [*self.downloads.iterdir()]
            self.value_of("0")
            time.sleep(0.02)

    def picture(self, *, whole: bool = True) -> bytes:
        """Picture of the page as PNG."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])
