"""`ragorder serve --workers N`: processes that serve on one port, in real processes that are killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from click.testing import CliRunner
from support.far_end import Answer, FarEnd, Request, answer_events, answer_json
from support.redis_server import SERVER, RedisServer
from support.sent_requests import TOKEN, get, plain, post, tagged
from support.serve_process import SERVE, ServeProcess, launching
from support.waiting import eventually

from ragorder.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="--workers requires Linux")

COMMAND = (*SERVE, "--port", "0")
ROUTE_COMMAND = (*SERVE[:-1], "route", "--port", "0")
SIZES = ("--capacity-tokens", "16384", "--block-size", "16")
ROUTE = ("--topic-secret", "s", "--workers", "2")
WHOLE = b'{"choices": [{"message": {"content": "yes"}}], "usage": {"prompt_tokens": 90, "completion_tokens": 1}}'


class Engine(FarEnd):
    """Answers at once; a stream goes on after its first event when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def play(self, request: Request) -> Answer:
        if request.method == "GET":
            return answer_json(b"", 200 if request.target == "/health" else 404)
        if not request.json.get("stream"):
            return answer_json(WHOLE)
        return answer_events(TOKEN, self.gate, b"data: [DONE]\n\n")


class Workers(ServeProcess):
    @property
    def pids(self) -> list[int]:
        """Of those that run."""
        supervisor = self.popen.pid
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text("utf-8").split()
        return [int(pid) for pid in children]

    def post(self, body: Any) -> httpx2.Response:
        """On a connection of its own, so to any of the workers."""
        return post(self.url, body)

    def get(self, path: str) -> httpx2.Response:
        return get(self.url + path)

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found, name
        return sum(map(float, found))


Launch = Callable[..., Workers]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def upstream(engine: Engine, serve: Callable[[Any], str]) -> str:
    return serve(engine)


@pytest.fixture
def launch(upstream: str) -> Iterator[Launch]:
    with launching(Workers, *ROUTE_COMMAND, "--upstream", upstream, PYTHONPATH="") as launch:
        yield launch


@pytest.fixture
def launch_serve(upstream: str) -> Iterator[Launch]:
    with launching(Workers, *COMMAND, "--upstream", upstream, PYTHONPATH="") as launch:
        yield launch


class TestWorkers:
    def test_agree_on_topics_and_their_metrics_add_up(self, launch: Launch, engine: Engine) -> None:
        process = launch(*ROUTE)
        assert len(process.pids) == 2
        for _ in range(12):
            assert process.post(tagged("abc")).content == WHOLE
        topics = {tuple(each.header("x-session-id")) for each in engine.requests if each.method == "POST"}
        assert len(topics) == 1 and topics != {()}
        for _ in range(20):
            assert process.post(plain()).status_code == 200
        # Whichever of them is asked.
        for _ in range(6):
            assert process.metric("ragorder_passed_requests_total") == 20
            assert process.get("/ragorder/stats").json()["passed"] == {"no_documents": 20}
        for path in ("/ragorder/health", "/ragorder/ready", "/ragorder"):
            assert process.get(path).status_code == 200
        assert process.metric("process_resident_memory_bytes") > 2 * 20e6
        assert process.metric("process_cpu_seconds_total") > 0
        assert process.stop() == ""
        assert process.popen.returncode == 0

    @pytest.mark.slow
    def test_one_that_is_killed_is_replaced_and_its_counts_stay(self, launch: Launch) -> None:
        process = launch(*ROUTE)
        for _ in range(12):
            process.post(plain())
        before = process.pids
        os.kill(before[0], signal.SIGKILL)
        # None is refused: what the dead one would have got waits for its successor.
        for _ in range(12):
            assert process.post(plain()).status_code == 200
        assert eventually(lambda: len(process.pids) == 2 and before[0] not in process.pids)
        assert process.metric("ragorder_passed_requests_total") == 24
        # Memory is that of those that run.
        assert process.metric("process_resident_memory_bytes") < 4 * 200e6
        said = process.stop()
        assert "a worker has died by SIGKILL: another one takes its place" in said
        assert said.count("\n") == 1

    @pytest.mark.slow
    def test_that_die_again_and_again_end_all_with_an_error(self, launch: Launch) -> None:
        process = launch(*ROUTE)

        def kill_one() -> bool:
            pids = process.pids
            if len(pids) == 2:
                # One that was killed before may be gone by now.
                with suppress(ProcessLookupError):
                    os.kill(pids[0], signal.SIGKILL)
            return process.popen.poll() is not None

        assert eventually(kill_one)
        said = process.popen.communicate(timeout=60)[1]
        assert "Error: --workers: 5 workers have died within 60 s, the last one by SIGKILL" in said
        assert process.popen.returncode == 1
        assert process.refuses()

    @pytest.mark.slow
    def test_that_cannot_start_end_all_with_an_error(self, upstream: str) -> None:
        """The URL of the log is read in the workers."""
        options = ("--upstream", upstream, *SIZES, "--workers", "2", "--shared-orders", "nowhere")
        with pytest.raises(AssertionError) as caught, launching(Workers, *COMMAND, PYTHONPATH="") as launch:
            launch(*options)
        said = str(caught.value)
        assert said.count("--shared-orders: not a URL") == 1
        assert "Error: --workers: a worker ended before it served" in said

    @pytest.mark.slow
    @pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_end_their_streams_before_they_stop(self, signum: signal.Signals, launch: Launch, engine: Engine) -> None:
        process = launch(*ROUTE)
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(process.post, plain(stream=True)) for _ in range(8)]
            assert eventually(lambda: len(engine.bodies) == 8)
            process.popen.send_signal(signum)
            assert eventually(process.refuses)
            engine.gate.set()
            assert [each.result().content.count(b"data:") for each in answers] == [2] * 8
        assert process.popen.communicate(timeout=60)[1] == ""
        assert process.popen.returncode == 0

    @pytest.mark.slow
    def test_end_without_their_supervisor(self, launch: Launch) -> None:
        process = launch(*ROUTE)
        process.popen.kill()
        assert eventually(process.refuses)

    @pytest.mark.slow
    def test_do_not_share_a_port_with_others(self, launch: Launch, upstream: str) -> None:
        process = launch(*ROUTE)
        port = process.url.rpartition(":")[2]
        result = CliRunner().invoke(main, ["route", "--upstream", upstream, *ROUTE, "--port", port])
        assert result.exit_code == 1
        assert "Address already in use" in result.output

    @pytest.mark.slow
    @pytest.mark.skipif(SERVER is None, reason="needs valkey-server or redis-server: make installs it")
    def test_know_each_others_orders_by_the_log(self, launch_serve: Launch, tmp_path: Path) -> None:
        pytest.importorskip("redis")
        server = RedisServer(tmp_path)
        server.start()
        try:
            process = launch_serve(*SIZES, "--workers", "2", "--shared-orders", server.url)
            process.post(tagged("abc"))

            def predicted() -> int:
                return int(process.post(tagged("cba")).headers["x-ragorder-predicted-cached-tokens"])

            assert eventually(lambda: all(predicted() > 300 for _ in range(8)))
            count = process.get("/ragorder/stats").json()["served"]
            assert count == process.metric("ragorder_documents_total") / 3 == server.length()
            assert eventually(lambda: process.metric("ragorder_tree_nodes") >= 3)
        finally:
            server.client.close()
            server.kill()
