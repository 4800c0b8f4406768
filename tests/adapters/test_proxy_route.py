"""Topics for a router: in the header that the proxy and the client send, and from a front that does nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from support.cloud import Cloud
from support.sent_requests import TEMPLATE, TEXTS, asked, part, post, tagged, user
from support.serve_process import Served

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai import OrderedClient
from ragorder.adapters.proxy import DocumentTemplate, make_app
from ragorder.topic import SECRET_VARIABLE, Topics

SECRET = "a secret of these tests"  # noqa: S105
HEADER = "x-session-id"
Front = Callable[..., str]


@pytest.fixture
def router() -> Cloud:
    return Cloud()


@pytest.fixture
def front(serve: Callable[[Any], str], router: Cloud) -> Front:
    """A proxy of the router."""
    upstream = serve(router)

    def front(orderer: Orderer | None = None, **options: Any) -> str:
        orderer = orderer or Orderer(topics=Topics(SECRET), strict=True)
        return serve(make_app(orderer, upstream=upstream, **{"topic_header": HEADER, **options}))

    return front


class TestARoute:
    @pytest.mark.parametrize("body", [tagged("abc"), {"messages": [user(asked("ab"))]}], ids=["tagged", "found"])
    def test_adds_the_topic_and_nothing_else(self, body: dict[str, Any], front: Front, router: Cloud) -> None:
        content = json.dumps(body, indent=1).encode()
        answer = post(front(route=True, template=DocumentTemplate(TEMPLATE)), content)
        assert answer.json()["choices"][0]["message"]["content"] == "yes"
        assert router.contents == [content]
        assert len(router.headers[0][HEADER]) == 32
        assert not [name for name in answer.headers if name.startswith("x-ragorder")]

    def test_a_topic_is_of_the_documents_the_tenant_and_the_secret(self, front: Front, router: Cloud) -> None:
        url = front(route=True)
        for names in ("abc", "cab", "bca", "abc", "def", "fed"):
            post(url, tagged(names))
        post(front(route=True), tagged("abc"))
        for tenant in ("x", "y"):
            post(url, tagged("abc", cache_salt=tenant))
        topics = [headers[HEADER] for headers in router.headers]
        assert len({*topics[:4], topics[6]}) == len(set(topics[4:6])) == 1
        assert len({topics[0], topics[4], *topics[7:]}) == 4

    def test_a_client_with_marks_of_its_own_gets_a_topic_too(self, front: Front, router: Cloud) -> None:
        """A router moves no document, so that they lose nothing."""
        url = front(route=True, template=DocumentTemplate(TEMPLATE))
        for names in ("ab", "ba"):
            marked = part(asked(names), cache_control={"type": "ephemeral"})
            post(url, {"model": "m", "messages": [user([marked])]})
        first, second = (headers[HEADER] for headers in router.headers)
        assert first == second

    def test_leaves_requests_without_documents_as_they_are(self, front: Front, router: Cloud) -> None:
        url = front(route=True)
        post(url, {"model": "m", "messages": [user("hi")]}, **{HEADER: "mine"})
        post(url, {"input": "text"}, path="/v1/embeddings", **{HEADER: "mine"})
        assert [headers[HEADER] for headers in router.headers] == ["mine", "mine"]

    def test_the_topic_replaces_what_a_client_chose(self, front: Front, router: Cloud) -> None:
        """Otherwise it could send its documents to any replica."""
        post(front(route=True), tagged("ab"), **{HEADER: "mine"})
        assert router.headers[0][HEADER] != "mine"

    def test_no_text_is_logged_or_in_a_header(self, front: Front, router: Cloud, caplog: Any) -> None:
        with caplog.at_level(logging.DEBUG):
            post(front(route=True), tagged("ab", cache_salt="acme"))
        said = caplog.text + json.dumps(router.headers)
        assert "document about" not in said and "acme" not in said


class TestAProxy:
    def test_that_orders_sends_the_topic_as_well_if_it_has_a_header(self, front: Front, router: Cloud) -> None:
        answer = post(front(), tagged("abc"))
        assert len(router.headers[0][HEADER]) == 32
        assert "ragorder" not in router.last
        assert answer.headers["x-ragorder-permutation"] == "0,1,2"
        post(front(topic_header=None), tagged("abc"))
        assert HEADER not in router.headers[1]


class TestAClient:
    @pytest.fixture
    def client(self, serve: Callable[[Any], str], router: Cloud) -> Iterator[Callable[..., OrderedClient]]:
        openai = pytest.importorskip("openai")
        with openai.OpenAI(base_url=f"{serve(router)}/v1", api_key="none", max_retries=0) as inner:

            def make(**options: Any) -> OrderedClient:
                orderer = Orderer(topics=Topics(SECRET), strict=True)
                options = {"topic_header": HEADER, **options}
                return OrderedClient(inner, model="m", orderer=orderer, builder=PromptBuilder("Answer."), **options)

            yield make

    DOCUMENTS = tuple(Document(name, TEXTS[name]) for name in "abc")

    def test_sends_the_topic_of_its_documents(self, client: Callable[..., OrderedClient], router: Cloud) -> None:
        rag = client()
        rag.generate("?", self.DOCUMENTS)
        rag.generate("?", self.DOCUMENTS[::-1])
        rag.generate("?", self.DOCUMENTS, scope="acme")
        rag.generate("?", [])
        client(topic_header=None).generate("?", self.DOCUMENTS)
        topics = [headers.get(HEADER) for headers in router.headers]
        assert topics[0] == topics[1] == Topics(SECRET).of([each.key for each in self.DOCUMENTS])
        assert topics[2] not in (None, topics[0])
        assert topics[3:] == [None, None]

    def test_keeps_headers_of_the_caller(self, client: Callable[..., OrderedClient], router: Cloud) -> None:
        client().generate("?", self.DOCUMENTS, extra_headers={"X-Session-Id": "mine", "x-other": "1"})
        assert (router.headers[0][HEADER], router.headers[0]["x-other"]) == ("mine", "1")

    def test_refuses_a_header_that_cannot_be(self, client: Callable[..., OrderedClient]) -> None:
        with pytest.raises(ValueError, match="x-session-id"):
            client(topic_header="no header")

    def test_all_requests_of_a_batch_have_one(self, client: Callable[..., OrderedClient], router: Cloud) -> None:
        outcomes = list(client().generate_many([("?", self.DOCUMENTS), ("?", self.DOCUMENTS[:2])]))
        assert [str(each) for _, each in outcomes if isinstance(each, Exception)] == []
        assert all(len(headers[HEADER]) == 32 for headers in router.headers)


class TestTheCommand:
    def test_route_adds_the_header_that_routers_know(self, run_serve: Callable[..., Served]) -> None:
        served = run_serve("--topic-secret", SECRET, command="route")
        assert (served.app["route"], served.app["topic_header"]) == (True, "x-session-id")
        assert "Topics: in the header x-session-id" in served.said and "Cache:" not in served.said
        assert "Warning: topics" not in served.said
        assert served.orderer.topic([Document("a")]) == Topics(SECRET).of([Document("a").key])
        assert "Warning: topics are of this process alone" in run_serve(command="route").said

    def test_route_takes_a_header_and_a_template(self, run_serve: Callable[..., Served]) -> None:
        options = ("--topic-header", "x-aibrix-session-key", "--template", "<d>{text}</d>")
        served = run_serve(*options, command="route")
        assert served.app["topic_header"] == "x-aibrix-session-key"
        assert served.app["template"][0].find("<d>1</d><d>2</d>") is not None

    def test_serve_sends_a_topic_in_the_header_that_it_is_given(self, run_serve: Callable[..., Served]) -> None:
        served = run_serve("--topic-header", "X-SMG-Routing-Key", **{SECRET_VARIABLE: SECRET})
        assert served.app["topic_header"] == "X-SMG-Routing-Key" and "route" not in served.app
        assert "documents are ordered" in served.said
        assert served.orderer.topic([Document("a")]) == Topics(SECRET).of([Document("a").key])
        assert "opic" not in run_serve().said

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (["--shadow"], "No such option '--shadow'"),
            (["--capacity-tokens", "4096"], "No such option '--capacity-tokens'"),
            (["--topic-header", "a b"], "--topic-header: 'a b' cannot be"),
            (["--topic-secret", " "], "--topic-secret: the key is empty"),
        ],
        ids=" ".join,
    )
    def test_refuses(self, run_serve: Callable[..., Served], options: list[str], reason: str) -> None:
        served = run_serve(*options, command="route")
        assert reason in served.said
        assert served.config is None
