"""Marks of the proxy at clouds: chosen by the rules of a request's model, read from its first token on, and paid."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.inside import ordering_of

from ragorder import Orderer, Settings
from ragorder.adapters.cloud_orderers import CloudOrderers
from ragorder.clouds import cache_rules, read_cloud_usage

pytest.importorskip("starlette")

from support.bodies import Bodies
from support.sent_requests import TEMPLATE, user

from ragorder.adapters.proxy.ordering import OrderedRequest
from ragorder.benchmarks.common.clouds import CloudAnswer, SimulatedCloud

NAMES = "abcdefghijklmnopqrstuvwxyz"
TEXTS = {name: f"{name} is a document about {name}. " * 60 for name in NAMES}
SYSTEM = "Answer from the documents. " * 100
ANSWER = {"role": "assistant", "content": "It is."}
# Whose rules count, by route: the model, and the name of the field of a mark.
ROUTES = {
    "messages": ("claude-opus-5", "cache_control"),
    "chat": ("gpt-5.6", "prompt_cache_breakpoint"),
    "responses": ("gpt-5.6", "prompt_cache_breakpoint"),
}
EVERY_ROUTE = pytest.mark.parametrize("route", ROUTES)


def written(names: Iterable[str]) -> str:
    return "\n".join(TEMPLATE.format(id=name, text=TEXTS[name]) for name in names)


class Cloud:
    """The proxy's work on bodies for a simulated cloud."""

    def __init__(
        self, route: str, count: Callable[[str], int] | None = None, *, on_passed: Any = None, **options: Any
    ) -> None:
        self.route = route
        self.model, self.field = ROUTES[route]
        self.clouds = CloudOrderers(**options)
        self.bodies = Bodies(
            TEMPLATE,
            orderer=Orderer(block_size=16, strict=True, feedback=False),
            marks=["messages"],
            clouds=self.clouds,
            on_passed=on_passed,
        )
        self.rules = cache_rules("anthropic" if route == "messages" else "openai", self.model, options.get("ttl"))
        self.cloud = SimulatedCloud(self.rules, count)
        self.now = 0.0

    def body(self, *turns: Any, system: str = SYSTEM, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, **fields}
        if self.route == "responses":
            return body | {"instructions": system, "input": list(turns)}
        if self.route == "messages":
            return body | {"max_tokens": 8, "system": system, "messages": list(turns)}
        return body | {"messages": [{"role": "system", "content": system}, *turns]}

    def send(self, body: dict[str, Any]) -> tuple[dict[str, Any], OrderedRequest]:
        request = self.bodies.order(self.bodies.found(body, self.route))  # type: ignore[arg-type]
        return json.loads(request.take_body()), request

    def ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], CloudAnswer]:
        sent, request = self.send(body)
        return sent, self.answer(sent, request)

    def answer(self, sent: dict[str, Any], request: OrderedRequest) -> CloudAnswer:
        answer = self.cloud.begin(_chat(sent), self.now)
        self.cloud.first_token(answer)
        self.bodies.answer(request, usage=self.cloud.usage(answer))
        return answer

    def marks(self, sent: dict[str, Any]) -> int:
        return json.dumps(sent).count(f'"{self.field}"')


def _chat(sent: dict[str, Any]) -> dict[str, Any]:
    """A response's input as messages."""
    if "input" not in sent:
        return sent
    messages = sent["input"] if isinstance(sent["input"], list) else [user(sent["input"])]
    return {**sent, "messages": [{"content": sent["instructions"]}, *messages]}


class TestMarks:
    @EVERY_ROUTE
    def test_what_is_predicted_is_read(self, route: str) -> None:
        cloud, rng = Cloud(route), random.Random(0)
        plain = cost = off = 0.0
        for number in range(150):
            cloud.now += rng.expovariate(1 / 3)
            names = rng.sample(NAMES[: 6 + number // 30], 4)
            sent, request = cloud.send(cloud.body(user(f"{written(names)}\nWhich of {number}?")))
            answer = cloud.answer(sent, request)
            assert cloud.marks(sent) <= 4
            off += abs(answer.cached_tokens - request.predicted_tokens)
            plain += answer.prompt_tokens
            cost += cloud.rules.cost(answer.prompt_tokens, answer.cached_tokens, answer.written_tokens)
        assert cost < 0.75 * plain
        assert off < 0.02 * plain

    @EVERY_ROUTE
    def test_the_text_stays_as_it_was(self, route: str) -> None:
        cloud = Cloud(route)
        text = f"See:\n{written('abc')}\n\nWhich?"
        for _ in range(3):
            cloud.now += 2
            sent, _ = cloud.ask(cloud.body(user(text)))
            parts = (sent.get("messages") or sent["input"])[-1]["content"]
            assert "".join(each["text"] for each in parts) == text
            assert {each["type"] for each in parts} == {"input_text" if route == "responses" else "text"}
            # What comes before the documents, each of them, and the rest.
            assert len(parts) == 5

    @EVERY_ROUTE
    @pytest.mark.parametrize("where", ["documents", "system"])
    def test_a_client_with_marks_of_its_own_gets_neither_order_nor_prediction(
        self, route: str, where: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
    ) -> None:
        """Such a cache can be resumed at these marks alone: no other order of the documents leads to a hit."""
        told: list[str] = []
        cloud = Cloud(route, on_passed=told.append)
        mark = {cloud.field: {"type": "ephemeral"} if route == "messages" else {"mode": "explicit"}}
        kind = "input_text" if route == "responses" else "text"
        for names in ("abcd", "caeb", "dcba"):
            text = f"{written(names)}\nWhich?"
            if where == "documents":
                body = cloud.body(user([{"type": kind, "text": text, **mark}]))
            else:
                body = cloud.body(user([{"type": kind, "text": SYSTEM, **mark}]), ANSWER, user(text))
            content = json.dumps(body).encode()
            assert cloud.bodies.ordered(content, route) == content  # type: ignore[arg-type]
            if where == "system":
                # Documents that come in a tag must be sent, in the order of the client.
                tag = {"documents": [{"id": name, "text": TEXTS[name]} for name in names], "query": "Which?"}
                sent, request = cloud.send(body | {"ragorder": tag})
                told.pop()
                places = [json.dumps(sent).index(TEXTS[name][:60]) for name in names]
                assert places == sorted(places) and "ragorder" not in sent
                assert request.headers() == []
        assert told == ["client_marks"] * 3
        said = [each for each in cloud.bodies.orderer.degraded if "cache_control" in each]
        assert len(said) == 1 and "--no-marks" in said[0]

    @pytest.mark.parametrize("marked", [None, {"type": "ephemeral"}])
    def test_an_empty_mark_is_none(self, marked: Any) -> None:
        cloud = Cloud("messages")
        for names in ("abcd", "dcba"):
            cloud.now += 2
            part = {"type": "text", "text": f"{written(names)}?", "cache_control": marked}
            content = json.dumps(cloud.body(user([part]))).encode()
            assert (cloud.bodies.parse("messages", content) is None) == (marked is not None)

    def test_documents_that_cannot_be_marked_keep_their_order(self) -> None:
        """A tool's result is not divided into parts, and legacy completions have none: nothing of them is cached."""
        cloud = Cloud("messages")
        use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "find", "input": {}}]}
        for names in ("abcd", "dcba"):
            result = {"type": "tool_result", "tool_use_id": "1", "content": written(names)}
            for route, body in (
                ("messages", cloud.body(user("Which?"), use, user([result]))),
                ("completions", {"model": "gpt-5.6", "prompt": f"{written(names)}?"}),
            ):
                content = json.dumps(body).encode()
                assert cloud.bodies.ordered(content, route) == content  # type: ignore[arg-type]

    def test_openais_own_choice_of_a_mode_stays(self) -> None:
        cloud = Cloud("chat")
        body = cloud.body(user(written("abc")), prompt_cache_options={"mode": "implicit"}, prompt_cache_key="mine")
        assert cloud.bodies.parse("chat", json.dumps(body).encode()) is None

    def test_openai_is_told_that_marks_are_explicit_and_gets_a_key(self) -> None:
        for route in ("chat", "responses"):
            cloud = Cloud(route)
            sent, _ = cloud.ask(cloud.body(user(f"{written('abc')}?")))
            assert sent["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
            again, _ = cloud.ask(cloud.body(user(f"{written('cba')}?")))
            assert len(sent["prompt_cache_key"]) == 32 and again["prompt_cache_key"] == sent["prompt_cache_key"]

    def test_completions_get_neither_marks_nor_a_key(self) -> None:
        clouds = CloudOrderers()
        bodies = Bodies(TEMPLATE, clouds=clouds)
        for model in ("gpt-5.6", "gpt-5.4"):
            content = json.dumps({"model": model, "prompt": f"{written('abc')}?"}).encode()
            assert bodies.ordered(content, "completions") == content

    def test_a_text_as_input_becomes_a_message(self) -> None:
        cloud = Cloud("responses")
        sent, _ = cloud.ask({"model": "gpt-5.6", "instructions": SYSTEM, "input": f"{written('abc')}?"})
        (message,) = sent["input"]
        assert (message["role"], len(message["content"])) == ("user", 4)
        assert sent["instructions"] == SYSTEM

    def test_models_without_marks_are_ordered_by_their_rules(self) -> None:
        cloud = Cloud("chat")
        cloud.model = "gpt-5.4"
        for names in ("abcd", "dcba"):
            sent, request = cloud.send(cloud.body(user(f"{written(names)}?"), prompt_cache_key="mine"))
            request.begin(200, [])
            request.end()
        assert sent == cloud.body(user(f"{written('abcd')}?"), prompt_cache_key="mine")
        assert request.predicted_tokens % 128 == 0 and request.predicted_tokens > 1024

    def test_a_model_that_no_table_has_is_marked_by_the_plain_rule(self) -> None:
        cloud = Cloud("messages")
        cloud.model = "mine-1"
        marks = [cloud.marks(cloud.ask(cloud.body(user(f"{written(names)}?")))[0]) for names in ("abc", "cba")]
        assert marks == [0, 1]

    @pytest.mark.parametrize(
        ("ttl", "said"), [(None, {"type": "ephemeral"}), ("1h", {"type": "ephemeral", "ttl": "1h"})]
    )
    def test_the_life_is_the_one_asked_for(self, ttl: str | None, said: dict[str, str]) -> None:
        cloud = Cloud("messages", ttl=ttl)
        for _ in range(4):
            cloud.now += 1
            sent, _ = cloud.ask(cloud.body(user(f"{written('abc')}?")))
        marks = [each["cache_control"] for each in sent["messages"][0]["content"] if "cache_control" in each]
        assert marks and all(mark == said for mark in marks)

    def test_the_system_prompt_is_marked_where_it_is_in_front(self) -> None:
        for turns in ([user(f"{written('abc')}?")], [user("Hello."), ANSWER, user(f"{written('abc')}?")]):
            cloud = Cloud("messages")
            for _ in range(3):
                cloud.now += 1
                sent, _ = cloud.ask(cloud.body(*turns))
            first = sent["system"] if len(turns) == 1 else sent["messages"][1]["content"]
            assert isinstance(first, list) and "cache_control" in first[-1]


class TestConversations:
    @EVERY_ROUTE
    def test_each_turn_resumes_at_the_end_of_the_one_before(self, route: str) -> None:
        cloud = Cloud(route)
        history: list[Any] = [user(f"{written('abc')}\nWhich?")]
        former = 0
        for turn in range(6):
            cloud.now += 10
            sent, answer = cloud.ask(cloud.body(*history))
            assert cloud.marks(sent) <= 4
            if turn > 1:
                assert answer.cached_tokens == former
            former = answer.prompt_tokens
            history += [ANSWER, user(f"And the {turn}th? " * 20)]

    @EVERY_ROUTE
    def test_a_turn_longer_than_the_look_back_is_resumed(self, route: str) -> None:
        cloud = Cloud(route)
        history: list[Any] = [user(f"{written('abc')}\nWhich?"), ANSWER, user("And?")]
        cloud.ask(cloud.body(*history))
        kind = "input_text" if route == "responses" else "text"
        many = [{"type": kind, "text": f"Part {number}. "} for number in range(25)]
        cloud.now += 10
        _, answer = cloud.ask(cloud.body(*history, ANSWER, user(many)))
        assert answer.cached_tokens > 1800

    def test_marks_at_documents_leave_room_for_those_of_turns(self) -> None:
        cloud = Cloud("chat")
        for names in ("abcdefg", "abcdhij", "abcklmn", "abopqrs"):
            cloud.now += 2
            cloud.ask(cloud.body(user(f"{written(names)}?")))
        cloud.now += 2
        sent, answer = cloud.ask(cloud.body(user(f"{written('abcdefg')}?"), ANSWER, user("And?")))
        assert cloud.marks(sent) <= 4 and answer.cached_tokens > 1000


class TestReports:
    def test_lengths_are_learnt_from_them(self) -> None:
        """Without a tokenizer they are estimated at four characters a token."""
        cloud, rng = Cloud("messages", count=lambda text: -(-len(text) * 10 // 32)), random.Random(0)
        off = []
        for number in range(120):
            cloud.now += rng.expovariate(1 / 3)
            names = rng.sample(NAMES[:9], rng.randrange(2, 7))
            sent, request = cloud.send(cloud.body(user(f"{written(names)}\nWhich of {number}?")))
            answer = cloud.answer(sent, request)
            off.append(abs(answer.cached_tokens - request.predicted_tokens) / answer.prompt_tokens)
        assert sum(off[-40:]) / 40 < 0.03

    def test_the_cache_is_readable_from_the_first_token_on(self) -> None:
        cloud = Cloud("messages")
        body = cloud.body(user(f"{written('abc')}?"))
        sent, first = cloud.send(body)
        assert cloud.marks(sent)
        first.begin(200, [(b"content-type", b"text/event-stream")])
        first.feed(b'event: message_start\ndata: {"type": "message_start", "message": {"usage": {}}}\n\n')
        assert cloud.send(body)[1].predicted_tokens == 0
        delta = b'{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "yes"}}'
        first.feed(b"event: content_block_delta\ndata: %s\n\n" % delta)
        assert cloud.send(body)[1].predicted_tokens > 0

    def test_what_a_stream_reports_is_what_it_costs(self) -> None:
        cloud = Cloud("messages")
        _, request = cloud.send(cloud.body(user(f"{written('abc')}?")))
        ordering = ordering_of(request)
        assert ordering is not None
        usage = {"input_tokens": 100, "cache_read_input_tokens": 600, "cache_creation_input_tokens": 1000}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {"usage": {**usage, "output_tokens": 1}}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "yes"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
            {"type": "message_stop"},
        ]
        request.begin(200, [(b"content-type", b"text/event-stream")])
        for event in events:
            request.feed(b"data: %s\n\n" % json.dumps(event).encode())
        cost = ordering.cost
        assert cost is not None and cost.reported
        assert (cost.prompt_tokens, cost.cached_tokens, cost.written_tokens) == (1700, 600, 1000)
        assert cost.input_tokens == pytest.approx(100 + 60 + 1250)

    @pytest.mark.parametrize("usage", [{}, None, {"input_tokens": None}, {"cache_read_input_tokens": "many"}])
    def test_missing_counts_are_no_failure(self, usage: Any) -> None:
        cloud = Cloud("messages")
        for _ in range(2):
            _, request = cloud.send(cloud.body(user(f"{written('abc')}?")))
            cloud.bodies.answer(request, usage=usage)
        assert request.predicted_tokens > 0
        assert read_cloud_usage(usage).cached_tokens is None


class TestCloudOrderers:
    def test_a_generation_with_one_price_has_one(self) -> None:
        clouds = CloudOrderers()
        first = clouds.of("claude-opus-5")
        assert first is not None and first.provider == "anthropic"
        again = clouds.of("claude-opus-5-20270101")
        assert again is not None and again.orderer is first.orderer
        sol, luna = clouds.of("gpt-5.6-sol"), clouds.of("gpt-5.6-luna")
        assert sol is not None and luna is not None and sol.orderer is not luna.orderer, "their prices differ"
        assert clouds.of("mine-1") is None

    def test_of_one_provider_alone(self) -> None:
        clouds = CloudOrderers("deepseek", ttl="1h")
        found = clouds.of("deepseek-chat")
        assert found is not None and found.rules.resume == "interval"
        assert clouds.of("claude-opus-5") is None

    def test_wrong_settings_are_said_at_once(self) -> None:
        with pytest.raises(ValueError, match="host_tokens is not for a cache with rules"):
            CloudOrderers(settings=Settings(host_tokens=5))
