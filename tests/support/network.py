"""Connections of tests: to this machine only."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def local_connections_only(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            raise AssertionError(f"a connection to another machine: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
