"""The contract of conversations in all frameworks: what was sent is replayed, and what stands there is named.

A new framework is one subclass with its hooks.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from ragorder import Orderer, PromptBuilder
from ragorder.citations import cited, number_label
from support.chat_server import BLOCK, ChatServer, chat_server
from support.framework_contract import Recorder, broken

SYSTEM = "Answer from the documents."
TURNS = ["ab", "bc", "cab", "d", "", "abcd"]
"""The documents that each turn retrieves."""


def text_of(name: str) -> str:
    return f"The text of {name}. " * 12


class FrameworkChat(ABC):
    """A conversation by a framework, as an application keeps it."""

    @abstractmethod
    def ask(self, question: str, names: str) -> str:
        """The answer to a question on documents of these names, in retrieval order."""

    @abstractmethod
    async def aask(self, question: str, names: str) -> str: ...

    @property
    @abstractmethod
    def sources(self) -> list[Any]:
        """The documents of the last turn."""

    @abstractmethod
    def label(self, document: Any) -> str: ...

    @abstractmethod
    def history(self) -> list[Any]:
        """The stored messages, without a system prompt."""

    @abstractmethod
    def cut(self, messages: int) -> None:
        """Only the last messages are kept."""


class ConversationContract(ABC):
    reports: ClassVar[bool] = True
    """Whether cached tokens are reported to the orderer."""
    functions: ClassVar[tuple[str, ...]] = ("label", "scope")
    """Options that may be a function."""

    @abstractmethod
    def chat(self, server: ChatServer, orderer: Any, builder: PromptBuilder, **options: Any) -> FrameworkChat:
        """A conversation with documents of `text_of(name)`."""

    @pytest.fixture
    def server(self) -> Iterator[ChatServer]:
        with chat_server() as server:
            yield server

    @pytest.fixture
    def builder(self) -> PromptBuilder:
        return PromptBuilder(SYSTEM)

    @pytest.fixture
    def recorder(self) -> Recorder:
        return Recorder(Orderer(block_size=BLOCK, strict=True))

    def test_six_turns_each_find_the_whole_history(
        self, server: ChatServer, recorder: Recorder, builder: PromptBuilder
    ) -> None:
        chat = self.chat(server, recorder, builder)
        for number, names in enumerate(TURNS):
            assert chat.ask(f"Question {number}?", names) == server.answers[-1]["content"]
        assert len(server.sent) == 6
        assert server.sent[0][0] == {"role": "system", "content": SYSTEM}
        server.check_replay()
        assert recorder.degraded == []
        self.check_reports(server, recorder)

    async def test_the_asynchronous_path_sends_the_same(
        self, server: ChatServer, recorder: Recorder, builder: PromptBuilder
    ) -> None:
        chat, other = self.chat(server, recorder, builder), self.chat(server, Orderer(block_size=BLOCK), builder)
        for number, names in enumerate(TURNS[:3]):
            await chat.aask(f"Question {number}?", names)
        server.check_replay()
        self.check_reports(server, recorder)
        sent = [server.sent[-1][1:]]
        server.bodies.clear()
        for number, names in enumerate(TURNS[:3]):
            other.ask(f"Question {number}?", names)
        assert [each["content"] for each in server.sent[-1][1::2]] == [each["content"] for each in sent[0][::2]]

    def test_a_document_that_stands_there_is_named(self, server: ChatServer, builder: PromptBuilder) -> None:
        for repeat, times in (("name", 1), ("send", 2)):
            chat = self.chat(server, Orderer(block_size=BLOCK, strict=True), builder, repeat=repeat)
            chat.ask("One?", "ab")
            chat.ask("Two?", "bc")
            whole = "".join(each["content"] for each in server.sent[-1])
            assert whole.count(text_of("b")) == times
            assert (f"[{number_label(text_of('b'))}] is above." in server.sent[-1][-1]["content"]) == (repeat == "name")
            assert [chat.label(each) for each in chat.sources] == [number_label(text_of(name)) for name in "cb"] or (
                repeat == "send"
            )

    def test_what_was_cut_off_is_sent_again(self, server: ChatServer, builder: PromptBuilder) -> None:
        chat = self.chat(server, Orderer(block_size=BLOCK, strict=True), builder)
        chat.ask("One?", "ab")
        chat.ask("Two?", "c")
        chat.cut(2)
        chat.ask("Three?", "ac")
        last = server.sent[-1][-1]["content"]
        assert text_of("a") in last and text_of("c") not in last

    def test_first_turns_share_their_documents(self, server: ChatServer, builder: PromptBuilder) -> None:
        orderer = Orderer(block_size=BLOCK, strict=True)
        self.chat(server, orderer, builder).ask("One?", "abc")
        self.chat(server, orderer, builder).ask("Another one?", "cba")
        assert server.sent[1][1]["content"].startswith(server.sent[0][1]["content"].partition("Question:")[0])
        assert server.cached[1] > 3 * len(text_of("a")) // 4 - BLOCK

    def test_labels_are_those_of_the_prompt_whatever_the_order(
        self, server: ChatServer, builder: PromptBuilder
    ) -> None:
        orderer = Orderer(block_size=BLOCK, strict=True)
        for names in ("abc", "cba"):
            chat = self.chat(server, orderer, builder)
            chat.ask("Which?", names)
            label = number_label(text_of("c"))
            assert f"[{label}]\n{text_of('c')}" in server.sent[-1][-1]["content"]
            (found,) = cited(f"It is so [{label}].", chat.sources, chat.label)
            assert chat.label(found) == label
            # In prompt order.
            places = [server.sent[-1][-1]["content"].index(f"[{chat.label(each)}]") for each in chat.sources]
            assert places == sorted(places) and len(places) == 3

    def test_a_failed_turn_leaves_the_history_as_it_was(
        self, server: ChatServer, recorder: Recorder, builder: PromptBuilder
    ) -> None:
        chat = self.chat(server, recorder, builder)
        chat.ask("One?", "ab")
        before = chat.history()
        server.broken = True
        with pytest.raises(Exception, match="broken"):
            chat.ask("Two?", "c")
        server.broken = False
        # What keeps the error keeps the turn.
        gc.collect()
        assert chat.history() == before
        chat.ask("Two?", "c")
        server.check_replay()
        if self.reports:
            assert [outcome.served for outcome in recorder.finished] == [True, False, True]

    def test_a_broken_function_sends_all_documents_as_ranked(self, server: ChatServer, builder: PromptBuilder) -> None:
        orderer = Orderer(block_size=BLOCK)
        for count, option in enumerate(self.functions, 1):
            chat = self.chat(server, orderer, builder, **{option: broken})
            chat.ask("One?", "ba")
            content = server.sent[-1][-1]["content"]
            assert 0 <= content.index(text_of("b")) < content.index(text_of("a"))
            assert orderer.fallbacks == count

    def test_scopes_share_nothing(self, server: ChatServer, builder: PromptBuilder) -> None:
        orderer = Orderer(block_size=BLOCK, strict=True)
        for scope, first in (("ours", "a"), ("theirs", "b")):
            self.chat(server, orderer, builder, scope=scope).ask("One?", "ab" if first == "a" else "ba")
            content = server.sent[-1][-1]["content"]
            assert content.startswith(f"[{number_label(text_of(first))}]")

    def test_wrong_options_are_refused_at_once(self, server: ChatServer, builder: PromptBuilder) -> None:
        with pytest.raises(ValueError, match="repeat must be"):
            self.chat(server, Orderer(), builder, repeat="never")
        with pytest.raises(ValueError, match="reference"):
            self.chat(server, Orderer(), builder, reference="above")

    def check_reports(self, server: ChatServer, recorder: Recorder) -> None:
        if self.reports:
            reported = [
                (usage["prompt_tokens"], cached) for usage, cached in zip(server.usages, server.cached, strict=True)
            ]
            assert [(each.prompt_tokens, each.cached_tokens) for each in recorder.finished] == reported
        else:
            assert all(outcome.served for outcome in recorder.finished)
