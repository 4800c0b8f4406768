"""A real Valkey or Redis server in a process that can be killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from support.waiting import eventually

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
STREAM = "ragorder:orders"


class RedisServer:
    """It can be killed, and come back on its port, empty."""

    def __init__(self, folder: Path) -> None:
        import redis

        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._errors: Any = redis.RedisError
        self.client: Any = redis.Redis.from_url(self.url)
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert SERVER is not None
        options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "dir": str(self._folder)}
        command = [SERVER, *(word for name, value in options.items() for word in (f"--{name}", value))]
        self._popen = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        assert eventually(self._answers)

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait(60)

    def length(self, stream: str = STREAM) -> int:
        return int(self.client.xlen(stream))

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except self._errors:
            return False
