"""Drive Chromium through its debugging pipe: open pages, run scripts in them, take pictures."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
         "--remote-debugging-pipe")  # fmt: skip
WAIT_S = 60.0


class Browser:
    """One tab. `events` has what the page reported: console messages, exceptions, blocked resources."""

    def __init__(self, read: int, write: int) -> None:
        self._read = os.fdopen(read, "rb", buffering=0)
        self._write = os.fdopen(write, "wb", buffering=0)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                self.events.append(json.dumps(answer["params"]))

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            some = self._read.read(1 << 16)
            assert some, "the browser has ended"
            self._rest += some
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the value of an expression as soon as it is true; the page may still be loading."""
        until = time.monotonic() + WAIT_S
        while not (value := self.run(f"(() => {{ try {{ return {script}; }} catch {{ return null; }} }})()")):
            assert time.monotonic() < until, f"waited for {script}; the page says: {self.text()[:3000]} {self.events}"
            time.sleep(0.05)
        return value

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def picture(self, path: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """Set an input's value as typing would."""
        element = f"document.querySelector({json.dumps(selector)})"
        fire = "".join(
            f"{element}.dispatchEvent(new Event('{name}', {{bubbles: true}}));" for name in ("input", "change")
        )
        self.run(f"{element}.value = {json.dumps(text)}; {fire}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert PATH is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True) as profile:
        command = [PATH, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command]
        process = subprocess.Popen(
            shell, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            process.kill()
            process.wait()
