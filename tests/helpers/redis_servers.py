"""Real Redis servers for tests: started, stopped and killed by them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

IS_REQUIRED = os.environ.get("ZERORESIZE_REQUIRE_REDIS") == "1"


def server_program() -> str:
    """The path of redis-server, beside this Python or on the path; the test is skipped where there is none."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which("redis-server", path=places)
    if program is None and IS_REQUIRED:
        pytest.fail("ZERORESIZE_REQUIRE_REDIS=1, but there is no redis-server (make setup)")
    if program is None:
        pytest.skip("there is no redis-server")
    return program


class RedisServer:
    """A server that keeps everything in memory, on a socket in ``folder`` or on a free port."""

    def __init__(self, folder: Path, *, on_port: bool = False, password: str | None = None) -> None:
        self._log = folder / "redis.log"
        if on_port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            place, self.url = ["--port", str(port), "--bind", "127.0.0.1"], f"redis://127.0.0.1:{port}/0"
        else:
            place, self.url = ["--port", "0", "--unixsocket", f"{folder}/redis.sock"], f"unix://{folder}/redis.sock"
        options = [*place, "--save", "", "--appendonly", "no", "--dir", str(folder)]
        options += ["--requirepass", password] if password else []
        self._process = subprocess.Popen([server_program(), *options], stdout=self._log.open("w"))
        deadline = time.monotonic() + 10.0
        while "Ready to accept connections" not in self._text() and "ready to accept connections" not in self._text():
            assert self._process.poll() is None and time.monotonic() < deadline, self._text()
            time.sleep(0.005)

    def _text(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        """The process stands still until :meth:`go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
