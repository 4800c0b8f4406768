"""Conversations of the client of OpenAI-compatible servers, and the marks of a cloud's cache in what it sends."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from support.inside import turns_in

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai import OrderedClient
from ragorder.conversation import message_key

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
from support.openai_clients import CONFIRMED_GOOD, DOCUMENTS, QUERY, Async, Connect, Sync, connecting
from support.scripted_chat import ROLE, STOP, Response, Server, chat, error, usage


@pytest.fixture(params=[Sync, Async])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with connecting(request.param) as connect:
        yield connect


class TestConversation:
    ANSWER: ClassVar[dict[str, str]] = {"role": "assistant", "content": "Hello world"}

    def test_a_turn_adds_to_what_was_sent(self, connect: Connect) -> None:
        made = connect()
        talk = made.client.conversation(scope="tenant")
        answer = made.run(talk.ask(QUERY, DOCUMENTS[:2]))
        assert answer.text == "Hello world"
        (first,) = (request["messages"] for request in connect.server.requests)
        assert first == connect.builder.build(QUERY, answer.ordering).messages
        assert talk.messages == [*first, self.ANSWER]
        made.run(talk.ask("And there?", DOCUMENTS[1:3]))
        second = connect.server.requests[1]["messages"]
        assert second[:3] == [*first, self.ANSWER]
        assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
        assert (talk.turn.new, talk.turn.repeated) == ([DOCUMENTS[2]], [DOCUMENTS[1]])
        assert [request["cache_salt"] for request in connect.server.requests] == ["tenant", "tenant"]
        assert connect.orderer.finished == [CONFIRMED_GOOD] * 2

    def test_a_broken_stream_is_one_turn(self, connect: Connect) -> None:
        connect.server.plays(Response([ROLE, chat("Hel")], "cut"))
        made = connect(retries=1)
        conversation = made.client.conversation()
        made.run(conversation.ask(QUERY, DOCUMENTS))
        first, again = (request["messages"] for request in connect.server.requests)
        assert first == again and conversation.messages == [*again, self.ANSWER]

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_happens_what_is_sent_extends_what_is_replayed(self, connect: Connect, seed: int) -> None:
        """Also where answers are regenerated or fail, in branches, and after an application has cut off or redacted."""
        draw, server = random.Random(seed), connect.server
        orderer = Orderer(block_size=16, capacity_tokens=2000, strict=True, feedback=False)
        made = connect(orderer=orderer, retries=0)
        texts = [
            Document(f"d{each}", f"Version {version} of {each}. " * 9) for each in range(5) for version in range(2)
        ]
        failures = itertools.cycle([error(500), Response([ROLE, chat("Hel")], "cut"), error(400)])
        chats = [made.client.conversation()]
        asked: dict[int, tuple[str, list[Document], bool]] = {}
        for number in range(60):
            talk = draw.choice(chats)
            others = [(each, list(each.messages)) for each in chats if each is not talk]
            kind = draw.choice(["ask", "ask", "ask", "fail", "again", "branch", "cut", "edit"])
            question, documents = f"{number}?", draw.sample(texts, draw.randrange(3))
            again = id(talk) in asked and (kind == "again" or draw.random() < 0.3)
            before = list(talk.messages)
            if kind == "branch":
                chats.append(talk.branch())
            elif kind == "cut" and len(before) > 5:
                talk.messages = [before[0], *before[3:]]
            elif kind == "edit" and before:
                place = draw.choice([1, -1]) if len(before) > 5 else -1
                talk.messages[place] = before[place] | {"content": f"Edited: {number}."}
            elif kind == "fail":
                server.plays(next(failures))
                with pytest.raises((openai.APIError, httpx.TransportError)):
                    made.run(talk.regenerate() if again else talk.ask(question, documents))
                assert talk.messages == before
                if not again:
                    asked[id(talk)] = question, documents, False
            elif kind in ("ask", "again"):
                if again:
                    question, documents, answered = asked[id(talk)]
                    made.run(talk.regenerate(temperature=1.0))
                    before = before[:-2] if answered and len(before) > 3 else before[: 1 if answered else None]
                else:
                    made.run(talk.ask(question, documents))
                asked[id(talk)] = question, documents, True
                assert server.requests[-1]["temperature"] == float(again)
                sent = server.requests[-1]["messages"]
                assert sent[: len(before)] == before
                assert len(sent) == max(1, len(before)) + 1
                assert sent[-1]["content"].endswith(f"Question: {question}")
                assert talk.messages == [*sent, self.ANSWER]
                shown = "\0".join(message["content"] for message in sent if message["role"] == "user")
                assert all(f"[{each.id}]\n{each.text}\n\n" in shown for each in documents)
            assert all(each.messages == messages for each, messages in others)

    def test_a_streamed_turn_counts_once_it_is_whole(self, connect: Connect) -> None:
        made = connect()
        conversation = made.client.conversation()
        made.stream(QUERY, DOCUMENTS, take=1, of=conversation)
        assert conversation.messages == []
        made.stream(QUERY, DOCUMENTS, of=conversation)
        assert conversation.messages == [*connect.server.requests[1]["messages"], self.ANSWER]

    def test_the_engines_history_is_predicted(self, connect: Connect) -> None:
        connect.server.answer = lambda body: Response([ROLE, chat("Yes."), STOP, usage(100, 30)])
        made = connect()
        conversation = made.client.conversation()
        assert made.run(conversation.ask(QUERY, DOCUMENTS)).ordering.cached_tokens == 0
        # All that was computed: the last token of the answer was not.
        assert made.run(conversation.ask("And?", DOCUMENTS)).ordering.cached_tokens == 128

    def test_all_turns_have_the_topic_of_the_first(self, connect: Connect) -> None:
        made = connect(topic_header="x-session-id")
        conversation = made.client.conversation()
        for document in DOCUMENTS[:3]:
            made.run(conversation.ask(QUERY, [document]))
        assert conversation.topic([], []) == connect.orderer.topic(DOCUMENTS[:1])

    @pytest.mark.parametrize("role", ["system", "developer"])
    def test_stored_conversations_have_the_topic_of_their_first_message(self, connect: Connect, role: str) -> None:
        client = connect(topic_header="x-session-id", builder=PromptBuilder("Be brief.")).client

        def topic(said: str, scope: str | None = None) -> str | None:
            stored = [{"role": role, "content": "Be brief."}, {"role": "user", "content": said}, self.ANSWER]
            return client.conversation(stored, scope=scope).topic(DOCUMENTS, stored)

        assert topic("Owls?") == topic("Owls?") != topic("Bees?")
        # Digests of messages say what was asked.
        assert topic("Owls?") != topic("Owls?", "acme")
        assert message_key({"role": "user", "content": "Owls?"})[:16] not in str(topic("Owls?"))

    LONG: ClassVar[list[Document]] = [Document(f"d{number}", f"It is number {number}. " * 60) for number in range(5)]

    def lost(self, connect: Connect, rebase: Any) -> tuple[Any, Any]:
        """A client, and its conversation of two turns, whose documents are still held by another prompt only."""
        orderer = Orderer(strict=True, block_size=16, capacity_tokens=4096, feedback=False)
        made = connect(orderer=orderer)
        conversation = made.client.conversation(rebase=rebase)
        made.run(conversation.ask(QUERY, self.LONG[:2]))
        made.run(conversation.ask("And?", self.LONG[2:3]))
        made.generate(QUERY, [Document("x", "y" * 16_000)])
        made.generate(QUERY, [self.LONG[2], self.LONG[0]])
        return made, conversation

    def test_one_that_the_engine_has_lost_is_laid_out_again_if_allowed(self, connect: Connect) -> None:
        made, conversation = self.lost(connect, [])
        made.run(conversation.ask("So?", self.LONG[3:4]))
        assert conversation.turn.rebased
        sent = connect.server.requests[-1]["messages"]
        assert sent == conversation.turn.messages == conversation.messages[:-1]
        assert sent[3]["content"] == "[d2] is above.\nQuestion: And?"
        made.run(conversation.regenerate())
        assert connect.server.requests[-1]["messages"] == sent
        # From then on as ever.
        for talk in (conversation, conversation.branch()):
            made.run(talk.ask("Why?", self.LONG[:1]))
            assert connect.server.requests[-1]["messages"][: len(sent)] == sent
        made.run(conversation.regenerate())
        assert connect.server.requests[-1]["messages"][: len(sent)] == sent

    def test_stored_messages_are_laid_out_again_with_their_documents(self, connect: Connect) -> None:
        made, conversation = self.lost(connect, None)
        for rebase, moved in ((None, False), ([], False), (self.LONG[:3], True)):
            stored = made.client.conversation(conversation.messages, rebase=rebase)
            made.run(stored.ask("So?", self.LONG[3:4]))
            assert stored.turn.rebased == moved
            assert (connect.server.requests[-1]["messages"][:5] == conversation.messages) != moved
            made.generate(QUERY, [Document("x", "y" * 16_000)])
            made.generate(QUERY, [self.LONG[2], self.LONG[0]])

    def test_documents_of_messages_that_are_cut_off_are_forgotten(self, connect: Connect) -> None:
        made = connect()
        conversation = made.client.conversation(rebase=[])
        for number in range(12):
            made.run(conversation.ask("And?", [Document(f"n{number}", "Text.")]))
            conversation.messages = [conversation.messages[0], *conversation.messages[-4:]]
        assert len(conversation.earlier(conversation.messages)) == 2
        assert len(turns_in(conversation)) == 3

    def test_what_cannot_be_a_conversation_is_refused(self, connect: Connect, tokenizers: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="nothing to regenerate"):
            connect().client.conversation().regenerate()
        ids = connect(prompts="token_ids", builder=PromptBuilder(tokenizer=tokenizers["chatml"]))
        with pytest.raises(ValueError, match="needs messages"):
            ids.client.conversation()
        with pytest.raises(TypeError, match="history must hold messages"):
            connect().client.conversation(["hello"])
        with pytest.raises(TypeError, match="rebase must hold the documents"):
            connect().client.conversation(rebase=True)
        with pytest.raises(ValueError, match="tools: a conversation has text answers only"):
            connect().client.conversation().ask(QUERY, DOCUMENTS, tools=[{}])


class TestClouds:
    DOCUMENTS: ClassVar[list[Document]] = [Document(f"d{number}", f"{number} " * 1600) for number in range(4)]

    @pytest.fixture
    def server(self) -> Iterator[Server]:
        with Server() as server:
            yield server

    @pytest.fixture
    def rag(self, server: Server) -> Iterator[OrderedClient]:
        """A client of a cloud that writes the first prompt into its cache."""
        builder = PromptBuilder("Be brief.")
        orderer = Orderer.for_cloud("openai", model="gpt-5.6", builder=builder, strict=True)
        written = usage(2500, prompt_tokens_details={"cached_tokens": 0, "cache_write_tokens": 2400})
        server.plays(Response([ROLE, chat("Hi"), STOP, written]))
        with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0, timeout=60) as client:
            yield OrderedClient(client, model="gpt-5.6", orderer=orderer, builder=builder)

    def test_marks_are_sent_and_what_was_written_is_read(self, server: Server, rag: OrderedClient) -> None:
        answer, again = (rag.generate(QUERY, self.DOCUMENTS[:3]) for _ in range(2))
        for sent, ordering in zip(server.requests, (answer.ordering, again.ordering), strict=True):
            assert sent["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
            parts = sent["messages"][1]["content"]
            assert [part["text"] for part in parts[:3]] == [f"[{d.id}]\n{d.text}\n\n" for d in ordering.documents]
            marked = [place for place, part in enumerate(parts, 1) if "prompt_cache_breakpoint" in part]
            assert marked == [mark for mark in ordering.breakpoints if mark] != []
        assert answer.written_tokens == 2400
        assert answer.ordering.cost is not None and answer.ordering.cost.written_tokens == 2400
        assert again.ordering.cached_tokens > 0

    def test_turns_of_a_conversation_have_marks(self, server: Server, rag: OrderedClient) -> None:
        talk = rag.conversation()
        talk.ask(QUERY, self.DOCUMENTS[:2])
        talk.ask("And there?", self.DOCUMENTS[2:])
        first, second = server.requests
        assert first["prompt_cache_options"] == second["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
        # Where this turn resumes, and where the next does.
        ends = [sent["messages"][place]["content"][-1] for sent, place in ((first, 1), (second, 1), (second, 3))]
        assert all("prompt_cache_breakpoint" in part for part in ends)
        assert "prompt_cache_breakpoint" not in json.dumps(talk.messages)
