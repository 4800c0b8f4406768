"""Anthropic's messages and OpenAI's responses through the proxy: what of a body is changed, marked and passed on."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.usage import ReportedUsage, read_usage

pytest.importorskip("starlette")

import httpx2
from support.bodies import Bodies
from support.sent_requests import ROLE, TEMPLATE, TEXTS, TOKEN, part, post_to, proxy_to, tag, user, written

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy import DocumentTemplate
from ragorder.adapters.proxy.bodies.body import BOUNDARY
from ragorder.adapters.proxy.bodies.marks import chunks_of
from ragorder.adapters.proxy.upstream import error_event
from ragorder.adapters.proxy.usage import StreamReader, WholeReader

MARK = {"type": "ephemeral"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "data:,"}}


def messages(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "claude", "max_tokens": 8, "messages": list(turns), **fields}


def responses(input: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt", "input": input, "prompt_cache_key": "mine", **fields}


def tool_result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "1", "content": content}


def call_output(output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "1", "output": output}


CALL = {"type": "function_call", "call_id": "1", "name": "search", "arguments": "{}"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "search", "input": {}}]}


def chat(names: str, *before: str) -> dict[str, Any]:
    """Documents after system messages with these texts."""
    return {"model": "m", "messages": [*({"role": "system", "content": each} for each in before), user(written(names))]}


# Where documents may stand, by route.
LAYOUTS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "a chat": ("chat", lambda names: chat(names, "Be brief.")),
    "a text": ("messages", lambda names: messages(user(f"See:\n{written(names)}\nWhich?"), system="Be brief.")),
    "a part": ("messages", lambda names: messages(user([IMAGE, part(written(names), x=1.5), part("Which?")]))),
    "a part each": ("messages", lambda names: messages(user([*(part(written(name)) for name in names), part("?")]))),
    "system": ("messages", lambda names: messages(user("Which?"), system=f"See:\n{written(names)}")),
    "parts of system": ("messages", lambda names: messages(user("?"), system=[part("See:"), part(written(names))])),
    "a tool's result": ("messages", lambda names: messages(user("?"), USE, user([tool_result(written(names))]))),
    "parts of a tool's result": (
        "messages",
        lambda names: messages(
            user("?"), USE, user([part("So:"), tool_result([part(written(name)) for name in names]), part("Well?")])
        ),
    ),
    "input": ("responses", lambda names: responses(f"{written(names)}\nWhich?", instructions="Be brief.")),
    "a message": ("responses", lambda names: responses([user(f"{written(names)}\nWhich?")], instructions="Be brief.")),
    "parts of a message": (
        "responses",
        lambda names: responses([{"type": "message", **user([part(written(names), "input_text"), part("?")])}]),
    ),
    "instructions": ("responses", lambda names: responses("Which?", instructions=written(names))),
    "instructions before messages": ("responses", lambda names: responses([user("?")], instructions=written(names))),
    "a function's output": ("responses", lambda names: responses([user("?"), CALL, call_output(written(names))])),
    "parts of a function's output": (
        "responses",
        lambda names: responses([user("?"), CALL, call_output([part(written(name), "input_text") for name in names])]),
    ),
}


class TestWhereDocumentsStand:
    @pytest.mark.parametrize("where", LAYOUTS)
    def test_they_are_put_in_order_and_nothing_else_is_changed(self, where: str) -> None:
        route, body = LAYOUTS[where]
        bodies = Bodies(TEMPLATE)
        for names in ("abc", "dcba", "bad"):
            sent = bodies.forwarded(body(names), route)
        assert sent == body("abd")
        parsed = bodies.found(body("abc"), route)
        assert len(parsed.documents) == 3
        # Estimated at four characters a token: nothing is there but the documents and short texts.
        assert parsed.prefix_tokens + parsed.suffix_tokens < 40
        in_order, bodies = json.dumps(body("abc"), indent=3).encode(), Bodies(TEMPLATE)
        assert [bodies.ordered(in_order, route) for _ in range(2)] == [in_order, in_order]

    def test_what_a_model_has_reasoned_is_left_alone(self) -> None:
        bodies = Bodies(TEMPLATE)
        for names in ("abc", "cba"):
            reasoned = {"type": "reasoning", "id": "rs_1", "content": [part(written("ed"), "reasoning_text")]}
            body = responses([user("?"), reasoned, CALL, call_output(written(names))])
            sent = bodies.forwarded(body, "responses")
        assert sent == responses([user("?"), reasoned, CALL, call_output(written("abc"))])

    @pytest.mark.parametrize(
        ("where", "change"),
        [
            ("a chat", chat("cba", "Be long.")),
            ("a chat", chat("cba", "Be brief.", "Be brief.")),
            ("a chat", chat("cba")),
            ("a chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
            ("a chat", {"chat_template_kwargs": {"enable_thinking": False}}),
            ("a chat", {"reasoning_effort": "low"}),
            ("a chat", {"cache_salt": "t"}),
            ("a chat", {"model": "other"}),
            ("a text", {"system": "Be long."}),
            ("a text", {"tools": [{"name": "f"}]}),
            ("a text", {"thinking": {"type": "enabled"}}),
            ("a text", {"cache_salt": "t"}),
            ("a text", {"model": "other"}),
            ("input", {"instructions": "Be long."}),
            ("input", {"previous_response_id": "resp_1"}),
            ("input", {"conversation": "conv_1"}),
            ("input", {"cache_salt": "t"}),
        ],
    )
    def test_what_comes_before_them_separates(self, where: str, change: dict[str, Any]) -> None:
        route, body = LAYOUTS[where]
        bodies = Bodies(TEMPLATE)
        bodies.forwarded(body("abc"), route)
        other = body("cba") | change
        assert bodies.forwarded(other, route) == other

    def test_the_same_text_of_another_route_is_another_prompt(self) -> None:
        bodies = Bodies(TEMPLATE)
        bodies.forwarded({"model": "gpt", "messages": [user(written("abc"))]})
        other = responses([user(written("cba"))])
        assert bodies.forwarded(other, "responses") == other

    def test_an_answer_that_quotes_documents_is_left_alone(self) -> None:
        bodies = Bodies(TEMPLATE)
        for names in ("abc", "cba"):
            body = messages(user("Which?"), {"role": "assistant", "content": written(names)}, user("Sure?"))
            assert bodies.parse("messages", json.dumps(body).encode()) is None


class TestTagged:
    def turn(self, names: str) -> str:
        documents = [Document(name, TEXTS[name]) for name in names]
        return PromptBuilder("").build("Which?", documents).messages[-1]["content"]

    def test_documents_and_question_become_one_more_message(self) -> None:
        bodies = Bodies()
        for names in ("abc", "cba"):
            sent = bodies.forwarded(messages(user("Hello"), system="Be brief.", ragorder=tag(names)), "messages")
        assert sent == messages(user("Hello"), user(self.turn("abc")), system="Be brief.")

    @pytest.mark.parametrize(
        ("given", "sent"),
        [
            ({"input": "Hello"}, [user("Hello")]),
            ({"input": [user("Hello"), CALL]}, [user("Hello"), CALL]),
            ({"input": []}, []),
            ({}, []),
        ],
        ids=["text", "messages", "none", "missing"],
    )
    def test_they_follow_the_input_of_a_response(self, given: dict[str, Any], sent: list[Any]) -> None:
        own = {"instructions": "Be brief.", "prompt_cache_key": "mine"}
        found = Bodies().forwarded({**own, **given, "ragorder": tag("abc")}, "responses")
        assert found == {**own, "input": [*sent, user(self.turn("abc"))]}

    @pytest.mark.parametrize(("route", "field"), [("messages", "messages"), ("responses", "input")])
    def test_a_malformed_prompt_is_refused_by_name(self, route: Any, field: str) -> None:
        with pytest.raises(HTTPError) as caught:
            Bodies().forwarded({field: 3, "ragorder": tag("ab")}, route)
        assert caught.value.content["error"]["param"] == field

    def test_citation_labels_are_of_the_text_and_not_of_the_place(self) -> None:
        builder = PromptBuilder("", document_template="[{label}] {text}\n")
        bodies = Bodies(builder=builder)
        labels: dict[str, set[str]] = {}
        for names in ("abc", "cab"):
            content = bodies.forwarded(messages(ragorder=tag(names)), "messages")["messages"][0]["content"]
            for line in content.splitlines()[:3]:
                label, _, text = line.partition("] ")
                labels.setdefault(text[0], set()).add(label)
        assert [len(found) for found in labels.values()] == [1, 1, 1]


class TestCacheKey:
    @pytest.mark.parametrize("given", [{}, {"prompt_cache_key": None}])
    def test_is_the_topic_where_the_client_set_none(self, given: dict[str, Any]) -> None:
        bodies = Bodies(TEMPLATE)
        keys = set()
        for names in ("abc", "cba", "bca"):
            body = {"model": "gpt", "input": written(names), **given}
            keys.add(bodies.forwarded(body, "responses")["prompt_cache_key"])
        parsed = bodies.found(body, "responses")
        (key,) = keys
        assert key == bodies.orderer.topic(parsed.documents, scope=parsed.scope)
        assert len(key) <= 64

    def test_is_not_set_without_documents_nor_in_chats(self) -> None:
        bodies = Bodies(TEMPLATE)
        assert "prompt_cache_key" not in bodies.forwarded({"input": "Hello"}, "responses")
        chat = json.dumps({"messages": [user(written("ab"))]}).encode()
        assert bodies.ordered(chat, "chat") == chat


class TestMarks:
    def bodies(self, **options: Any) -> Bodies:
        return Bodies(
            TEMPLATE, orderer=Orderer(block_size=16, strict=True, feedback=False), marks=["messages"], **options
        )

    def parts(self, body: Any) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = body["messages"][0]["content"]
        return parts

    def marked(self, parts: list[dict[str, Any]]) -> list[int]:
        return [place for place, each in enumerate(parts) if "cache_control" in each]

    def test_follow_what_an_earlier_request_began_with(self) -> None:
        bodies = self.bodies()
        first = self.parts(bodies.served(messages(user(f"{written('abc')}\nWhich?")), "messages"))
        second = self.parts(bodies.served(messages(user(f"{written('dba')}\nAnd?")), "messages"))
        assert self.marked(first) == []
        assert [each["text"].strip()[14] for each in second[:3]] == ["a", "b", "d"]
        assert self.marked(second) == [1]
        assert all(each["cache_control"] == MARK for each in second if "cache_control" in each)
        # A cache finds parts again only if they are divided alike, marked or not.
        assert [each["text"] for each in first[:2]] == [each["text"] for each in second[:2]]

    @pytest.mark.parametrize(
        "body",
        [
            messages(user([part(written("ab"), cache_control=MARK)])),
            messages(user(written("ab")), system=[part("s", cache_control=MARK)]),
            messages(user(written("ab")), tools=[{"name": "f", "cache_control": MARK}]),
            messages(user(written("ab")), cache_control=MARK),
        ],
        ids=["part", "system", "tools", "automatic"],
    )
    def test_a_client_that_sets_one_sets_all(self, body: dict[str, Any]) -> None:
        assert self.bodies().parse("messages", json.dumps(body).encode()) is None

    @pytest.mark.parametrize(("heeds", "ordered"), [(True, False), (False, True)])
    def test_a_server_whose_cache_finds_any_prefix_does_not_heed_them(self, heeds: bool, ordered: bool) -> None:
        bodies = Bodies(TEMPLATE, heeds_client_marks=heeds)

        def sent(names: str) -> Any:
            body = messages(user([part(each) for each in map(written, names)]), system=[part("s", cache_control=MARK)])
            return bodies.forwarded(body, "messages")

        assert (sent("abc") == sent("cba")) == ordered

    def test_a_conversation_is_marked_at_its_end(self) -> None:
        bodies = self.bodies()
        first = user(f"{written('abc')}\nWhich?")
        bodies.served(messages(first), "messages")
        body = messages(first, {"role": "assistant", "content": "a"}, user("Why?"))
        sent = bodies.served(body, "messages")
        assert sent["messages"][-1] == user([part("Why?", cache_control=MARK)])
        assert self.marked(self.parts(sent)) == [2]

    @pytest.mark.parametrize("last", ["", "  ", [], [{"type": "thinking", "thinking": "x"}], [part(" ")]])
    def test_what_no_server_takes_a_mark_on_gets_none(self, last: Any) -> None:
        body = messages(user(written("ab")), {"role": "assistant", "content": "a"}, user(last))
        assert self.bodies().served(body, "messages")["messages"][-1] == user(last)

    def test_at_most_two(self) -> None:
        bodies = self.bodies()
        history: list[Any] = [user(f"{written('abcdefgh')}\nWhich?")]
        for turn in range(6):
            sent = json.dumps(bodies.served(messages(*history), "messages"))
            assert sent.count('"cache_control"') == (2 if turn else 0)
            history += [{"role": "assistant", "content": str(turn)}, user(f"{turn}?")]

    def test_tagged_documents_are_a_part_each(self) -> None:
        bodies = self.bodies()
        for names in ("abc", "cba"):
            parts = self.parts(bodies.served(messages(ragorder=tag(names)), "messages"))
        whole = PromptBuilder("").build("Which?", [Document(name, TEXTS[name]) for name in "abc"])
        assert "".join(each["text"] for each in parts) == whole.messages[-1]["content"]
        assert len(parts) == 4
        assert self.marked(parts) == [2]


TEXT = st.sampled_from(["", " ", "\n", "x", BOUNDARY, f"{BOUNDARY}y", f" {BOUNDARY} ", f"z{BOUNDARY}{BOUNDARY}"])


@given(st.lists(TEXT, min_size=2, max_size=8), st.sets(st.integers(1, 8)))
def test_chunks_are_the_texts_divided_at_documents(around: list[str], marked: set[int]) -> None:
    count = len(around) - 1
    pieces = [""] * (2 * count + 1)
    pieces[::2] = around
    pieces[1::2] = [f"<{number}>" for number in range(1, count + 1)]
    chunks = chunks_of(pieces, marked)
    parts = [
        "".join(chunk.text for chunk in chunks if chunk.part == number)
        for number in range("".join(pieces).count(BOUNDARY) + 1)
    ]
    assert BOUNDARY.join(parts) == "".join(pieces)
    assert [chunk.part for chunk in chunks] == sorted(chunk.part for chunk in chunks)
    for before, after in pairwise(chunks):
        assert before.part != after.part or (before.text.strip() and after.text.strip())
    for number in range(1, count + 1):
        (chunk,) = [chunk for chunk in chunks if f"<{number}>" in chunk.text]
        assert chunk.text.rstrip().endswith(f"<{number}>")
        assert chunk.marked == (number in marked)


MESSAGE_USAGE = {"input_tokens": 88, "cache_read_input_tokens": 512, "output_tokens": 1}
RESPONSE_USAGE = {"input_tokens": 600, "input_tokens_details": {"cached_tokens": 512}, "output_tokens": 7}
CHUNKS = [
    {"type": "message_start", "message": {"usage": MESSAGE_USAGE}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "yes"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "message_stop"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
    {"type": "message_stop"},
]
EVENTS = [
    {"type": "response.created", "response": {"usage": None}},
    {"type": "response.output_item.added", "item": {}},
    {"type": "response.output_text.delta", "delta": "yes"},
    {"type": "response.output_text.done", "text": "response.completed"},
    {"type": "response.completed", "response": {"usage": RESPONSE_USAGE}},
]
COHERE = {"tokens": {"input_tokens": 600.0, "output_tokens": 7.0}, "cached_tokens": 512.0}
COHERES = [
    {"type": "message-start", "delta": {"message": {}}},
    {"type": "content-delta", "delta": {"message": {"content": {"text": "yes"}}}},
    {"type": "message-end", "delta": {"usage": COHERE}},
]


def stream(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (each["type"].encode(), json.dumps(each).encode()) for each in events)


COUNTS = {"prompt_tokens": 600, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 512}}
EMPTY = b'data: {"choices":[]}\n\n'
LAST = b'data: {"choices":[],"usage":%s}\n\ndata: [DONE]\n\n' % json.dumps(COUNTS).encode()
STREAMS = {
    "chat": ROLE + b": ping\r\n\r\n" + TOKEN + b'data: {"choices":[],"usage":null}\n\n' + LAST,
    "messages": stream(CHUNKS),
    "responses": stream(EVENTS),
    "cohere": stream(COHERES),
}


class TestUsage:
    @pytest.fixture
    def traced(self) -> Iterator[Callable[[], int]]:
        """Bytes that have been allocated, and are kept."""
        tracemalloc.start()
        yield lambda: tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()

    @pytest.mark.parametrize("name", STREAMS)
    @given(cuts=st.lists(st.integers(0, 2000), max_size=20), line_end=st.sampled_from([b"\n", b"\r", b"\r\n"]))
    def test_a_stream_is_read_wherever_it_is_cut(self, name: str, cuts: list[int], line_end: bytes) -> None:
        content, reader = line_end.join(STREAMS[name].splitlines()) + line_end, StreamReader()
        for start, end in pairwise([0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]):
            reader.feed(content[start:end])
        assert (reader.served, reader.done) == (True, True)
        assert read_usage(reader.report()) == ReportedUsage(512, 600, 7)

    @given(st.lists(st.binary(max_size=30) | st.sampled_from([b"data: ", b"\n", b'"usage"', b"{", b"}", TOKEN, LAST])))
    def test_no_bytes_are_too_odd(self, chunks: list[bytes]) -> None:
        for reader in (StreamReader(), WholeReader()):
            for chunk in chunks:
                reader.feed(chunk)
            assert isinstance(read_usage(reader.report()), ReportedUsage)

    def test_of_a_long_line_nothing_is_kept(self, traced: Callable[[], int]) -> None:
        reader = StreamReader()
        for _ in range(100):
            reader.feed(b"data: " + b"x" * 100_000)
            assert traced() < 1.1 * (1 << 20)
        reader.feed(b"\n" + LAST)
        assert (reader.served, read_usage(reader.report())) == (True, ReportedUsage(512, 600, 7))

    def test_of_a_usage_only_known_counts_are_kept(self, traced: Callable[[], int]) -> None:
        reader = StreamReader()
        reader.feed(LAST.replace(b"data: [DONE]", b""))
        for event in range(30):
            fields = {f"{event}-{number}": "x" * 9000 for number in range(40)}
            counts = {"prompt_tokens": "x" * 50_000, "total_tokens": 10**50, "prompt_tokens_details": fields}
            reader.feed(b"data: %s\n\n" % json.dumps({"choices": [], "usage": fields | counts}).encode())
        assert traced() < 1 << 19
        assert read_usage(reader.report()) == ReportedUsage(512, 600, 7)

    def test_of_a_long_answer_nothing_is_kept(self, traced: Callable[[], int]) -> None:
        reader = WholeReader()
        for _ in range(100):
            reader.feed(b"x" * 100_000)
        assert traced() < 1 << 16
        assert read_usage(reader.report()) == ReportedUsage()

    @pytest.mark.parametrize(
        ("event", "served"),
        [
            ({"choices": [{"text": ""}]}, True),
            ({"choices": [{"delta": {"content": "x"}}]}, True),
            ({"choices": [{"delta": {"reasoning_content": "x"}}]}, True),
            ({"choices": [{"delta": {"tool_calls": [{}]}}]}, True),
            ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, True),
            ({"choices": [None, {"delta": {"content": "x"}}]}, True),
            (1, False),
            ([], False),
            ({}, False),
            ({"choices": 1}, False),
            ({"choices": [{"delta": {"role": "assistant"}}]}, False),
            ({"type": "response.failed", "response": {"usage": None}}, False),
            ({"type": "error", "response": {"usage": None}}, False),
        ],
        ids=str,
    )
    def test_what_was_generated_is_a_token(self, event: Any, served: bool) -> None:
        reader = StreamReader()
        reader.feed(b"data: %s\n" % json.dumps(event).encode())
        assert reader.served == served

    @pytest.mark.parametrize(
        ("chunks", "times", "tbt_s"),
        [
            # From the first token to the last.
            ([ROLE, TOKEN, b": ping\n\n", TOKEN[:9], TOKEN[9:], TOKEN, EMPTY], [10, 10.5, 11.5], 0.75),
            # The server reports 7 tokens: some events had several.
            ([ROLE, TOKEN, TOKEN, LAST], [10, 13], 0.5),
            ([], [], None),
            ([ROLE], [], None),
            ([TOKEN], [1], None),
            ([TOKEN, LAST], [1], None),
        ],
        ids=["by events", "as reported", "nothing", "a role", "one token", "one event"],
    )
    def test_the_time_between_tokens(self, chunks: list[bytes], times: list[float], tbt_s: float | None) -> None:
        clock = iter(times)
        reader = StreamReader(clock=lambda: next(clock))
        for chunk in chunks:
            reader.feed(chunk)
        assert reader.tbt_s() == (None if tbt_s is None else pytest.approx(tbt_s))
        assert WholeReader().tbt_s() is None

    @pytest.mark.parametrize(
        ("events", "first"), [(CHUNKS, 3), (EVENTS, 2), (COHERES, 1)], ids=["messages", "responses", "cohere"]
    )
    def test_it_is_served_from_its_first_token_on(self, events: list[dict[str, Any]], first: int) -> None:
        reader = StreamReader()
        for number, event in enumerate(events):
            reader.feed(stream([event]))
            assert reader.served == (number >= first)
            assert reader.done == (number == len(events) - 1)

    @pytest.mark.parametrize(
        "usage",
        [
            {"input_tokens": 60, "cache_creation_input_tokens": 28, "cache_read_input_tokens": 512, "output_tokens": 7},
            RESPONSE_USAGE,
            COUNTS,
            # LiteLLM's has both, and its prompt tokens are all of them.
            {"prompt_tokens": 600, "cache_read_input_tokens": 512, "completion_tokens": 7},
            COHERE,
        ],
        ids=["anthropic", "responses", "chat", "litellm", "cohere"],
    )
    def test_of_a_whole_answer(self, usage: dict[str, Any]) -> None:
        reader = WholeReader()
        reader.feed(json.dumps({"usage": usage}).encode())
        assert read_usage(reader.report()) == ReportedUsage(512, 600, 7)
        # A cache that read nothing says so.
        nothing = dict.fromkeys(("cache_creation_input_tokens", "cache_read_input_tokens"), 0)
        assert read_usage({"input_tokens": 5, "output_tokens": 1} | nothing) == ReportedUsage(0, 5, 1)


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """A server without the route."""
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"no such route"})


class TestErrors:
    def post(self, path: str, body: Any, headers: dict[str, str] | None = None, **options: Any) -> httpx2.Response:
        app = proxy_to(options.pop("far_end", refuse), template=DocumentTemplate(TEMPLATE), **options)
        return post_to(app, body, path, **headers or {})

    @pytest.mark.parametrize(
        ("path", "options", "status", "kind"),
        [
            ("/v1/messages", {"api_key": "k"}, 401, "authentication_error"),
            ("/v1/messages/count_tokens", {"api_key": "k"}, 401, "authentication_error"),
            ("/v1/messages", {"hosts": ["other"]}, 403, "permission_error"),
            ("/v1/messages", {"body_limit": 4}, 413, "request_too_large"),
        ],
    )
    def test_every_refusal_has_a_type_of_anthropics(
        self, path: str, options: dict[str, Any], status: int, kind: str
    ) -> None:
        answer = self.post(path, messages(user("Hello")), **options)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"]["type"] == kind

    @pytest.mark.parametrize("path", ["/v1/responses", "/v1/messagesX"])
    def test_other_routes_keep_openais(self, path: str) -> None:
        assert self.post(path, {}, api_key="k").json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("route", "name", "content"),
    [
        ("chat", None, {"error": {"message": "Gone.", "type": "server_error", "param": None, "code": "gone"}}),
        ("messages", "error", {"type": "error", "error": {"type": "api_error", "message": "Gone."}}),
        (
            "responses",
            "error",
            {"type": "error", "message": "Gone.", "param": None, "code": "gone", "sequence_number": 0},
        ),
    ],
)
def test_a_stream_ends_with_an_error_of_its_protocol(route: Any, name: str | None, content: dict[str, Any]) -> None:
    event = error_event(route, HTTPError(502, "Gone.", code="gone"))
    *named, data, end, last = event.decode().split("\n")
    assert named == ([] if name is None else [f"event: {name}"])
    assert (json.loads(data.removeprefix("data: ")), end, last) == (content, "", "")


class TestKeys:
    def sent(self, headers: dict[str, str], **options: Any) -> tuple[int, dict[str, str]]:
        """The status, and the headers that the server got."""
        got: dict[str, str] = {}

        async def keep(scope: Any, receive: Any, send: Any) -> None:
            got.update({name.decode(): value.decode() for name, value in scope["headers"]})
            await refuse(scope, receive, send)

        answer = TestErrors().post("/v1/messages", {}, headers, far_end=keep, **options)
        return answer.status_code, got

    def test_the_proxys_may_come_as_x_api_key(self) -> None:
        status, got = self.sent({"x-api-key": "k"}, api_key="k")
        assert (status, "x-api-key" in got, "authorization" in got) == (404, False, False)
        assert self.sent({"x-api-key": "wrong"}, api_key="k")[0] == 401
        assert self.sent({"x-api-key": "k", "authorization": "Bearer wrong"}, api_key="k")[0] == 401

    def test_the_clients_is_forwarded_if_the_proxy_requires_none(self) -> None:
        assert self.sent({"x-api-key": "client"})[1]["x-api-key"] == "client"

    def test_the_servers_is_sent_as_the_client_sends_its_own(self) -> None:
        got = self.sent({"x-api-key": "client"}, upstream_api_key="up")[1]
        assert (got["x-api-key"], got.get("authorization")) == ("up", None)
        got = self.sent({"authorization": "Bearer client"}, upstream_api_key="up")[1]
        assert (got.get("x-api-key"), got["authorization"]) == (None, "Bearer up")
        got = self.sent({"x-api-key": "client"}, upstream_api_key="up", api_key="client")[1]
        assert (got["x-api-key"], got.get("authorization")) == ("up", None)
