"""Documents that an API has as such: ordered, and answers cite what the client sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette")

import httpx2
from support.bodies import Bodies
from support.far_end import FarEnd, answer_events, answer_json
from support.sent_requests import CHAT, assistant, part, post_to, proxy_to, user

from ragorder import Orderer
from ragorder.adapters.proxy import Fleet, ReplicaAddress
from ragorder.adapters.proxy.bodies.body import Route

TEXTS = {name: f"{name} is about {name}. " * 20 for name in "abcde"}
ASK = user("Which?")
MESSAGES = "/v1/messages"


def block(name: str, kind: str = "document") -> dict[str, Any]:
    if kind == "search_result":
        content = [part(TEXTS[name])]
        return {"type": kind, "source": name, "title": name, "content": content, "citations": {"enabled": True}}
    return {"type": kind, "source": {"type": "text", "media_type": "text/plain", "data": TEXTS[name]}, "title": name}


def blocks(names: str, kind: str = "document") -> dict[str, Any]:
    parts = [*(block(name, kind) for name in names), part("Which?")]
    return {"model": "m", "max_tokens": 5, "messages": [user(parts)]}


def listed(names: str) -> dict[str, Any]:
    documents = [{"doc_id": name, "title": name, "text": TEXTS[name]} for name in names]
    return {"model": "m", "documents": documents, "messages": [ASK]}


def cohere(names: str) -> dict[str, Any]:
    return listed("") | {"documents": [{"id": name, "data": {"text": TEXTS[name]}} for name in names]}


def compact(content: bytes) -> bytes:
    return content.replace(b" ", b"")


class Server(FarEnd):
    """A server that cites, by place, what it is told to; and a proxy of it."""

    def __init__(self) -> None:
        super().__init__(answer_json({"content": [{"type": "text", "text": "yes"}], "usage": {"input_tokens": 9}}))
        self.proxy = proxy_to(self)

    def titles(self) -> str:
        """The last body's documents, in the order in which they were sent."""
        contents = [message["content"] for message in self.last.json["messages"]]
        parts = [each for content in contents if isinstance(content, list) for each in content]
        return "".join(each["title"] for each in parts if each["type"] in ("document", "search_result"))

    def post(self, body: dict[str, Any], path: str = MESSAGES) -> httpx2.Response:
        """Through the proxy."""
        return post_to(self.proxy, body, path)


@pytest.fixture
def server() -> Server:
    return Server()


class TestLists:
    @pytest.mark.parametrize(("path", "body"), [(CHAT, listed), ("/v2/chat", cohere), ("/cohere/v2/chat", cohere)])
    def test_documents_extend_the_cached_prefix(self, path: str, body: Any, server: Server) -> None:
        server.post(body("abc"), path)
        response = server.post(body("cab"), path)
        assert server.last.json == body("cab") | {"documents": body("abc")["documents"]}
        assert response.headers["x-ragorder-permutation"] == "1,2,0"

    @pytest.mark.parametrize(
        ("path", "documents"),
        [
            # Cohere names these by their places.
            ("/v2/chat", ["one text", "another text"]),
            ("/v2/chat", [{"data": {"text": "one"}}, {"data": {"text": "two"}}]),
            ("/v2/chat", [{"id": "a", "data": {}}, {"id": "a", "data": {}}]),
            *((CHAT, other) for other in (None, [], [{"text": "one"}], "text", [1, 2], [{"text": "x"}, "y"])),
        ],
    )
    def test_others_are_forwarded(self, path: str, documents: Any, server: Server) -> None:
        for listing in (documents, documents and documents[::-1]):
            body = {"model": "m", "documents": listing, "messages": [ASK]}
            response = server.post(body, path)
            assert server.last.json == body
            assert "x-ragorder-permutation" not in response.headers


@pytest.mark.parametrize(("kind", "name"), [("document", "document_index"), ("search_result", "search_result_index")])
class TestBlocks:
    def citation(self, name: str, place: int) -> dict[str, Any]:
        return {"type": "char_location", "cited_text": f'"{name}": 1', name: place, "start_char_index": 0}

    def test_they_move_whole_and_answers_cite_what_the_client_sent(self, kind: str, name: str, server: Server) -> None:
        citations = [self.citation(name, place) for place in range(4)]
        content = [
            {"type": "text", "text": f'{{"{name}": 0}}', "citations": citations},
            {"type": "text", "text": "end", "citations": None},
            {"type": "tool_use", "input": {name: 0}},
        ]
        server.answer = answer_json({"content": content})
        assert server.post(blocks("abc", kind)).content == json.dumps({"content": content}).encode()
        response = server.post(blocks("cab", kind))
        assert server.last.json == blocks("abc", kind)
        cited = [each[name] for each in response.json()["content"][0]["citations"]]
        # Sent: a, b, c. The client's c is 0, a is 1, b is 2; it has no 3.
        assert cited == [1, 2, 0, 3]
        assert response.json()["content"][0]["text"] == content[0]["text"]
        assert response.json()["content"][1:] == content[1:]

    @pytest.mark.parametrize("size", [1, 7, 10_000])
    def test_in_a_stream_too(self, size: int, kind: str, name: str, server: Server) -> None:
        def events(places: dict[int, int]) -> bytes:
            deltas = [
                {"type": "content_block_delta", "delta": {"citation": self.citation(name, places[n])}} for n in (0, 2)
            ]
            text = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": f'"{name}": 0'}}
            said: list[Any] = [{"type": "message_start"}, deltas[0], text, deltas[1], {"type": "message_stop"}]
            return b"".join(
                f"event: {each['type']}\ndata: {json.dumps(each, separators=(',', ':'))}\n\n".encode() for each in said
            )

        server.post(blocks("abc", kind))
        sent = events({0: 0, 2: 2})
        server.answer = answer_events(*(sent[at : at + size] for at in range(0, len(sent), size)))
        response = server.post(blocks("cab", kind))
        assert response.content == events({0: 1, 2: 0})

    def test_through_several_replicas_too(self, kind: str, name: str, server: Server) -> None:
        replicas = [ReplicaAddress(f"http://far.{n}", Orderer(block_size=16, strict=True)) for n in (1, 2)]
        server.proxy = proxy_to(server, upstream=Fleet(replicas))
        for names in ("abc", "cab"):
            server.answer = answer_json({"content": [{"type": "text", "citations": [self.citation(name, 0)]}]})
            response = server.post(blocks(names, kind))
        assert server.titles() == "abc"
        assert response.json()["content"][0]["citations"][0][name] == 1

    def test_places_count_all_blocks_before_them(self, kind: str, name: str, server: Server) -> None:
        def body(names: str) -> dict[str, Any]:
            nested = {"type": "tool_result", "tool_use_id": "t", "content": [block("d", kind)]}
            last = blocks(names, kind)
            return {**last, "messages": [*blocks("e", kind)["messages"], user([nested]), *last["messages"]]}

        server.post(body("abc"))
        citations = [self.citation(name, place) for place in range(6)]
        server.answer = answer_json({"content": [{"type": "text", "text": "", "citations": citations}]})
        response = server.post(body("cab"))
        assert server.titles() == "eabc"
        assert [each[name] for each in response.json()["content"][0]["citations"]] == [0, 1, 3, 4, 2, 5]

    def test_the_next_turn_repeats_the_order_and_its_citations(self, kind: str, name: str, server: Server) -> None:
        def turns(names: str, place: int) -> dict[str, Any]:
            said = [{"type": "text", "text": "x", "citations": [self.citation(name, place)]}]
            first = blocks(names, kind)
            return {**first, "messages": [*first["messages"], assistant(said), user("And?")]}

        server.post(blocks("abc", kind))
        server.post(blocks("cab", kind))
        # The client has cited its own document 0, c, which stands at place 2.
        server.post(turns("cab", 0))
        assert server.last.json == turns("abc", 2)

    def test_all_else_keeps_its_bytes(self, kind: str, name: str, server: Server) -> None:
        """Numbers, too, that a decoder would refuse or write in another way."""
        numbers = f'{{"type": "tool_use", "input": {{"x": [1e999, 1e5, -0, {"9" * 5000}]}}}}'

        def said(place: int) -> str:
            citation = json.dumps(self.citation(name, 0)).replace(f'"{name}": 0', f'"{name}":{place}')
            return f'[{{"type": "text", "citations": [{citation}, 1e5]}}, {numbers}]'

        def turns(names: str, place: int) -> bytes:
            first = blocks(names, kind)
            body = {**first, "messages": [*first["messages"], assistant("SAID"), user("And?")]}
            return json.dumps(body).replace('"SAID"', said(place)).encode()

        server.post(blocks("abc", kind))
        server.post(blocks("cab", kind))
        server.answer = answer_json(f'{{"content": {said(2)}}}'.encode())
        response = post_to(server.proxy, turns("cab", 0), MESSAGES)
        assert response.status_code == 200
        assert compact(server.last.body) == compact(turns("abc", 2))
        assert compact(response.content) == compact(f'{{"content": {said(0)}}}'.encode())

    def test_an_error_is_forwarded(self, kind: str, name: str, server: Server) -> None:
        server.post(blocks("abc", kind))
        server.answer = answer_json({"error": {name: 0}}, 400)
        response = server.post(blocks("cab", kind))
        assert (response.status_code, response.json()) == (400, {"error": {name: 0}})


class TestOtherBlocks:
    @pytest.mark.parametrize(
        "parts",
        [
            [block("a"), part("x"), block("b")],
            [block("a"), block("b", "search_result")],
            [{"type": "image", "source": {}}, {"type": "image", "source": {}}],
        ],
        ids=["apart", "of two types", "images"],
    )
    def test_they_stay(self, parts: list[Any], server: Server) -> None:
        body = {"model": "m", "max_tokens": 5, "messages": [user(parts)]}
        server.post(body)
        server.post(body)
        assert server.last.json == body

    def test_a_client_that_sets_breakpoints_keeps_its_order(self, server: Server) -> None:
        server.post(blocks("abc"))
        body = blocks("cab")
        body["messages"][0]["content"][2]["cache_control"] = {"type": "ephemeral"}
        server.post(body)
        assert server.last.json == body


TEMPLATE = "<d>{text}</d>"


def page(name: str, picture: bool = True, **fields: Any) -> list[dict[str, Any]]:
    shown = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}] if picture else []
    return [part(f"<d>{TEXTS[name]}</d>", **fields), *shown]


def prompt(*documents: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [user([part("Read."), *(piece for each in documents for piece in each), part("Which?")])]}


def sent(*bodies: dict[str, Any], route: Route = "chat", **options: Any) -> dict[str, Any]:
    """The last of several bodies, as it is sent."""
    orders = Bodies(TEMPLATE, **options)
    found: dict[str, Any] = [orders.forwarded(body, route) for body in bodies][-1]
    return found


class TestContentParts:
    def test_attributes_move_with_their_document(self) -> None:
        first, second = (prompt(*(page(name, False, source=name) for name in names)) for names in ("abc", "cab"))
        assert sent(first, second) == first

    def test_a_picture_that_may_be_the_questions_stays(self) -> None:
        def body(names: str) -> dict[str, Any]:
            return prompt(*(page(name, picture=False) for name in names[:-1]), page(names[-1]))

        last = [*page("c", picture=False), page("b")[1]]
        assert sent(body("abc"), body("cab")) == prompt(page("a", False), page("b", False), last)

    def test_with_different_numbers_of_pictures_the_last_document_stays_with_its_own(self) -> None:
        first = prompt(page("a"), page("b", False), page("c"), page("d"))
        second = prompt(page("c"), page("a"), page("b", False), page("d"))
        third = prompt(page("d"), page("a"), page("b", False), page("c"))
        assert sent(first, second) == first
        assert sent(first, third) == prompt(page("a"), page("b", False), page("d"), page("c"))

    def test_a_last_document_without_a_picture_moves(self) -> None:
        first, second = (prompt(*(page(name, name == "a") for name in names)) for names in ("abc", "acb"))
        assert sent(first, second) == first

    def test_breakpoints_of_the_client_stay_at_their_places(self) -> None:
        mark = {"cache_control": {"type": "ephemeral"}}
        first, second = (prompt(page(x, False), page(y, False, **mark), page(z, False)) for x, y, z in ("abc", "cab"))
        assert sent(first, second, heeds_client_marks=False) == first


class TestBreakpoints:
    def test_one_follows_the_blocks_that_an_earlier_request_began_with(self) -> None:
        last = sent(blocks("abc"), blocks("bcad"), route="messages", finds_native=True, marks=["messages"])
        parts = last["messages"][0]["content"]
        assert [part.get("title") for part in parts] == ["a", "b", "c", "d", None]
        assert [n for n, part in enumerate(parts) if "cache_control" in part] == [2]


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "b", "parameters": {}}},
    {"type": "web_search"},
    {"name": "a", "input_schema": {}},
    {"type": "function", "name": "c"},
]


class TestTools:
    """Sent in the order of their names, if that is asked for."""

    @pytest.mark.parametrize("route", ["chat", "messages", "responses", "cohere"])
    def test_they_are_sent_in_one_order_without_documents_too(self, route: Route) -> None:
        field = "input" if route == "responses" else "messages"
        passed: list[str] = []
        for tools in (TOOLS, TOOLS[::-1], [*TOOLS[2:], *TOOLS[:2]]):
            body = {"model": "m", "tools": tools, field: [ASK]}
            found = sent(body, route=route, stable_tools=True, on_passed=passed.append)
            assert found == body | {"tools": [TOOLS[n] for n in (1, 2, 0, 3)]}
        assert passed == ["no_documents"] * 3

    def test_documents_are_ordered_as_well(self) -> None:
        first, second = (prompt(*(page(name, False) for name in names)) for names in ("abc", "cab"))
        found = sent(first | {"tools": TOOLS}, second | {"tools": TOOLS[::-1]}, stable_tools=True)
        assert found == first | {"tools": [TOOLS[n] for n in (1, 2, 0, 3)]}

    @pytest.mark.parametrize(
        "tools",
        [
            [TOOLS[1], TOOLS[2]],
            [TOOLS[0], TOOLS[2] | {"cache_control": {"type": "ephemeral"}}],
            None,
            "tools",
            [],
        ],
        ids=["in order", "with breakpoints", "none", "no list", "empty"],
    )
    def test_others_keep_their_bytes(self, tools: Any) -> None:
        body = json.dumps({"tools": tools, "messages": [ASK]}, indent=1).encode()
        assert Bodies(None, stable_tools=True).ordered(body) is body

    def test_a_list_that_keeps_its_order_is_sent(self) -> None:
        body = listed("ab") | {"tools": TOOLS, "cache_salt": 7}
        found = sent(body, stable_tools=True, finds_native=True)
        assert found == body | {"tools": [TOOLS[n] for n in (1, 2, 0, 3)]}

    def test_without_the_option_nothing_changes(self) -> None:
        body = json.dumps({"tools": TOOLS, "messages": [ASK]}).encode()
        assert Bodies(None).ordered(body) is body
