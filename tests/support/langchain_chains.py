"""Chains of LangChain on a model that says what a test tells it to report, and what became of their orderings."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnablePassthrough
from pydantic import Field

from ragorder import Orderer
from ragorder.adapters.langchain import CacheOrderRetriever, FeedbackHandler
from ragorder.ordering import RequestOutcome
from support.framework_contract import Recorder

DOCUMENTS = [Document(f"Secret number {name} is kept in drawer {name}.", id=name) for name in "abcdefgh"]
BY_ID = {document.id: document for document in DOCUMENTS}
Show = Callable[[list[Document]], str]
NO_NUMBERS = RequestOutcome(True)
DISCARDED = RequestOutcome(False)


def usage(number: int) -> RequestOutcome:
    """What the model reports of the question that has this number."""
    return RequestOutcome(True, number, 1003 + number, 1000 + number)


class Model(BaseChatModel):
    """Answers, and reports as many cached tokens as the last number in the prompt that is written #number.

    `errors` are raised one by one, a call each, before the first token (None: this call succeeds). A stream breaks
    after so many pieces as `breaks_after` says, and a call takes `delay_s`.
    """

    errors: list[BaseException | None] = Field(default_factory=list)
    breaks_after: int | None = None
    delay_s: float = 0.0
    reports: bool = True
    started: Any = None

    def _ask(self, messages: list[BaseMessage]) -> dict[str, Any] | None:
        prompt = "\n".join(str(message.content) for message in messages)
        if self.started is not None:
            self.started.set()
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        if not self.reports:
            return None
        number = int(re.findall(r"#(\d+)", prompt)[-1])
        counts = {"input_tokens": 1000 + number, "output_tokens": 3, "total_tokens": 1003 + number}
        return counts | {"input_token_details": {"cache_read": number}}

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        reported = self._ask(messages)
        time.sleep(self.delay_s)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("so it is", usage_metadata=reported))])

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        reported = self._ask(messages)
        await asyncio.sleep(self.delay_s)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("so it is", usage_metadata=reported))])

    def _stream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        reported = self._ask(messages)
        for place, piece in enumerate(["", "so ", "it ", "is"]):
            if place == self.breaks_after:
                raise ConnectionError("the stream broke")
            yield ChatGenerationChunk(message=AIMessageChunk(piece))
        yield ChatGenerationChunk(message=AIMessageChunk("", usage_metadata=reported, chunk_position="last"))

    async def _astream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in self._stream(messages):
            await asyncio.sleep(self.delay_s)
            yield chunk

    @property
    def _llm_type(self) -> str:
        return "listened-to"


class Told(Model):
    """A model with a result of its own making."""

    result: Any

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return self.result


class Slow(Model):
    """Fails when it is told to go on."""

    free: Any = None

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.free = threading.Event()

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.started.set()
        assert self.free.wait(60)
        return super()._generate(messages)


class BoomError(Exception):
    pass


def chat(message: AIMessage, **generation_info: Any) -> ChatGeneration:
    return ChatGeneration(message=message, generation_info=generation_info)


def answered(llm_output: Any = None, info: dict[str, Any] | None = None, **message: Any) -> ChatResult:
    return ChatResult(generations=[chat(AIMessage("a", **message), **(info or {}))], llm_output=llm_output)


PROMPT = ChatPromptTemplate.from_messages([("system", "Answer."), ("human", "{context}\n\nQuestion: {question}")])


def plain(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def shouted(documents: list[Document]) -> str:
    """A format that leaves nothing of the texts as it was."""
    return plain(documents).upper()


def retrieve(question: str) -> list[Document]:
    """Documents by the names before the question: "cab: what is it? #7"."""
    return [BY_ID[name] for name in question.partition(":")[0]]


def answering(retriever: Any, model: Runnable[Any, Any] | None = None, show: Show = plain) -> Runnable[str, Any]:
    """The chain of the tutorials."""
    inputs = {"context": retriever | show, "question": RunnablePassthrough()}
    return inputs | PROMPT | (model or Model()) | StrOutputParser()


def rag(orderer: Any, model: Runnable[Any, Any], show: Show = plain) -> Runnable[str, Any]:
    return answering(CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer), model, show)


def by_ranking(orderer: Recorder) -> list[tuple[str, RequestOutcome | None]]:
    """What became of each ordering, with the retrieval order of its documents, which tells whose it is."""
    return [
        (names(each.documents), finished) for each, finished in zip(orderer.requests, orderer.outcomes, strict=True)
    ]


def names(documents: Iterable[Any]) -> str:
    return "".join(document.id for document in documents)


class Watched(Recorder):
    """An orderer that records, and a handler that reports to it what the runs with this config become."""

    def __init__(self, orderer: Orderer) -> None:
        super().__init__(orderer)
        self.handler = FeedbackHandler()
        self.config = watched(self.handler)


@contextmanager
def watching(caplog: pytest.LogCaptureFixture) -> Iterator[Watched]:
    """Whatever happens in a test, nothing waits in the handler afterwards, and it had no trouble of its own."""
    orderer = Watched(Orderer(block_size=4, strict=True))
    with caplog.at_level(logging.WARNING, "ragorder"):
        yield orderer
    gc.collect()
    assert (orderer.handler.waiting_orderings, orderer.handler.open_runs) == (0, 0)
    logged = [record.getMessage() for record in caplog.get_records("call") if record.name == "ragorder"]
    # The log names a wrong report once a process, whichever test comes first.
    assert [text for text in logged if "an engine reported an invalid token count" not in text] == []


def watched(handler: BaseCallbackHandler, **config: Any) -> RunnableConfig:
    return {"callbacks": [handler], **config}


PLAIN = ("invoke", "ainvoke")
STREAMED = ("stream", "astream")


async def raised(chain: Any, ways: Sequence[str], asked: Any, config: Any) -> list[type[Exception]]:
    """What each of these methods of a chain raises."""
    errors: list[type[Exception]] = []
    for way in ways:
        try:
            result = getattr(chain, way)(asked, config)
            if way == "ainvoke":
                await result
            elif way == "stream":
                list(result)
            elif way == "astream":
                [piece async for piece in result]
        except Exception as error:
            errors.append(type(error))
    return errors
