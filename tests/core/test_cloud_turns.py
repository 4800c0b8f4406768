"""Conversations at clouds: the marks at which the next turn resumes, and what they read there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from support.rings import length
from support.waiting import counted_lines

from ragorder import Document, History, Orderer, PromptBuilder, Segment
from ragorder.benchmarks.common.clouds import CloudAnswer, SimulatedCloud
from ragorder.clouds import TurnMarks, TurnParts, cache_rules, read_cloud_usage
from ragorder.clouds.turns import HistoryMark
from ragorder.conversation import Turn

SYSTEM = "Answer from the documents. " * 90
ANSWER = "It is as the documents say, and in short. " * 6
DOCUMENTS = [Document(f"d{number}", f"About {number}. " * 150) for number in range(60)]
# Template text, which the simulated clouds do not have, of each message.
TOLERANCE = 2

Form = Callable[[Turn], dict[str, Any]]
FORMS: dict[str, Form] = {"anthropic": Turn.anthropic, "bedrock": Turn.bedrock, "openai": Turn.openai}
MODELS = {"anthropic": "claude-opus-5", "bedrock": "claude-opus-5", "openai": "gpt-5.6"}
PROVIDERS = pytest.mark.parametrize("provider", FORMS)


class Chat:
    """A conversation with a simulated cloud, whose messages go through JSON as an application stores them."""

    def __init__(self, provider: str, cloud: SimulatedCloud | None = None, **options: Any) -> None:
        self.provider = provider
        self.now = 0.0
        self.rules = cache_rules(provider, MODELS[provider], options.get("ttl"))
        self.cloud = cloud or SimulatedCloud(self.rules)
        self.builder = PromptBuilder(SYSTEM)
        options = {"model": MODELS[provider], "builder": self.builder, "strict": True} | options
        self.orderer = Orderer.for_cloud(provider, clock=lambda: self.now, **options)  # type: ignore[arg-type]
        self.messages: list[dict[str, Any]] = []

    def ask(self, question: str, documents: list[Document], **options: Any) -> tuple[Turn, CloudAnswer]:
        self.messages = json.loads(json.dumps(self.messages))
        options = {"history": self.messages, "repeat": "send"} | options
        turn = self.builder.turn(question, documents, orderer=self.orderer, **options)
        body = FORMS[self.provider](turn)
        answer = self.cloud.begin(body, self.now)
        self.cloud.first_token(answer)
        turn.ordering.readable()
        read = read_cloud_usage(self.cloud.usage(answer), self.rules)
        counts = {"prompt_tokens": read.prompt_tokens, "written_tokens": read.written_tokens}
        self.messages = turn.confirm(ANSWER, read.cached_tokens, **counts)  # type: ignore[arg-type]
        return turn, answer


class TestTurns:
    @PROVIDERS
    def test_each_resumes_at_the_end_of_the_one_before(self, provider: str) -> None:
        chat = Chat(provider)
        written = 0
        for number in range(8):
            chat.now += 30
            turn, answer = chat.ask(f"Question {number}?", DOCUMENTS[3 * number : 3 * number + 3])
            assert abs(turn.ordering.cached_tokens - answer.cached_tokens) <= TOLERANCE * (2 * number + 1)
            assert answer.cached_tokens == written
            written = answer.cached_tokens + answer.written_tokens
            assert written == answer.prompt_tokens, "up to its question"
            assert turn.ordering.cost is not None and turn.ordering.cost.reported
        assert chat.orderer.fallbacks == 0

    @PROVIDERS
    def test_a_turn_with_more_parts_than_a_look_back_is_found(self, provider: str) -> None:
        chat = Chat(provider)
        chat.ask("Which?", DOCUMENTS[:30])
        chat.now += 10
        _, answer = chat.ask("And?", DOCUMENTS[30:60])
        assert answer.cached_tokens > 30 * 300

    @PROVIDERS
    def test_a_first_turn_shares_documents_with_other_conversations(self, provider: str) -> None:
        cloud = SimulatedCloud(cache_rules(provider, MODELS[provider]))
        chat = Chat(provider, cloud)
        for number in range(4):
            chat.messages = []
            chat.now += 10
            turn, answer = chat.ask(f"Question {number}?", DOCUMENTS[:4][:: (-1) ** number])
        assert answer.cached_tokens > 4 * 400
        assert turn.ordering.prefix_documents >= 3
        assert {each.id for each in turn.ordering.documents} == {each.id for each in DOCUMENTS[:4]}

    @PROVIDERS
    def test_another_answer_and_a_branch_resume_after_the_same_history(self, provider: str) -> None:
        chat = Chat(provider)
        chat.ask("First?", DOCUMENTS[:3])
        history = chat.messages
        asked = []
        for question in ("Second?", "Second?", "Other?"):
            chat.messages = list(history)
            chat.now += 10
            asked.append(chat.ask(question, DOCUMENTS[3:6]))
        first, again, branch = (answer for _, answer in asked)
        assert again.cached_tokens == first.prompt_tokens
        assert branch.cached_tokens >= first.cached_tokens > 0
        for turn, answer in asked:
            assert abs(turn.ordering.cached_tokens - answer.cached_tokens) <= 3 * TOLERANCE

    @PROVIDERS
    def test_a_process_that_knows_nothing_predicts_nothing_and_learns(self, provider: str) -> None:
        chat = Chat(provider)
        for number in range(3):
            chat.now += 10
            chat.ask(f"{number}?", DOCUMENTS[number : number + 3])
        other = Chat(provider, chat.cloud)
        other.messages, other.now = chat.messages, chat.now + 10
        turn, _ = other.ask("Third?", DOCUMENTS[9:12])
        assert turn.ordering.cached_tokens == 0
        other.now += 10
        turn, answer = other.ask("Fourth?", DOCUMENTS[12:15])
        assert answer.cached_tokens > 0
        assert abs(turn.ordering.cached_tokens - answer.cached_tokens) <= 12 * TOLERANCE

    def test_a_conversation_that_pauses_begins_again(self) -> None:
        chat = Chat("anthropic")
        chat.ask("First?", DOCUMENTS[:3])
        chat.now += 301
        turn, answer = chat.ask("Second?", DOCUMENTS[3:6])
        assert turn.ordering.cached_tokens == answer.cached_tokens == 0

    def test_where_turns_come_too_late_their_ends_are_written_no_more(self) -> None:
        chat = Chat("anthropic")
        shares = []
        for number in range(60):
            chat.messages = []
            for turn in range(2):
                chat.now += 400
                _, answer = chat.ask(f"{number}, {turn}?", [Document(f"{number} {turn}", f"{number} {turn} " * 400)])
                shares.append(answer.written_tokens / answer.prompt_tokens)
        assert shares[0] == 1 and max(shares[-20:]) < 0.9

    @pytest.mark.parametrize("ttl", ["5m", "1h"])
    def test_many_conversations_at_once_cost_less_than_without_a_cache(self, ttl: str) -> None:
        """Strictly: a body with five marks would be refused."""
        rng = random.Random(0)
        cloud = SimulatedCloud(cache_rules("anthropic", MODELS["anthropic"], ttl))
        chat = Chat("anthropic", cloud, ttl=ttl)
        conversations: list[list[dict[str, Any]]] = [[] for _ in range(8)]
        plain = cost = 0.0
        for number in range(160):
            place = rng.randrange(len(conversations))
            chat.now += rng.expovariate(1 / 5)
            chat.messages = conversations[place] if len(conversations[place]) < 12 else []
            _, answer = chat.ask(f"{number}?", rng.sample(DOCUMENTS[:12], 3))
            conversations[place] = chat.messages
            plain += answer.prompt_tokens
            cost += chat.rules.cost(answer.prompt_tokens, answer.cached_tokens, answer.written_tokens)
        assert cost / plain < {"5m": 0.45, "1h": 0.65}[ttl]
        assert chat.orderer.tree_size < 2000

    def test_many_turns_are_flat_in_memory(self) -> None:
        chat = Chat("anthropic")
        for number in range(length(1000, 250)):
            chat.now += 1
            if number % 20 == 0:
                chat.messages = []
            chat.ask(f"{number}?", DOCUMENTS[number % 50 : number % 50 + 1])
        assert chat.orderer.tree_size < 5_000
        chat.now += 301
        chat.orderer.predict_cached_tokens(DOCUMENTS[:1])
        assert chat.orderer.tree_size == 0

    def test_segments_of_ones_own_have_marks_too(self) -> None:
        orderer = Orderer.for_cloud("openai", model="gpt-5.6", builder=PromptBuilder(SYSTEM), strict=True)
        history = History([Segment("hello", 900)], question=Segment("what", 20))
        ordering = orderer.order(DOCUMENTS[:2], history=history)
        assert ordering.cloud is not None and ordering.cloud.turn_marks.question
        ordering.confirm()
        assert orderer.order(DOCUMENTS[:2], history=history).cached_tokens > 900
        assert orderer.order(DOCUMENTS[:2], history=History([])).cached_tokens == 0


class TestBodies:
    @PROVIDERS
    def test_have_the_texts_of_the_messages(self, provider: str) -> None:
        chat, plain = Chat(provider), Orderer(strict=True)
        messages: list[dict[str, Any]] = []
        for number in range(3):
            documents = DOCUMENTS[2 * number : 2 * number + 2]
            own = chat.builder.turn(f"{number}?", documents, history=messages, orderer=plain, repeat="send")
            turn, _ = chat.ask(f"{number}?", documents)
            assert _texts(turn.openai()["messages"]) == _texts(own.messages)
            messages = own.confirm(ANSWER)
        assert "cache" not in json.dumps(chat.messages), "marks are of one request, not of the history"

    def test_plain_orders_have_no_marks(self) -> None:
        builder = PromptBuilder(SYSTEM)
        turn = builder.turn("Which?", DOCUMENTS[:2], orderer=Orderer())
        assert turn.openai() == {"messages": turn.messages}
        assert "cache" not in repr(turn.anthropic()) + repr(turn.bedrock())
        assert [each["role"] for each in turn.anthropic()["messages"]] == ["user"]
        assert turn.anthropic()["system"] == [{"type": "text", "text": SYSTEM}]

    def test_marks_stand_at_parts_of_messages(self) -> None:
        messages = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": each} for each in "abq"]},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": each} for each in "cq"]},
        ]
        marks = TurnMarks.of([0, 1, 4, 5, 6], [3, 1], 1)
        assert marks == TurnMarks(True, (HistoryMark(0, 1, 3), HistoryMark(1, 1, 1)), (1,), True)
        body = TurnParts(messages, 1, marks, "1h").anthropic()
        control = {"type": "ephemeral", "ttl": "1h"}
        assert body["system"] == [{"type": "text", "text": "s", "cache_control": control}]
        marked = [["cache_control" in part for part in each["content"]] for each in body["messages"]]
        assert marked == [[True, False, False], [True], [True, True]]
        converse = TurnParts(messages, 1, marks, "1h").bedrock()
        point = {"cachePoint": {"type": "default", "ttl": "1h"}}
        assert converse["messages"][2]["content"] == [{"text": "c"}, point, {"text": "q"}, point]

    def test_steps_grow_no_faster_than_messages(self) -> None:
        steps = []
        for count in (100, 400):
            messages = [{"role": "user", "content": [{"type": "text", "text": "t"}]}] * count
            with counted_lines() as lines:
                TurnParts(messages, 0, TurnMarks(question=True)).anthropic()
            steps += lines
        assert steps[1] <= 4 * 1.5 * steps[0]

    def test_a_message_that_is_divided_otherwise_has_marks_at_its_end_alone(self) -> None:
        messages = [{"role": "user", "content": "abq"}, {"role": "user", "content": "q"}]
        for place, marked in ((1, False), (3, True)):
            body = TurnParts(messages, 0, TurnMarks.of([place], [3], 0)).anthropic()
            assert ("cache_control" in repr(body["messages"][0])) is marked

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "tool", "tool_call_id": "1", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "system", "content": "another"},
        ],
    )
    def test_messages_that_anthropic_and_bedrock_lack_are_refused(self, message: dict[str, Any]) -> None:
        parts = TurnParts([message, {"role": "user", "content": "q"}], 0, TurnMarks())
        for form in (parts.anthropic, parts.bedrock):
            with pytest.raises(ValueError, match=r"messages\[0\]"):
                form()
        assert parts.openai()["messages"][0] == message

    def test_a_tools_result_is_a_turn_at_openai(self) -> None:
        chat = Chat("openai")
        chat.ask("Which?", DOCUMENTS[:3])
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
        turn = chat.builder.turn(
            "", DOCUMENTS[3:5], history=[*chat.messages, call], orderer=chat.orderer, tool_call_id="1"
        )
        last = turn.openai()["messages"][-1]
        assert (last["role"], len(last["content"])) == ("tool", 2)
        turn.discard()


@pytest.mark.parametrize("content", [None, ""])
def test_breakpoints_are_not_set_on_messages_without_content(content: str | None) -> None:
    """OpenAI refuses an empty list of parts, Anthropic a breakpoint on an empty text."""
    call = {"role": "assistant", "content": content, "tool_calls": [{"id": "1"}]}
    messages = [{"role": "system", "content": "s"}, call, {"role": "tool", "tool_call_id": "1", "content": "a"}]
    marks = TurnMarks(history=(HistoryMark(0, 1, 1),), question=True)
    assert TurnParts(messages, 1, marks, None).openai()["messages"][1] == call


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    return [
        each["content"] if isinstance(each["content"], str) else "".join(part["text"] for part in each["content"])
        for each in messages
    ]


@pytest.mark.parametrize(
    ("own", "ttl", "places"),
    [("5m", "1h", [0]), ("5m", "5m", [0, 1, 2]), ("1h", "5m", [1, 2]), ("1h", "1h", [0, 1, 2])],
)
def test_marks_of_an_hour_never_follow_those_of_five_minutes(own: str, ttl: str, places: list[int]) -> None:
    """Of ours none is set where one of the application's leaves no room for it."""
    control = {"type": "ephemeral", "ttl": own}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": control}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    # Before the application's mark, after it, and at the end.
    marks = TurnMarks(system=True, history=(HistoryMark(1, 1, 1),), question=True)
    body = TurnParts(messages, 1, marks, ttl).anthropic()
    contents = [body["system"], body["messages"][1]["content"], body["messages"][2]["content"]]
    marked = [place for place, (part,) in enumerate(contents) if part.get("cache_control", {}).get("ttl") == ttl]
    assert marked == places
    assert body["messages"][0]["content"][0]["cache_control"] == control
