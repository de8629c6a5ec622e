"""A headless Chromium, told what to do over a pipe.

Source: the Chrome DevTools protocol; ``--remote-debugging-pipe`` takes JSON that ends with a
zero byte on fd 3, and answers on fd 4.
"""

import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.support.tools import path_of

__all__ = ["Browser", "Tab", "browser"]


class Browser:
    """A running browser."""

    def __init__(self, writes: int, reads: int) -> None:
        self._writes = writes
        self._reads = reads
        self._unread = b""
        self._ids = itertools.count(1)
        # Not that of the process that was started: Debian's is a script around it.
        processes = self.call("SystemInfo.getProcessInfo")["processInfo"]
        self._pid = next(each["id"] for each in processes if each["type"] == "browser")

    def close(self) -> None:
        """An orderly end; none where it was killed."""
        with contextlib.suppress(BrokenPipeError, EOFError):
            self.call("Browser.close")

    def kill(self) -> None:
        """End the first process, and with it all the others."""
        os.kill(self._pid, signal.SIGKILL)

    def call(self, method: str, session_id: str = "", **params: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        command = {"id": next(self._ids), "method": method, "params": params}
        if session_id:
            command["sessionId"] = session_id
        os.write(self._writes, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next_message()
            if message.get("id") == command["id"]:
                assert "error" not in message, (command, message)
                result: dict[str, Any] = message["result"]
                return result

    def open_tab(self, url: str) -> "Tab":
        target_id = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target_id, flatten=True)
        tab = Tab(self, target_id, attached["sessionId"])
        tab.go_to(url)
        # A page that is not there yet has no origin to ask from.
        tab.run(
            "new Promise((resolve) => document.readyState === 'complete' ? resolve()"
            " : addEventListener('load', resolve))"
        )
        return tab

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            data = os.read(self._reads, 65536)
            if not data:
                raise EOFError("the browser ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


class Tab:
    """One page."""

    def __init__(self, browser: Browser, target_id: str, session_id: str) -> None:
        self._browser = browser
        self._target_id = target_id
        self._session_id = session_id

    def go_to(self, url: str) -> None:
        self._browser.call("Page.navigate", self._session_id, url=url)

    def run(self, script: str) -> Any:
        """The value of a script, or of its promise."""
        answer = self._browser.call(
            "Runtime.evaluate",
            self._session_id,
            expression=script,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a script's value is true, looked at with each picture that is drawn."""
        waited = (
            "new Promise((resolve) => { const look = () => "
            f"({condition}) ? resolve(true) : setTimeout(look, 10); look(); }})"
        )
        assert self.run(waited) is True

    def press(self, key: str) -> None:
        """Press and release a key that is no letter."""
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self._browser.call(
                "Input.dispatchKeyEvent",
                self._session_id,
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def resize(self, width: int, height: int) -> None:
        """Give the page so many pixels."""
        self._browser.call(
            "Emulation.setDeviceMetricsOverride",
            self._session_id,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def screenshot(self) -> str:
        """The whole page as PNG, in base64."""
        picture = self._browser.call(
            "Page.captureScreenshot", self._session_id, captureBeyondViewport=True
        )
        data: str = picture["data"]
        return data

    def accessible_names(self) -> set[str]:
        """What a screen reader has to say of the page's elements."""
        nodes = self._browser.call("Accessibility.getFullAXTree", self._session_id)["nodes"]
        return {node["name"]["value"] for node in nodes if "name" in node}

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target_id)


@contextlib.contextmanager
def browser(*options: str) -> Iterator[Browser]:
    """A browser of its own, with an empty profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        child_reads, writes = os.pipe()
        reads, child_writes = os.pipe()
        # Out of the way of 3 and 4, which they become.
        far = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (child_reads, child_writes)]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{far[0]} 4>&{far[1]}', *_command(profile), *options],
            pass_fds=far,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (child_reads, child_writes, *far):
            os.close(fd)
        try:
            running = Browser(writes, reads)
            yield running
            running.close()
        finally:
            os.close(writes)  # which ends it, too
            os.close(reads)
            process.wait(40)


def _command(profile: str) -> list[str]:
    return [
        path_of("chromium"),
        "--headless",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
