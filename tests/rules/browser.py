"""A page in headless Chromium, spoken to by the DevTools protocol over two pipes."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    "",
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
    "--remote-debugging-pipe",  # commands are read from descriptor 3, answers written to 4
)
# What a page reports when its script fails or a file is missing.
_TROUBLE = {"Runtime.exceptionThrown", "Log.entryAdded"}


class Browser:
    """A browser with one page; use it as a context manager.

    Args:
        profile: an empty folder for the browser's files.
    """

    def __init__(self, profile: Path) -> None:
        command_end, self._commands = os.pipe()
        self._answers, answer_end = os.pipe()
        redirect = f'exec "$@" 3<&{command_end} 4>&{answer_end}'
        words = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "browser", *words],
            pass_fds=(command_end, answer_end),
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.trouble: list[dict[str, Any]] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait_for(self, expression: str, seconds: float = 30) -> Any:
        """Return the first value of a JavaScript expression that is true, empty lists excluded.

        Raises:
            TimeoutError: there was none in the time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.05)
        raise TimeoutError(f"{expression} stayed {value!r}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are looked through."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return dict(answer["result"])
            if answer.get("method") in _TROUBLE:
                self.trouble.append(answer["params"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._answers, 65536)
            if not block:
                raise EOFError("the browser has ended")
            self._buffer += block
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))
