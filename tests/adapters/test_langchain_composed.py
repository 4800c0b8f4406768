"""The LangChain adapter in LangChain's own compositions: compressors, retrievers, ready-made chains, content parts."""

from __future__ import annotations

import asyncio
import copy
import importlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("langchain_core")

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from pydantic import Field
from support.framework_contract import Recorder

from ragorder import Orderer
from ragorder.adapters.langchain import CacheOrderRetriever, CacheOrderTransformer, FeedbackHandler, content_parts

DOCUMENTS = [Document(f"Secret number {name} is kept in drawer {name}.", id=name) for name in "abcdef"]


def names(documents: Sequence[Any]) -> str:
    return "".join(document.id for document in documents)


@pytest.fixture
def orderer() -> Recorder:
    return Recorder(Orderer(block_size=4, strict=True))


def asked(orderer: Recorder) -> list[str]:
    return [names(request.documents) for request in orderer.requests]


class Finder(BaseRetriever):
    """Finds the documents whose names are in the question, in its order."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [document for name in query for document in DOCUMENTS if document.id == name]


class EachLetter(BaseRetriever):
    """Asks another retriever several times for one question, as MultiQueryRetriever and MergerRetriever do."""

    retriever: Any

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        config: Any = {"callbacks": run_manager.get_child()}
        return [found for part in query.split() for found in self.retriever.invoke(part, config=config)]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        config: Any = {"callbacks": run_manager.get_child()}
        parts = [self.retriever.ainvoke(part, config=config) for part in query.split()]
        return [found for part in await asyncio.gather(*parts) for found in part]


# What LangChain calls these depends on its version: in `langchain` up to 0.3, in `langchain_classic` since.
CLASSIC = next((name for name in ("langchain_classic", "langchain") if importlib.util.find_spec(name)), None)


def classic(module: str) -> Any:
    try:
        return importlib.import_module(f"{CLASSIC}.{module}")
    except ImportError:
        pytest.skip("needs langchain-classic")


class TestACompressor:
    async def test_puts_documents_in_order_whatever_it_is_called(self, orderer: Recorder) -> None:
        reorder = CacheOrderTransformer(orderer)
        assert names(reorder.transform_documents(DOCUMENTS[:3])) == "abc"
        shuffled = [DOCUMENTS[rank] for rank in (2, 0, 1)]
        for ordered in (
            reorder.transform_documents(shuffled),
            await reorder.atransform_documents(shuffled),
            reorder.compress_documents(shuffled, "?"),
            await reorder.acompress_documents(shuffled, "?"),
            reorder.invoke(shuffled),
        ):
            assert names(ordered) == "abc"

    async def test_belongs_to_the_run_that_calls_it(self, orderer: Recorder) -> None:
        """So that feedback finds the orderings of compressors."""

        class Compressing(BaseRetriever):
            compressor: Any

            def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
                return self.compressor.compress_documents(DOCUMENTS[:2], query, callbacks=run_manager.get_child())

            async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
                callbacks = run_manager.get_child()
                return await self.compressor.acompress_documents(DOCUMENTS[:2], query, callbacks=callbacks)

        chain = answering(Compressing(compressor=CacheOrderTransformer(orderer)))
        handler = FeedbackHandler()
        chain.invoke("?", config={"callbacks": [handler]})
        await chain.ainvoke("?", config={"callbacks": [handler]})
        assert orderer.finished == [(True, 7, 12, 10)] * 2

    async def test_in_langchains_own_pipeline_and_compression_retriever(self, orderer: Recorder) -> None:
        pipeline = classic("retrievers.document_compressors").DocumentCompressorPipeline(
            transformers=[CacheOrderTransformer(orderer)]
        )
        for compressor in (pipeline, CacheOrderTransformer(orderer)):
            retriever = classic("retrievers").ContextualCompressionRetriever(
                base_compressor=compressor, base_retriever=Finder()
            )
            assert names(retriever.invoke("abc")) == "abc"
            assert names(await retriever.ainvoke("cba")) == "abc"
        assert len(orderer.requests) == 4
        handler = FeedbackHandler()
        answering(retriever).invoke("bac", config={"callbacks": [handler]})
        assert orderer.finished[-1] == (True, 7, 12, 10)


class Reporting(FakeListChatModel):
    """A model that reports 10 tokens of prompt, 7 of them cached."""

    responses: list[str] = Field(default_factory=lambda: ["so it is"])

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._generate(*args, **kwargs)
        result.generations[0].message.usage_metadata = {
            "input_tokens": 10,
            "output_tokens": 2,
            "total_tokens": 12,
            "input_token_details": {"cache_read": 7},
        }
        return result


def answering(retriever: Any) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{question}")])
    join = RunnableLambda(lambda documents: "\n\n".join(document.page_content for document in documents))
    inputs: Any = {"context": retriever | join, "question": RunnablePassthrough()}
    return inputs | prompt | Reporting() | StrOutputParser()


OUTER: dict[str, Callable[[Any], BaseRetriever]] = {
    "each letter": lambda inner: EachLetter(retriever=inner),
    "multi query": lambda inner: classic("retrievers").MultiQueryRetriever.from_llm(
        retriever=inner, llm=FakeListChatModel(responses=["ab\nbc\nca"])
    ),
    "ensemble": lambda inner: classic("retrievers").EnsembleRetriever(retrievers=[inner, Finder(), inner], id_key=None),
    "merger": lambda inner: classic("retrievers").MergerRetriever(retrievers=[inner, Finder()]),
}


class TestInsideAnotherRetriever:
    @pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
    async def test_it_orders_nothing_and_says_so(self, orderer: Recorder, outer: Callable[[Any], Any]) -> None:
        plain = outer(Finder())
        retriever = outer(CacheOrderRetriever(retriever=Finder(), orderer=orderer))
        for question in ("ab bc ca", "fe"):
            assert retriever.invoke(question) == plain.invoke(question)
            assert await retriever.ainvoke(question) == await plain.ainvoke(question)
        assert orderer.requests == []
        assert len(set(orderer.degraded)) == 1 and "wrap the outer retriever" in orderer.degraded[0]

    @pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
    def test_around_it_one_prompt_is_one_ordering_with_its_numbers(
        self, orderer: Recorder, outer: Callable[[Any], Any]
    ) -> None:
        retriever = CacheOrderRetriever(retriever=outer(Finder()), orderer=orderer)
        answering(retriever).invoke("ab bc ca", config={"callbacks": [FeedbackHandler()]})
        assert len(orderer.requests) == 1
        assert orderer.finished == [(True, 7, 12, 10)]
        assert orderer.degraded == []

    def test_one_around_another_orders_once(self, orderer: Recorder) -> None:
        inner = CacheOrderRetriever(retriever=Finder(), orderer=orderer)
        retriever = CacheOrderRetriever(retriever=EachLetter(retriever=inner), orderer=orderer)
        assert sorted(names(retriever.invoke("ab cd"))) == list("abcd")
        assert asked(orderer) == ["abcd"]

    def test_the_number_of_documents_is_kept(self, orderer: Recorder) -> None:
        inner = CacheOrderRetriever(retriever=Finder(), orderer=orderer, k=1)
        assert names(EachLetter(retriever=inner).invoke("ab cd")) == "ac"

    def test_a_chain_or_tool_around_it_is_no_retriever(self, orderer: Recorder) -> None:
        retriever = CacheOrderRetriever(retriever=Finder(), orderer=orderer)
        answering(RunnableLambda(retriever.invoke)).invoke("ab", config={"callbacks": [FeedbackHandler()]})
        assert asked(orderer) == ["ab"]
        assert orderer.degraded == []


def history_aware() -> Any:
    prompt = ChatPromptTemplate.from_messages([("placeholder", "{chat_history}"), ("human", "{input}")])
    model = FakeListChatModel(responses=["cb"])
    return classic("chains").create_history_aware_retriever(model, Finder(), prompt)


class TestAHistoryAwareRetriever:
    @pytest.mark.parametrize("wrap", ["retriever", "step"])
    async def test_in_a_retrieval_chain(self, orderer: Recorder, wrap: str) -> None:
        ordered: Any = history_aware() | CacheOrderTransformer(orderer)
        if wrap == "retriever":
            ordered = CacheOrderRetriever(retriever=history_aware(), orderer=orderer)
        combine = RunnableLambda(lambda inputs: names(inputs["context"]))
        chain = classic("chains").create_retrieval_chain(ordered, combine)
        assert chain.invoke({"input": "bc"})["answer"] == "bc"
        assert chain.invoke({"input": "cb"})["answer"] == "bc"
        again = {"input": "and those?", "chat_history": [("human", "abc?"), ("ai", "yes")]}
        assert (await chain.ainvoke(again))["answer"] == "bc"
        assert asked(orderer) == ["bc", "cb", "cb"]

    def test_options_of_a_retriever_are_kept(self, orderer: Recorder) -> None:
        ordered: Any = CacheOrderRetriever(history_aware(), orderer, k=1, rank_key="rank", tags=["mine"])
        assert [document.metadata for document in ordered.invoke({"input": "cb"})] == [{"rank": {"rank": 0}}]
        assert ordered.config["tags"] == ["mine"]


def by_name(document: Document) -> str:
    return f"key {document.id}"


class TestCopies:
    """A copy, deep or pickled, works, and begins with an orderer that knows nothing."""

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda adapter: pickle.loads(pickle.dumps(adapter))])  # noqa: S301
    def test_of_adapters(self, copied: Callable[[Any], Any]) -> None:
        for adapter in (
            CacheOrderRetriever(retriever=Finder(), orderer=Orderer(block_size=4), key=by_name, k=3),
            CacheOrderTransformer(Orderer(block_size=4), key=by_name, k=3),
        ):
            given = (lambda name: name) if isinstance(adapter, BaseRetriever) else (lambda name: Finder().invoke(name))
            assert names(adapter.invoke(given("abc"))) == "abc"
            other = copied(adapter)
            assert type(other) is type(adapter) and other.orderer is not adapter.orderer
            assert other.orderer.settings == adapter.orderer.settings
            assert names(other.invoke(given("cbad"))) == "cba"
            assert names(other.invoke(given("abc"))) == "cba"
            assert names(adapter.invoke(given("cba"))) == "abc"
            assert adapter.orderer.fallbacks == other.orderer.fallbacks == 0

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])  # noqa: S301
    def test_of_the_handler_follow_nothing_yet(self, orderer: Recorder, copied: Callable[[Any], Any]) -> None:
        handler = FeedbackHandler(max_runs=50)
        handler.on_chain_start({}, {}, run_id=uuid4())
        other = copied(handler)
        assert (handler.open_runs, other.open_runs) == (1, 0)
        answering(CacheOrderRetriever(retriever=Finder(), orderer=orderer)).invoke("ab", config={"callbacks": [other]})
        assert orderer.finished == [(True, 7, 12, 10)]


def found(names: str) -> list[Document]:
    return [Document(f"{name} is a document. " * 40, id=name, metadata={"source": name}) for name in names]


class TestMarks:
    """Messages with a content part for each document, and marks after those that a cache should keep."""

    @pytest.fixture
    def orderer(self) -> Orderer:
        return Orderer(block_size=16, strict=True, feedback=False)

    def beginnings(self, parts: list[dict[str, Any]]) -> str:
        return "".join(part["text"][0] for part in parts)

    def marked(self, parts: list[dict[str, Any]]) -> list[int]:
        return [place for place, part in enumerate(parts) if part.get("cache_control") == {"type": "ephemeral"}]

    def test_a_part_for_each_document_and_the_question(self) -> None:
        parts = content_parts(found("ab"), "Which?")
        assert [part["text"] for part in parts] == [*(f"{each.page_content}\n\n" for each in found("ab")), "Which?"]
        assert {part["type"] for part in parts} == {"text"}
        assert self.marked(parts) == []
        assert HumanMessage(parts).content == parts

    def test_marks_follow_what_earlier_requests_began_with(self, orderer: Orderer) -> None:
        asked = {"one": found("abc"), "two": found("dba")}
        retriever = CacheOrderRetriever(retriever=RunnableLambda(asked.__getitem__), orderer=orderer, mark_key="mark")
        first, second = (content_parts(retriever.invoke(name), "Which?", mark_key="mark") for name in asked)
        assert (self.beginnings(first), self.beginnings(second)) == ("abcW", "abdW")
        assert self.marked(first) == []
        assert self.marked(second) == [1]

    def test_documents_themselves_stay_as_they_are(self, orderer: Orderer) -> None:
        documents = found("abc")
        reorder = CacheOrderTransformer(orderer, mark_key="mark", rank_key="rank")
        for _ in range(2):
            ordered = reorder.invoke(documents)
        assert [each.metadata for each in documents] == [{"source": name} for name in "abc"]
        assert [each.metadata["rank"] for each in ordered] == [{"rank": rank} for rank in range(3)]
        assert any(each.metadata.get("mark") for each in ordered)

    def test_marks_of_an_earlier_request_are_gone(self, orderer: Orderer) -> None:
        marked = [Document(each.page_content, id=each.id, metadata={"mark": True}) for each in found("abcdef")]
        ordered = CacheOrderTransformer(orderer, mark_key="mark").invoke(marked)
        assert [each.metadata for each in ordered] == [{}] * 6
        assert all(each.metadata == {"mark": True} for each in marked)

    def test_a_choice_that_fails_sets_none_and_says_so(self, orderer: Orderer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.adapters.langchain.retriever.marked_documents", lambda ordering: 1 / 0)
        ordered = CacheOrderTransformer(orderer, mark_key="mark").invoke(found("ab"))
        assert [each.id for each in ordered] == ["a", "b"]
        assert "ZeroDivisionError" in orderer.degraded[0]

    def test_the_form_of_a_document_can_be_given(self) -> None:
        parts = content_parts(found("a"), "Which?", show=lambda document: f"<{document.id}>")
        assert [part["text"] for part in parts] == ["<a>", "Which?"]
