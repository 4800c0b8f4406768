"""The ingress that chooses the best replica: its mirrors, and what it does with replicas that are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")

import httpx2
from ray.exceptions import ActorDiedError
from support.ray_calls import Handle, Items

from ragorder import Document, Orderer
from ragorder.adapters.http_server.app_transport import AppTransport
from ragorder.adapters.proxy.ordering import RequestOrderer
from ragorder.adapters.proxy.parsing import ParsedBody
from ragorder.adapters.ray.best import BestIngress
from ragorder.adapters.ray.mirrors import ReplicaChoice, ReplicaMirrors
from ragorder.ordering import RequestOutcome

CHAT = "/v1/chat/completions"
USAGE = b'{"usage": {"prompt_tokens": 40, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}}'
ANSWER = ((200, [(b"content-type", b"application/json")]), USAGE)


def parsed(names: Iterable[str]) -> ParsedBody:
    body: Any = None
    return ParsedBody(body, [Document(name, name, tokens=160) for name in names], 0, lambda permutation: b"")


def order(mirrors: ReplicaMirrors, replica: str, names: str) -> None:
    orderer: Any = mirrors._of(replica).orderer
    orderer._orderer.order([Document(name, name, tokens=160) for name in names], scope=b"")


class TestMirrors:
    @pytest.fixture
    def mirrors(self) -> ReplicaMirrors:
        return ReplicaMirrors(lambda: RequestOrderer(Orderer(capacity_tokens=4096, block_size=16, strict=True)))

    def test_rank_the_replica_with_the_documents_first(self, mirrors: ReplicaMirrors) -> None:
        order(mirrors, "b", "xyz")
        assert mirrors.rank(["a", "b", "c"], parsed("zyx"))[0] == "b"
        assert sorted(mirrors.rank(["a", "b", "c"], parsed("zyx"))) == ["a", "b", "c"]

    def test_rank_others_by_their_load(self, mirrors: ReplicaMirrors) -> None:
        with mirrors.in_flight("a"), mirrors.in_flight("a"), mirrors.in_flight("c"):
            assert mirrors.rank(["a", "b", "c"], None) == ["b", "c", "a"]

    def test_of_a_replica_that_has_gone_are_dropped(self, mirrors: ReplicaMirrors) -> None:
        order(mirrors, "b", "xyz")
        with mirrors.in_flight("b"):
            mirrors.rank(["a"], parsed("xyz"))
            assert "b" in mirrors._mirrors, "a request of it has not ended"
        mirrors.rank(["a"], parsed("xyz"))
        assert set(mirrors._mirrors) == {"a"}

    def test_of_a_replica_that_was_tried_are_kept(self, mirrors: ReplicaMirrors) -> None:
        order(mirrors, "b", "xyz")
        assert ReplicaChoice(mirrors, parsed("xyz"), ("b",)).rank(["a", "b"]) == ["a"]
        assert set(mirrors._mirrors) == {"a", "b"}

    def test_choose_a_replica_that_was_tried_only_without_others(self, mirrors: ReplicaMirrors) -> None:
        order(mirrors, "b", "xyz")
        assert "b" not in ReplicaChoice(mirrors, parsed("xyz"), ("b",)).rank(["a", "b", "c"])
        assert ReplicaChoice(mirrors, parsed("xyz"), ("b",)).rank(["b"]) == ["b"]


def documents_in(prompt: bytes) -> list[str]:
    """The names of its documents, in order."""
    places = {name: prompt.find(f"{name} {name} {name}".encode()) for name in "abcxyz"}
    return sorted((name for name, place in places.items() if place >= 0), key=places.__getitem__)


class Replicas(Handle):
    """Those that a choice ranks first; a, b and c are there."""

    def __init__(self, *answers: Items) -> None:
        super().__init__(*answers)
        self.left: list[str] = []

    def options(self, **_: Any) -> Replicas:
        return self

    @asynccontextmanager
    async def choose_replica(self, choice: ReplicaChoice) -> AsyncIterator[Any]:
        selection = SimpleNamespace(replica_id=choice.rank(["a", "b", "c"])[0])
        yield selection
        self.left.append(selection.replica_id)

    def dispatch(self, selection: Any, request: Any) -> Items:
        self.calls.append((selection.replica_id, request))
        return self.answers[len(self.calls) - 1]


class TestTheIngress:
    @pytest.fixture
    def outcomes(self) -> list[RequestOutcome]:
        return []

    def client(self, replicas: Replicas, outcomes: list[RequestOutcome], **options: Any) -> httpx2.AsyncClient:
        class Watched(Orderer):
            def order(self, *documents: Any, **given: Any) -> Any:
                ordering = super().order(*documents, **given)
                ordering.add_done_callback(outcomes.append)
                return ordering

        def make_orderer() -> Orderer:
            return Watched(capacity_tokens=4096, block_size=16, strict=True)

        ingress: Any = BestIngress(replicas, make_orderer, options)  # type: ignore[arg-type]
        return httpx2.AsyncClient(transport=AppTransport(ingress._app), base_url="http://x", timeout=30)

    @staticmethod
    def body(names: Sequence[str] = "abc", **fields: Any) -> dict[str, Any]:
        documents = [{"id": name, "text": f"{name} " * 200} for name in names]
        return {"model": "m", "messages": [], "ragorder": {"documents": documents, "query": "?"}, **fields}

    async def test_orders_for_the_replica_that_it_chooses(self, outcomes: list[RequestOutcome]) -> None:
        replicas = Replicas(*(Items(*ANSWER) for _ in range(4)))
        async with self.client(replicas, outcomes) as client:
            for names in ("abc", "xyz", "cab", "yxz"):
                assert (await client.post(CHAT, json=self.body(names))).status_code == 200
        first, second, third, fourth = (replica for replica, _ in replicas.calls)
        assert (first, second) == (third, fourth) and first != second
        prompts = [request.body for _, request in replicas.calls]
        assert [prompts[2].index(b"a a"), prompts[2].index(b"b b")] == [
            prompts[0].index(b"a a"),
            prompts[0].index(b"b b"),
        ]
        assert not any(b"ragorder" in prompt for prompt in prompts)
        assert outcomes == [RequestOutcome(True, 0, 41, 40)] * 4

    @pytest.mark.parametrize("first", [Items(ActorDiedError()), Items((503, []), b"full")])
    async def test_sends_a_request_to_another_replica_that_its_own_does_not_take(
        self, first: Items, outcomes: list[RequestOutcome]
    ) -> None:
        replicas = Replicas(first, Items(*ANSWER))
        async with self.client(replicas, outcomes) as client:
            answer = await client.post(CHAT, json=self.body())
        assert answer.status_code == 200 and answer.content == USAGE
        (one, lost), (other, kept) = replicas.calls
        assert one != other and lost.body == kept.body
        assert [outcome.served for outcome in outcomes] == [False, True]
        assert replicas.left == [one, other]

    async def test_gives_up_after_three(self, outcomes: list[RequestOutcome]) -> None:
        replicas = Replicas(*(Items(ActorDiedError()) for _ in range(4)))
        async with self.client(replicas, outcomes) as client:
            answer = await client.post(CHAT, json=self.body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unavailable")
        assert sorted(replica for replica, _ in replicas.calls) == ["a", "b", "c"]

    async def test_never_repeats_what_a_client_has_seen(self, outcomes: list[RequestOutcome]) -> None:
        event = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
        items = Items((200, [(b"content-type", b"text/event-stream")]), event, ActorDiedError())
        replicas = Replicas(items)
        seen = b""
        async with self.client(replicas, outcomes) as client:
            with pytest.raises(httpx2.RemoteProtocolError):
                async with client.stream("POST", CHAT, json=self.body(stream=True)) as answer:
                    async for chunk in answer.aiter_raw():
                        seen += chunk
        assert seen.startswith(event) and b"upstream_unavailable" in seen
        assert len(replicas.calls) == 1
        # The prompt was computed, though the answer broke off.
        assert [outcome.served for outcome in outcomes] == [True]

    async def test_keeps_keys_and_hosts_as_the_proxy_does(self, outcomes: list[RequestOutcome]) -> None:
        replicas = Replicas(Items(*ANSWER))
        async with self.client(replicas, outcomes, api_key="secret") as client:
            assert (await client.post(CHAT, json=self.body())).status_code == 401
            allowed = {"authorization": "Bearer secret"}
            assert (await client.post(CHAT, json=self.body(), headers=allowed)).status_code == 200
            assert (await client.get("/ragorder/health")).status_code == 200
        ((_, request),) = replicas.calls
        assert b"authorization" not in dict(request.headers), "the key is the ingress's"
