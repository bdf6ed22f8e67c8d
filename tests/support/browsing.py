"""Debian's Chromium without a window, driven over two pipes by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium; try `apt-get install chromium`"
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--no-proxy-server", "--mute-audio", "--remote-debugging-pipe"),
)
WAIT_S = 60
# The browser reads commands from file 3 and writes answers to file 4.
START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(name), fcntl.F_DUPFD, 5) for name in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A running browser with one page, and everything that went wrong in that page.

    Attributes:
        problems: Uncaught exceptions, ``console.error``, and violations of the page's policy.
    """

    def __init__(self, commands, answers):
        self._commands, self._answers = commands, answers
        self._ids = itertools.count(1)
        self._received = b""
        self._session = None
        self.problems = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Send a command and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _receive(self):
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._received:
            left_s = deadline - time.monotonic()
            assert select.select([self._answers], [], [], max(0.0, left_s))[0], "no answer"
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser ended"
            self._received += piece
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(params["args"])
        elif event.get("method") == "Log.entryAdded":
            entry = params["entry"]
            if entry["level"] == "error" and entry["source"] != "network":  # as refused requests
                self.problems.append(entry)

    def open(self, address, width=1100, height=900):
        """Load a page in a window of this size, in pixels."""
        self.resize(width, height)
        self.send("Page.navigate", url=address)
        self.wait_for("location.href != 'about:blank' && document.readyState == 'complete'")

    def resize(self, width, height=900):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression):
        """Return the value of JavaScript, as JSON types."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression):
        """Wait until JavaScript is true, and return its value."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < deadline, (expression, self.text(), self.problems)
            time.sleep(0.05)
        return found

    def text(self):
        """Return the text that a reader sees."""
        return self.evaluate("document.body.innerText")

    def type(self, text):
        """Type text, with the keyboard, where the focus is."""
        self.send("Input.insertText", text=text)

    def press(self, key):
        """Press and release a key such as "Enter"."""
        code = {"Enter": 13, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def picture(self):
        """Return the whole page as a PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])


@contextlib.contextmanager
def browsing(folder):
    """Start a browser whose profile is in ``folder``, and end it after the block."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    program = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}/profile"]
    command = [sys.executable, "-c", START, str(command_read), str(answer_write), *program]
    with (
        (folder / "browser.log").open("wb") as log,
        subprocess.Popen(
            command,
            pass_fds=(command_read, answer_write),
            env=os.environ | {"HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        os.close(command_read)
        os.close(answer_write)
        try:
            browser = Browser(command_write, answer_read)
            yield browser
            browser._session = None
            browser.send("Browser.close")
            process.wait(WAIT_S)
        finally:
            os.close(command_write)
            os.close(answer_read)
            if process.poll() is None:
                os.killpg(process.pid, 9)
