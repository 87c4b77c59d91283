"""A headless Chromium, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 60.0


class Page:
    """One page. `problems`: messages of errors on its console, exceptions, and requests that leave its origin."""

    def __init__(self, folder: Path) -> None:
        assert BROWSER is not None
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()
        script = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", BROWSER, *flags, "about:blank"],
            pass_fds=(read_commands, write_answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        self._number, self._rest, self._session, self._origin, self.problems = 0, b"", None, "file:", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def open(self, path: Path | str, ready: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> float:
        """Load a file or an address and wait until the expression `ready` holds. Returns the seconds until then."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.problems.clear()
        address = path if isinstance(path, str) else path.resolve().as_uri()
        self._origin = "/".join(address.split("/")[:3]) + "/"
        began = time.monotonic()
        self.call("Page.navigate", url=address)
        self.until(ready)
        return time.monotonic() - began

    def until(self, expression: str) -> None:
        """Wait until an expression holds."""
        began = time.monotonic()
        while not self.value(expression):
            assert time.monotonic() - began < _SECONDS, f"{expression} does not become true: {self.problems}"
            time.sleep(0.02)

    def resize(self, width: int, height: int = 900) -> None:
        """Lay the page out for a screen of this size; below 600 px it is a phone's."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self, path: Path, height: int | None = None) -> None:
        area = {
            "x": 0,
            "y": 0,
            "width": self.value("innerWidth"),
            "height": height or self.value("innerHeight"),
            "scale": 1,
        }
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=area)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._rest += part
        one, _, self._rest = self._rest.partition(b"\0")
        return json.loads(one)

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith((self._origin, "data:", "about:", "blob:")):
                self.problems.append(f"it asks for {url}")
