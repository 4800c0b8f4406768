"""Ray Serve with engines of its own: where requests go, what they find cached, and what becomes of them when a replica
is killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("aiohttp")

import httpx2
from support.ray_engines import FakeReplica, NeverEnding, ReplicaProcess, deploying, replicas_in
from support.sent_requests import CERTIFICATES, CHAT, get, post
from support.streamed_answer import StreamedAnswer, stream
from support.waiting import eventually

from ragorder.adapters.http_server.app_transport import AppTransport
from ragorder.adapters.ray import EmbeddedEngine, make_application
from ragorder.adapters.ray.replica import Lifespan
from ragorder.kernels.engine_settings import EngineSettings

pytestmark = pytest.mark.slow

TEXTS = {f"d{number}": f"document {number} is about {number * 7919 % 1000}. " * 48 for number in range(60)}
SETS = [[f"d{3 * number + place}" for place in range(3)] for number in range(20)]
CAPACITY = 16_384
# Two cores hold all of them.
SMALL = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.05}}
FRONT = {"ray_actor_options": {"num_cpus": 0.05}}
Start = Callable[..., "Application"]
Deploy = Callable[[Any], str]


@pytest.fixture
def deploy(ray_serve: str) -> Iterator[Deploy]:
    with deploying(ray_serve) as deploy:
        yield deploy


@dataclass
class Application:
    url: str
    engines: FakeReplica

    def post(self, body: Any, path: str = CHAT, **headers: str) -> httpx2.Response:
        return post(self.url, body, path, **headers)

    def get(self, path: str) -> httpx2.Response:
        return get(self.url + path)

    @property
    def replicas(self) -> dict[str, ReplicaProcess]:
        return {each.name: each for each in replicas_in(self.engines.folder)}

    @property
    def begun(self) -> int:
        return sum(len(each.state["begun"]) for each in self.replicas.values())


@pytest.fixture
def start(deploy: Deploy, tmp_path: Path) -> Start:
    """An application of two fake engines."""

    def start(**options: Any) -> Application:
        folder = tmp_path / f"application-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        engines = FakeReplica(folder, capacity_tokens=CAPACITY)
        options = {"replicas": SMALL, "ingress": FRONT, **options}
        return Application(deploy(make_application(engines, **options)), engines)

    return start


def tagged(names: Sequence[str], query: str = "?", **fields: Any) -> dict[str, Any]:
    documents = [{"id": name, "text": TEXTS[name]} for name in names]
    return {"model": "fake", "messages": [], "ragorder": {"documents": documents, "query": query}, **fields}


def cached_tokens(answer: httpx2.Response) -> int:
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def replica_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-ragorder-replica"]


class TestTopics:
    def test_documents_stay_with_their_replica(self, start: Start) -> None:
        """Whatever their order, in all processes of the ingress; and there they are found."""
        application = start(ingress=FRONT | {"num_replicas": 2})
        rng = random.Random(0)
        first = []
        for names in SETS:
            first.append(replica_of(application.post(tagged(names))))
            again = application.post(tagged(rng.sample(names, 3), "again"))
            assert replica_of(again) == first[-1]
            assert cached_tokens(again) >= 700
            assert sorted(map(int, again.headers["x-ragorder-permutation"].split(","))) == [0, 1, 2]
        assert set(first) == set(application.replicas)
        assert [replica_of(application.post(tagged(names[::-1]))) for names in SETS] == first

    def test_requests_without_documents_go_anywhere_and_sessions_to_one(self, start: Start) -> None:
        application = start()
        plain = {"model": "fake", "messages": [{"role": "user", "content": "Question: ?"}]}
        assert {replica_of(application.post(plain)) for _ in range(40)} == set(application.replicas)
        assert len({replica_of(application.post(plain, **{"x-session-id": "mine"})) for _ in range(10)}) == 1
        assert application.get("/v1/models").json()["data"][0]["id"] == "fake"
        assert application.get("/ragorder/health").json() == {"status": "ok"}
        assert application.get("/ragorder/ready").json() == {"status": "ready"}


class TestAnswers:
    def test_come_as_they_are_generated_and_errors_say_what_to_change(self, start: Start) -> None:
        application = start()
        answer = StreamedAnswer()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(stream, application.url, tagged(SETS[0], pace=[0, None]), answer)
            # The rest waits for the gate.
            assert answer.began.wait(60) and answer.text == "a" and not answer.done
            application.engines.open_all()
        assert (answer.status, answer.text, answer.done) == (200, "a b c", True)
        assert application.post(tagged(SETS[0], "then")).json()["choices"][0]["message"]["content"] == "a b c"
        malformed = application.post({"model": "fake", "messages": [], "ragorder": {"documents": 3, "query": "?"}})
        assert malformed.status_code == 400
        assert malformed.json()["error"]["param"].startswith("ragorder")
        assert application.post(tagged(SETS[0]), "/v1/embeddings").json()["error"]["code"] == "no_documents_here"
        assert application.get("/nowhere").status_code == 404

    def test_of_a_killed_replica_that_had_not_begun_come_from_another(self, start: Start) -> None:
        """Half of the requests wait for their first token, half are in the middle of their answers."""
        application = start()
        begun, waiting = [StreamedAnswer() for _ in SETS], [StreamedAnswer() for _ in SETS]
        with ThreadPoolExecutor(64) as pool:
            for names, each in zip(SETS, begun, strict=True):
                pool.submit(stream, application.url, tagged(names, "begun", pace=[0, None]), each)
            assert all(each.began.wait(60) for each in begun)
            for names, each in zip(SETS, waiting, strict=True):
                pool.submit(stream, application.url, tagged(names, "waiting", pace=[None, 0]), each)
            whole = [pool.submit(application.post, tagged(names, "whole", pace=[None, 0])) for names in SETS[:10]]
            assert eventually(lambda: application.begun == 50)
            first = application.replicas[begun[0].replica or ""]
            assert len(first.state["begun"]) < 50, "the other one has some"
            first.kill()
            application.engines.open_all()
        assert [(each.status, each.text, each.done) for each in waiting] == [(200, "a b c", True)] * len(SETS)
        assert first.name not in {each.replica for each in waiting}
        assert [answer.result().status_code for answer in whole] == [200] * 10
        for each in begun:
            if each.replica == first.name:
                # What had come is not sent again, and does not look whole.
                assert each.text == "a" and not each.done and each.broke
                assert each.error["code"] == "upstream_unavailable"
            else:
                assert each.done and each.text == "a b c"


@dataclass
class EmbeddedEngines:
    """Embedded engines, and requests on three of the five documents of a subject, whose caches hold less than all."""

    model: Path
    subjects: int = 12
    requests: int = 120

    def __post_init__(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        texts = {name: " ".join(text.split()[:24]) for name, text in TEXTS.items()}
        total = sum(len(self.tokenizer.encode(text)) for text in texts.values())
        self.device_tokens = int(0.7 * total) // 16 * 16
        rng = random.Random(0)
        self.bodies = []
        for number in range(self.requests):
            subject = 5 * rng.randrange(self.subjects)
            retrieved = [f"d{each}" for each in rng.sample(range(subject, subject + 5), 3)]
            documents = [{"id": name, "text": texts[name]} for name in retrieved]
            tagged = {"documents": documents, "query": str(number)}
            self.bodies.append({"messages": [], "max_tokens": 1, "ragorder": tagged})

    def engine(self) -> EmbeddedEngine:
        settings = EngineSettings(device_tokens=self.device_tokens, host_bytes=0, dtype="float32", device="cpu")
        return EmbeddedEngine(str(self.model), settings)


class TestTwoEngines:
    @pytest.fixture(scope="class")
    def engines(self, model_folder: Path) -> EmbeddedEngines:
        pytest.importorskip("transformers")
        return EmbeddedEngines(model_folder)

    def test_find_by_topic_what_they_find_outside_of_ray(self, deploy: Deploy, engines: EmbeddedEngines) -> None:
        """To the token, each with the requests that it was dealt, and together no less than one engine with all."""
        served = self.served(deploy, engines)
        assert [found for _, found in served] == [self.alone(engines, bodies) for bodies, _ in served]
        assert sum(found for _, found in served) >= self.alone(engines, engines.bodies)

    def served(self, deploy: Deploy, engines: EmbeddedEngines) -> list[tuple[list[Any], int]]:
        """The requests of each replica in their order, and the tokens that they found cached."""
        url = deploy(make_application(engines.engine(), replicas=SMALL, ingress=FRONT))
        dealt: dict[str, list[Any]] = {}
        found: Counter[str] = Counter()
        with httpx2.Client(trust_env=False, timeout=120, verify=CERTIFICATES) as client:
            for body in engines.bodies:
                answer = client.post(url + CHAT, json=body)
                dealt.setdefault(replica_of(answer), []).append(body)
                found[replica_of(answer)] += cached_tokens(answer)
        assert len(dealt) == 2
        return [(bodies, found[replica]) for replica, bodies in dealt.items()]

    def alone(self, engines: EmbeddedEngines, bodies: Sequence[Any]) -> int:
        found = asyncio.run(alone(engines.engine(), bodies))
        assert found > 0
        return found


class TestReplicas:
    def test_are_left_by_a_client_that_has_gone(self, deploy: Deploy, tmp_path: Path) -> None:
        replicas = SMALL | {"num_replicas": 1}
        url = deploy(make_application(NeverEnding(tmp_path), replicas=replicas, ingress=FRONT))
        with (
            httpx2.Client(trust_env=False, timeout=60, verify=CERTIFICATES) as client,
            client.stream("POST", url + CHAT, json=tagged(SETS[0], stream=True)) as response,
        ):
            assert b'"content": "a"' in next(response.iter_raw())
            assert not (tmp_path / "cancelled").exists()
        assert eventually((tmp_path / "cancelled").exists)

    def test_are_replaced_when_their_engine_fails(self, start: Start) -> None:
        replicas = SMALL | {"num_replicas": 1, "health_check_period_s": 0.5}
        application = start(replicas=replicas)
        first = replica_of(application.post(tagged(SETS[0])))
        application.replicas[first].sicken()
        assert eventually(lambda: len(application.replicas) == 2)
        assert eventually(lambda: replica_of(application.post(tagged(SETS[0]))) != first)


async def alone(engine: EmbeddedEngine, bodies: Sequence[Any]) -> int:
    """The cached tokens of one engine in this process."""
    app = engine()
    lifespan = Lifespan(app)
    await lifespan.begin()
    try:
        async with httpx2.AsyncClient(transport=AppTransport(app), base_url="http://engine", timeout=60) as client:
            return sum([cached_tokens(await client.post(CHAT, json=body)) for body in bodies])
    finally:
        await lifespan.end()
