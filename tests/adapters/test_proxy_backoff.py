"""Replicas that refuse, fail again and again, or say nothing: backoff, and the one deadline of all tries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from prometheus_client import CollectorRegistry
from support.far_end import WHOLE, Answer, FarEnd, Request, answer_events, answer_json
from support.sent_requests import CERTIFICATES, CHAT, ROLE, TOKEN, get, plain, post, tagged
from support.waiting import eventually

from ragorder import Orderer
from ragorder.adapters.proxy import Fleet, ReplicaAddress, Timeouts, make_app
from ragorder.adapters.proxy.fleet import make_backoff, requested_backoff_s

LAST = b"data: [DONE]\n\n"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine(FarEnd):
    """Answers with `status`, and `headers`; a 0 stands for no answer, until `gate` is opened. A stream waits for the
    gate after its first token, or breaks after these `events`."""

    def __init__(self, status: int = 200, events: bytes = b"", **headers: str) -> None:
        super().__init__()
        self.status = status
        self.events = events
        self.headers = headers
        self.gate = threading.Event()

    @property
    def posts(self) -> int:
        return len(self.bodies)

    def play(self, request: Request) -> Answer:
        if request.target == "/health":
            return answer_json(b"")
        if not self.status:
            return Answer([self.gate, None])
        if self.events:
            return answer_events(self.events, None)
        if request.body and request.json.get("stream"):
            return answer_events(TOKEN, self.gate, TOKEN + LAST)
        return answer_json(WHOLE if self.status == 200 else b"its own words", self.status, **self.headers)


class Front:
    """A proxy of these engines, with a clock of its own for their backoff."""

    def __init__(self, url: str, fleet: Fleet, clock: Clock) -> None:
        self.url = url
        self.fleet = fleet
        self.clock = clock

    def post(self, body: Any = None, path: str = CHAT) -> httpx2.Response:
        return post(self.url, tagged("ab") if body is None else body, path)

    def get(self, path: str) -> httpx2.Response:
        return get(self.url + path)

    @contextmanager
    def stream(self) -> Iterator[Iterator[bytes]]:
        """The rest of an answer that has begun."""
        with (
            httpx2.Client(trust_env=False, timeout=60, verify=CERTIFICATES) as client,
            client.stream("POST", self.url + CHAT, json=tagged("ab", stream=True)) as response,
        ):
            pieces = response.iter_raw()
            assert next(pieces) == TOKEN
            yield pieces

    def state(self, name: str) -> list[Any]:
        return [each[name] for each in self.get("/ragorder/replicas").json()["replicas"]]

    def served_by(self, times: int) -> list[str]:
        return [self.post(plain(str(number))).headers["x-ragorder-replica"] for number in range(times)]


MakeFront = Callable[..., Front]


@pytest.fixture
def front(serve: Callable[[Any], str]) -> Iterator[MakeFront]:
    engines: list[Engine] = []

    def front(*far: Engine, ranks: int | None = None, **options: Any) -> Front:
        engines.extend(far)
        addresses = [
            ReplicaAddress(serve(each), Orderer(capacity_tokens=4096, block_size=16, strict=True), None) for each in far
        ]
        if ranks is not None:
            url = addresses[0].upstream
            addresses = [ReplicaAddress(url, Orderer(block_size=16, strict=True), rank) for rank in range(ranks)]
        fleet = Fleet(addresses, check_s=0.1, registry=options.pop("registry", None))
        url = serve(make_app(Orderer(strict=True), upstream=fleet, **options))
        clock = Clock()
        for replica in fleet.replicas:
            replica.backoff = make_backoff(clock)
        return Front(url, fleet, clock)

    yield front
    for engine in engines:
        engine.gate.set()


class TestWhatIsAsked:
    @pytest.mark.parametrize(
        ("status", "retry_after", "seconds"),
        [
            (429, "7", 7),
            (503, " 0 ", 0),
            (429, "9" * 400, float("inf")),
            (429, "", None),
            (429, "soon", None),
            (429, "-3", None),
            (429, "1.5", None),
            (429, "Mon, 99 Jan 2024 00:00:00 GMT", None),
            (429, "Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
            (429, "Mon, 01 Jan 2024 00:00:00 GMT", 0),
            (500, "7", None),
            (200, "7", None),
            (502, "7", None),
        ],
        ids=repr,
    )
    def test_is_read(self, status: int, retry_after: str, seconds: float | None) -> None:
        assert requested_backoff_s(status, retry_after) == seconds

    @pytest.mark.parametrize("zone", ["GMT", "-0000", "+0000"])
    def test_may_be_a_date(self, zone: str) -> None:
        until = format_datetime(datetime.now(UTC) + timedelta(hours=1)).replace("+0000", zone)
        found = requested_backoff_s(429, until)
        assert found is not None and 3000 < found <= 3600


class TestAReplicaThatAsksForARest:
    @pytest.mark.parametrize("status", [429, 503])
    def test_gets_it_while_the_others_take_its_requests(self, front: MakeFront, status: int) -> None:
        full, other = Engine(status, retry_after="30"), Engine()
        registry = CollectorRegistry()
        fleet = front(full, other, registry=registry)
        answers = [fleet.post(tagged("ab", query=str(number))) for number in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-ragorder-replica"] for answer in answers} == {"1"}
        assert (full.posts, other.posts) == (1, 6)
        rests = [registry.get_sample_value("ragorder_replica_rest_seconds", {"replica": name}) for name in "01"]
        assert fleet.state("rests_s") == rests == [30, 0]
        # It said when to come back: it has not failed.
        assert fleet.state("up") == [True, True]
        full.status = 200
        fleet.clock.now += 30
        # It has computed less.
        assert set(fleet.served_by(3)) == {"0"}

    def test_gets_ten_minutes_at_most_and_an_answer_does_not_shorten_them(self, front: MakeFront) -> None:
        full = Engine(429, retry_after="86400")
        fleet = front(full, Engine())
        fleet.post()
        fleet.post({}, "/ragorder/replicas/1/drain")
        full.headers = {"retry_after": "3"}
        fleet.post()
        full.status = 200
        assert fleet.post().headers["x-ragorder-replica"] == "0"
        assert fleet.state("rests_s")[0] == 600

    @pytest.mark.parametrize("status", [429, 503])
    def test_of_all_replicas_the_refusal_goes_to_the_client(self, front: MakeFront, status: int) -> None:
        engines = [Engine(status, retry_after="30"), Engine(status, retry_after="20")]
        fleet = front(*engines)
        answer = fleet.post()
        assert (answer.status_code, answer.text) == (status, "its own words")
        assert answer.headers["retry-after"] in ("20", "30")
        assert [engine.posts for engine in engines] == [1, 1]
        # From now on one replica is asked, the one that backs off for the shortest time.
        assert fleet.post().headers["retry-after"] == "20"
        assert [engine.posts for engine in engines] == [1, 2]
        engines[1].status = 200
        assert fleet.post().status_code == 200

    def test_ranks_of_one_server_rest_together(self, front: MakeFront) -> None:
        engine = Engine(429, retry_after="30")
        fleet = front(engine, ranks=3)
        assert fleet.post().status_code == 429
        assert (engine.posts, fleet.state("rests_s")) == (1, [30, 30, 30])

    def test_without_a_time_the_refusal_is_the_clients(self, front: MakeFront) -> None:
        """A limit of one client's, perhaps, which no other replica lifts."""
        engines = [Engine(429), Engine(429)]
        fleet = front(*engines)
        assert fleet.post().status_code == 429
        assert sum(engine.posts for engine in engines) == 1
        assert fleet.state("rests_s") == [0, 0]

    def test_what_is_not_sent_again_is_answered_by_it(self, front: MakeFront) -> None:
        engines = [Engine(429, retry_after="30"), Engine(429, retry_after="30")]
        fleet = front(*engines)
        answer = fleet.post({"input": "a"}, "/tokenize")
        assert (answer.status_code, answer.text) == (429, "its own words")
        assert sum(engine.posts for engine in engines) == 1


class TestAReplicaThatFailsAgainAndAgain:
    def test_is_left_out_and_then_tried_by_one_request(self, front: MakeFront) -> None:
        broken, other = Engine(500), Engine()
        fleet = front(broken, other)
        answers = [fleet.post(plain(str(number))) for number in range(16)]
        # An error of the server's may be the request's: it is answered as it is, and not sent elsewhere.
        assert [answer.status_code for answer in answers].count(500) == broken.posts == 5
        assert set(fleet.served_by(6)) == {"1"}
        fleet.clock.now += 1
        assert fleet.served_by(6).count("0") == 1
        assert broken.posts == 6
        assert fleet.state("rests_s") == [2, 0]
        fleet.clock.now += 1.5
        assert set(fleet.served_by(4)) == {"1"}
        broken.status = 200
        fleet.clock.now += 0.5
        # It has computed less.
        assert set(fleet.served_by(4)) == {"0"}

    @pytest.mark.parametrize("events", [ROLE, TOKEN], ids=["before its first token", "after it"])
    def test_is_left_out_if_it_breaks_its_answers(self, front: MakeFront, events: bytes) -> None:
        """Whatever its status promised."""
        broken, other = Engine(events=events), Engine()
        fleet = front(broken, other)
        for number in range(16):
            with suppress(httpx2.RemoteProtocolError):
                fleet.post(plain(str(number)))
            # Its health check is good.
            assert eventually(lambda: all(fleet.state("up")))
        assert broken.posts == 5
        assert fleet.state("rests_s") == [1, 0]

    def test_is_left_out_although_an_earlier_answer_ends_well(self, front: MakeFront) -> None:
        engine = Engine()
        fleet = front(engine)
        with fleet.stream() as pieces:
            engine.status = 500
            for number in range(5):
                fleet.post(plain(str(number)))
            engine.gate.set()
            assert b"".join(pieces) == TOKEN + LAST
        assert eventually(lambda: fleet.state("in_flight") == [0])
        assert fleet.state("rests_s") == [1]

    def test_has_not_failed_if_a_client_leaves_its_answer(self, front: MakeFront) -> None:
        engine = Engine()
        fleet = front(engine)
        for _ in range(2):
            engine.status = 500
            for number in range(4):
                fleet.post(plain(str(number)))
            with fleet.stream():
                pass
            assert eventually(lambda: fleet.state("in_flight") == [0])
        assert fleet.state("rests_s") == [0]

    def test_is_asked_if_all_fail(self, front: MakeFront) -> None:
        engines = [Engine(500), Engine(500)]
        fleet = front(*engines)
        assert {fleet.post(plain(str(number))).status_code for number in range(14)} == {500}
        assert sum(engine.posts for engine in engines) == 14

    def test_answers_about_models_do_not_count(self, front: MakeFront) -> None:
        broken, other = Engine(500), Engine()
        fleet = front(broken, other)
        for number in range(16):
            fleet.post(plain(str(number)))
            broken.status = 200
            fleet.get("/v1/models")
            fleet.get("/v1/models")
            broken.status = 500
        assert broken.posts == 5

    def test_a_request_that_cannot_be_served_does_not_count(self, front: MakeFront) -> None:
        engines = [Engine(400), Engine()]
        fleet = front(*engines)
        for number in range(20):
            fleet.post(plain(str(number)))
        assert engines[0].posts == 10


class TestTheDeadline:
    def test_is_one_for_all_tries(self, front: MakeFront) -> None:
        """Each of them may be silent for 0.4 s: without it the answer would be the last one's time limit."""
        engines = [Engine(0), Engine(0), Engine(0)]
        fleet = front(*engines, timeouts=Timeouts(read_s=0.4, tries_s=1.0))
        answer = fleet.post()
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (504, "upstream_timeout")
        assert "within 1 s (--tries-timeout)" in error["message"] and "of 3 were tried" in error["message"]
        assert fleet.state("in_flight") == [0, 0, 0]
        answer = fleet.get("/v1/models")
        assert answer.status_code == 504 and "--tries-timeout" in answer.text

    def test_leaves_time_for_another_replica(self, front: MakeFront) -> None:
        engines = [Engine(0), Engine()]
        fleet = front(*engines, timeouts=Timeouts(read_s=1, tries_s=60))
        answer = fleet.post()
        assert (answer.status_code, answer.headers["x-ragorder-replica"]) == (200, "1")
        assert engines[0].posts == 1

    def test_does_not_end_an_answer_that_has_begun(self, front: MakeFront) -> None:
        talking, silent = Engine(), Engine(0)
        fleet = front(talking, silent, timeouts=Timeouts(tries_s=0.5))
        fleet.post({}, "/ragorder/replicas/1/drain")
        with fleet.stream() as pieces:
            fleet.post({}, "/ragorder/replicas/1/resume")
            fleet.post({}, "/ragorder/replicas/0/drain")
            # Sent later: when its time is over, so would be that of the stream.
            assert fleet.post().status_code == 504
            talking.gate.set()
            assert b"".join(pieces) == TOKEN + LAST
