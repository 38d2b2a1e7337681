"""A headless Chromium, driven by its DevTools protocol: it opens pages, runs scripts in them, presses keys, takes
pictures, and tells what the page asked for and which errors it had."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers import GENEROUS_S, until

CHROMIUM = os.environ.get("ASYNCRL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
POLL_S = 0.05
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One tab. `errors` are uncaught errors and what the console was told of errors; `requests` are addresses."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        """Take answers and events until the socket closes."""
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(each.get("description", each.get("value"))) for each in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol. Fails where the browser refuses it."""
        self._last += 1
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._last, "method": method, "params": params})
        event = await asyncio.wait_for(answer, GENEROUS_S)
        assert "error" not in event, event
        return dict(event["result"])

    async def open(self, url: str) -> None:
        """Go to an address."""
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; of a promise, what it gives."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until the expression is true, and give its value."""
        deadline = asyncio.get_running_loop().time() + GENEROUS_S
        while not (found := await self.run(script)):
            shown = "document.body.innerText.slice(0, 2000)"
            assert asyncio.get_running_loop().time() < deadline, (script, self.errors, await self.run(shown))
            await asyncio.sleep(POLL_S)
        return found

    async def press(self, key: str) -> None:
        """Press and release a key, by its name or its character."""
        code = KEYS.get(key, 0)
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    async def click(self, x: float, y: float) -> None:
        """Move the mouse there, and click."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def resize(self, width: int, height: int = 900, mobile: bool = False) -> None:
        """The size of the window, in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path) -> None:
        """A PNG of what the window shows."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A browser without a history, as long as the block lasts."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(_command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await asyncio.to_thread(until, lambda: _port(Path(folder)))
            async with aiohttp.ClientSession() as session:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    address = (await answer.json())["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    found = Browser(socket)
                    listening = asyncio.create_task(found.listen())
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await found.call(f"{domain}.enable")
                    yield found
            await listening
        finally:
            process.kill()
            process.wait()


def _command(folder: str) -> Sequence[str]:
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    window = ["--headless", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    # Within a container, as in CI, Chromium has no sandbox of its own as root, and a small /dev/shm.
    contained = ["--no-sandbox", "--disable-dev-shm-usage"]
    return [str(CHROMIUM), *window, *contained, *quiet, "--remote-debugging-port=0", f"--user-data-dir={folder}"]


def _port(folder: Path) -> str | None:
    file = folder / "DevToolsActivePort"
    return file.read_text().splitlines()[0] if file.exists() and file.read_text() else None


def browse(url: str, visit: Callable[[Browser], Any]) -> Any:
    """Open the address in a browser, and return the result of `visit`, a coroutine function that gets the browser.

    Fails on an error in the page and on a request to another host.
    """

    async def act() -> Any:
        async with browser() as found:
            await found.open(url)
            result = await visit(found)
            assert found.errors == []
            assert list(_foreign(found.requests, url)) == []
            return result

    return asyncio.run(act())


def _foreign(requests: Sequence[str], url: str) -> Iterator[str]:
    origin = url[: url.index("/", 8)]
    yield from (each for each in requests if not each.startswith((f"{origin}/", "about:", "data:", "blob:")))
