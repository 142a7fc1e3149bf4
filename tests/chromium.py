"""A real Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import websocket

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-port=0",
)  # fmt: skip
PATIENCE = 300.0  # seconds


class Chromium:
    """A browser with one page. It records what the page requests and writes to the console."""

    def __init__(self, path: str) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [path, *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **quiet)
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.numbers = itertools.count(1)
        written = Path(self.folder.name) / "DevToolsActivePort"
        self.until(lambda: written.exists() and written.read_text().count("\n") == 1)
        port = written.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=PATIENCE) as reply:
            (target,) = [one for one in json.load(reply) if one["type"] == "page"]
        self.socket = websocket.create_connection(
            target["webSocketDebuggerUrl"], timeout=PATIENCE, suppress_origin=True
        )
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.folder.cleanup()

    def until(self, holds: Any) -> None:
        """Wait until `holds()` is true."""
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, "nothing happened"
            assert self.process.poll() is None, "the browser has ended"
            time.sleep(0.05)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": arguments}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(about))

    def js(self, code: str) -> Any:
        """The value of an expression in the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=code, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        self.until(lambda: self.js(f"Boolean({condition})"))

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.requests.clear()
        self.messages.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({url!r})")

    def press(self, key: str, times: int = 1) -> None:
        known = {" ": 32, "Enter": 13, "Tab": 9, "End": 35, "Home": 36}
        known |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        code = {" ": "Space"}.get(key, key)
        about: dict[str, Any] = {"key": key, "code": code, "windowsVirtualKeyCode": known[key]}
        typed = {"text": {" ": " ", "Enter": "\r"}[key]} if key in (" ", "Enter") else {}
        for _ in range(times):
            self.call("Input.dispatchKeyEvent", type="keyDown", **about, **typed)
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def drag(self, *places: tuple[float, float]) -> None:
        """Press the mouse at the first place of the window, move it to the others, release it."""
        left = {"button": "left", "clickCount": 1}
        kinds = ("mousePressed", *["mouseMoved"] * (len(places) - 1))
        for kind, (x, y) in zip(kinds, places, strict=True):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=1, **left)
        x, y = places[-1]
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, **left)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
