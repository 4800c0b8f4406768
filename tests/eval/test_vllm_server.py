"""Servers that are started, killed and started again: what they leave behind, and those that are forked."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.server import OwnFolder, Process, VLLMServer

ANSWERS = """
import http.server, sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory("ragorder-test-" + str({name}), create=True, size=4096)
port = next(int(each.split("=")[1]) for each in sys.argv if each.startswith("--port="))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def shared_memory() -> Path:
    return Path(f"/dev/shm/ragorder-test-{os.getpid()}")  # noqa: S108


def launch(options: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """What answers as a server does, and has shared memory."""
    command = [sys.executable, "-c", ANSWERS.format(name=os.getpid()), *options]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


class TestWhatAServerLeaves:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[VLLMServer]:
        server = VLLMServer(tmp_path / "model", blocks=4, dtype="float32", launch=launch)
        with server:
            assert shared_memory().exists()
            yield server
        shared_memory().unlink(missing_ok=True)

    @pytest.mark.parametrize("end", ["kill", "stop"])
    def test_no_shared_memory(self, server: VLLMServer, end: str) -> None:
        getattr(server, end)()
        assert not shared_memory().exists()
        assert not server.alive

    def test_a_killed_one_starts_again_and_a_stopped_one_has_no_folder(self, server: VLLMServer) -> None:
        folder = Path(server.events_endpoint.removeprefix("ipc://")).parent
        first = server.pid
        server.kill()
        assert folder.exists()
        server.start()
        assert server.alive
        assert server.pid != first
        server.stop()
        assert not folder.exists()


class TestAnEngineThatEndsWhileItStarts:
    """Seen, rarely, with real vLLM; the cause here is made up."""

    LOG = "ValueError: a port was taken\n" + "x" * 5000 + "\nEngine core initialization failed"

    def server(self, folder: Path, failures: int) -> tuple[VLLMServer, list[int]]:
        starts: list[int] = []

        def fail_first(options: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
            starts.append(len(starts))
            if len(starts) > failures:
                return launch(options, environment, log)
            command = [sys.executable, "-c", f"print({self.LOG!r}); raise SystemExit(1)"]
            with log.open("ab") as file:
                return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

        return VLLMServer(folder / "model", blocks=4, dtype="float32", launch=fail_first), starts

    def test_is_started_once_more_which_is_logged_with_the_cause(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        server, starts = self.server(tmp_path, 1)
        with server:
            assert server.alive and starts == [0, 1]
        assert "once more" in caplog.text and "ValueError: a port was taken" in caplog.text

    def test_that_ends_again_is_an_error_with_the_cause(self, tmp_path: Path) -> None:
        server, starts = self.server(tmp_path, 9)
        folder = Path(server.events_endpoint.removeprefix("ipc://")).parent
        with pytest.raises(EngineError, match=r"did not come up: it ended with 1\nValueError: a port was taken\n"):
            server.start()
        assert starts == [0, 1] and not folder.exists()


class TestAnOwnFolder:
    @pytest.fixture(autouse=True)
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def test_the_folder_is_private_and_removed_on_request(self, tmp_path: Path) -> None:
        folder = OwnFolder("mine-")
        assert not folder.path.exists()
        for _ in range(2):
            folder.take()
            folder.take()
            assert folder.path.parent == tmp_path
            assert folder.path.stat().st_mode & 0o777 == 0o700
            folder.remove()
            assert not folder.path.exists()

    @pytest.mark.parametrize(("age_s", "goes"), [(3600, True), (0, False)])
    def test_of_a_killed_process_goes_when_another_one_is_taken(
        self, tmp_path: Path, python: Any, age_s: int, goes: bool
    ) -> None:
        script = (
            "import os, sys, tempfile\n"
            "from ragorder.eval.engines.server import OwnFolder\n"
            "folder = OwnFolder('mine-')\n"
            "folder.take()\n"
            "print(folder.path, flush=True)\n"
            "os.kill(os.getpid(), 9)\n"
        )
        abandoned = Path(python("-c", script, TMPDIR=str(tmp_path)).stdout.strip())
        for path in abandoned.iterdir():
            os.utime(path, (time.time() - age_s,) * 2)
        OwnFolder("other-").take()
        assert abandoned.exists()
        OwnFolder("mine-").take()
        assert abandoned.exists() != goes

    def test_of_a_living_owner_stays(self) -> None:
        owned = OwnFolder("mine-")
        owned.take()
        for path in owned.path.iterdir():
            os.utime(path, (0, 0))
        OwnFolder("mine-").take()
        assert owned.path.exists()
