"""The LangChain adapter: documents in order, also in LangChain's own compositions, and nothing else changed."""

from __future__ import annotations

import asyncio
import copy
import importlib
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder import Orderer

pytest.importorskip("langchain_core")

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    BaseCallbackHandler,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from support.framework_contract import FrameworkContract, Recorder
from support.langchain_chains import DOCUMENTS, Watched, answering, names, retrieve, usage, watched, watching

from ragorder.adapters.langchain import CacheOrderRetriever, CacheOrderTransformer, FeedbackHandler

try:
    from langchain_tests.integration_tests import RetrieversIntegrationTests
except ImportError:  # It asks for newer versions than the adapter does.
    RetrieversIntegrationTests = object  # type: ignore[assignment, misc]


@pytest.fixture
def orderer(caplog: pytest.LogCaptureFixture) -> Iterator[Watched]:
    with watching(caplog) as orderer:
        yield orderer


@pytest.mark.merge
class TestLangChainsOwnSuite(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return CacheOrderRetriever

    @property
    def retriever_query_example(self) -> str:
        return "Where is secret number c?"

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
        store.add_documents(DOCUMENTS)
        return {"retriever": store.as_retriever(), "orderer": Orderer()}


class Chunk(Document):
    """A user's own kind of document."""

    page: int = 0


odd_metadata = st.dictionaries(
    st.sampled_from(["source", "ragorder", "page", ""]),
    st.one_of(st.none(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.just({"rank": 99})),
    max_size=3,
)
documents_lists = st.lists(
    st.builds(
        Chunk,
        page_content=st.sampled_from(["", "one", "two words", "\ud800 lone", "one\n\none"]),
        id=st.sampled_from([None, "", "a", "b"]),
        metadata=odd_metadata,
        page=st.integers(0, 3),
    ),
    max_size=7,
)
requests = st.lists(documents_lists, min_size=1, max_size=4)


@pytest.mark.merge
class _LangChainContract(FrameworkContract):
    def found(self, *names: str, text: str = "the text of {}.", source: str | None = None) -> list[Document]:
        metadata = {} if source is None else {"source": source}
        return [Document(text.format(name), id=name, metadata=metadata) for name in names]

    def read(self, document: Any) -> tuple[str, str]:
        return (document.id, document.page_content) if isinstance(document, Document) else ("", "")


class TestTransformerContract(_LangChainContract):
    def adapter(self, orderer: Any, **options: Any) -> CacheOrderTransformer:
        return CacheOrderTransformer(orderer, **options)

    def order(self, adapter: Any, documents: list[Document]) -> Any:
        return adapter.invoke(documents)

    async def aorder(self, adapter: Any, documents: list[Document]) -> Any:
        return await adapter.ainvoke(documents)


GIVEN: dict[str, list[Document]] = {}
"""The documents that a question finds."""


def _question(documents: list[Document]) -> str:
    question = str(uuid4())
    GIVEN[question] = documents
    return question


def _find(question: str) -> list[Document]:
    return GIVEN.pop(question)


class TestRetrieverContract(_LangChainContract):
    def adapter(self, orderer: Any, **options: Any) -> CacheOrderRetriever:
        return CacheOrderRetriever(RunnableLambda(_find), orderer, **options)

    def order(self, adapter: Any, documents: list[Document]) -> Any:
        return adapter.invoke(_question(documents))

    async def aorder(self, adapter: Any, documents: list[Document]) -> Any:
        return await adapter.ainvoke(_question(documents))


@pytest.mark.merge
class TestDocuments:
    @given(requests=requests, wrapped=st.booleans())
    def test_come_back_as_they_were_each_as_often_whatever_they_hold(
        self, requests: list[list[Document]], wrapped: bool
    ) -> None:
        orderer = Orderer(block_size=1, strict=True)
        retriever = CacheOrderRetriever(RunnableLambda(_find), orderer, rank_key="place")
        reorder = CacheOrderTransformer(orderer, rank_key="place")
        for documents in requests:
            before = copy.deepcopy(documents)
            got = retriever.invoke(_question(documents)) if wrapped else reorder.invoke(documents)
            assert documents == before
            ranks = [document.metadata.pop("place")["rank"] for document in got]
            assert sorted(ranks) == list(range(len(before)))
            assert got == [before[rank] for rank in ranks]
            assert {type(document) for document in got} <= {Chunk}

    def test_keep_a_users_own_metadata_of_that_name(self, orderer: Recorder) -> None:
        mine = Document("text", metadata={"ragorder": "mine", "page": 3})
        reorder = CacheOrderTransformer(orderer, rank_key="ragorder")
        assert reorder.invoke([mine])[0].metadata == {"ragorder": "mine", "page": 3}
        other = CacheOrderTransformer(orderer, rank_key="place").invoke([mine])[0]
        assert other.metadata == {"ragorder": "mine", "page": 3, "place": {"rank": 0}}


def test_a_document_without_an_id_is_known_by_its_text_and_never_by_its_source(orderer: Recorder) -> None:
    texts = [("text", "x"), ("text", "y"), ("another", "x")]
    CacheOrderTransformer(orderer).invoke([Document(text, metadata={"source": source}) for text, source in texts])
    one, two, other = orderer.requests[0].documents
    assert one.id == two.id == ""
    assert one.key == two.key != other.key


class Counting(BaseRetriever):
    """A retriever that takes a number of its own name, and nothing else."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any, top: int = 8) -> list[Document]:
        return DOCUMENTS[:top]


class TestTheNumberOfDocuments:
    def test_is_cut_before_ordering_best_first(self, orderer: Recorder) -> None:
        retriever = CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer, k=3)
        retriever.invoke("fed: ?")
        assert names(retriever.invoke("abcdef: ?")) == "abc"
        assert names(retriever.invoke("defabc: ?")) == "fed"
        assert [len(request.documents) for request in orderer.requests] == [3, 3, 3]

    async def test_of_a_call_comes_before_that_of_the_retriever(self, orderer: Recorder) -> None:
        retriever = CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer, k=2)
        assert names(retriever.invoke("abcdef: ?", k=4)) == "abcd"
        assert names(await retriever.ainvoke("abcdef: ?", k=4)) == "abcd"
        assert retriever.invoke("abcdef: ?", k=0) == []

    @pytest.mark.parametrize("wrap", ["plain", "bound", "configurable", "sequence", "wrapped again"])
    async def test_is_asked_of_a_retriever_that_takes_it(self, orderer: Recorder, wrap: str) -> None:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
        store.add_documents(DOCUMENTS)
        inner: Any = store.as_retriever(search_kwargs={"k": 2})
        inner = {
            "plain": inner,
            "bound": inner.with_config(tags=["x"]).with_retry(),
            "configurable": inner.configurable_fields(search_kwargs=ConfigurableField(id="search_kwargs")),
            "sequence": inner | (lambda documents: documents),
            "wrapped again": CacheOrderRetriever(retriever=inner, orderer=Orderer()),
        }[wrap]
        retriever = CacheOrderRetriever(retriever=inner, orderer=orderer)
        assert [len(retriever.invoke("?")), len(retriever.invoke("?", k=5))] == [2, 5]
        assert [len(await retriever.ainvoke("?")), len(await retriever.ainvoke("?", k=5))] == [2, 5]

    @pytest.mark.parametrize("wrap", ["retriever", "function", "function that takes all"])
    def test_is_not_asked_of_one_that_does_not_take_it(self, orderer: Recorder, wrap: str) -> None:
        taken: list[Any] = []

        def takes_all(question: str, **options: Any) -> list[Document]:
            taken.append(options)
            return DOCUMENTS

        inner: dict[str, Any] = {
            "retriever": Counting(),
            "function": RunnableLambda(lambda question: DOCUMENTS),
            "function that takes all": RunnableLambda(takes_all),
        }
        assert names(CacheOrderRetriever(retriever=inner[wrap], orderer=orderer).invoke("?", k=2)) == "ab"
        assert taken == ([{"k": 2}] if wrap == "function that takes all" else [])

    def test_goes_along_with_whatever_else_the_retriever_takes(self, orderer: Recorder) -> None:
        assert len(CacheOrderRetriever(retriever=Counting(), orderer=orderer).invoke("?", top=3)) == 3

    def test_is_refused_if_negative(self, orderer: Recorder) -> None:
        with pytest.raises(ValueError, match="k"):
            CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer, k=-1)
        with pytest.raises(ValueError, match="give 0 or more"):
            CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer).invoke("ab: ?", k=-1)


class Events(BaseCallbackHandler):
    def __init__(self) -> None:
        self.starts: list[tuple[str, Any, dict[str, Any]]] = []
        self.names: dict[Any, str] = {}

    def on_retriever_start(self, *_: Any, run_id: Any, parent_run_id: Any = None, **run: Any) -> None:
        self.names[run_id] = run["name"]
        self.starts.append((run["name"], self.names.get(parent_run_id), run["metadata"]))


class TestTheWrappedRetriever:
    def inner(self) -> Any:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
        store.add_documents([Document(tenant, metadata={"tenant": tenant}) for tenant in "ab" for _ in range(3)])
        search = ConfigurableField(id="search_kwargs")
        return store.as_retriever().configurable_fields(search_kwargs=search)

    async def test_runs_as_a_child_with_the_metadata_of_the_run(self, orderer: Recorder) -> None:
        events = Events()
        retriever = CacheOrderRetriever(retriever=Counting(), orderer=orderer)
        retriever.invoke("?", watched(events, metadata={"tenant": "a"}))
        await retriever.ainvoke("?", watched(events, metadata={"tenant": "b"}))
        assert [(name, parent) for name, parent, _ in events.starts] == [
            ("CacheOrderRetriever", None),
            ("Counting", "CacheOrderRetriever"),
        ] * 2
        assert [metadata["tenant"] for *_, metadata in events.starts] == ["a", "a", "b", "b"]

    async def test_sees_what_the_caller_configures(self, orderer: Recorder) -> None:
        """A tenant's filter must not get lost when the retriever is wrapped."""
        retriever = CacheOrderRetriever(retriever=self.inner(), orderer=orderer)
        chosen: RunnableConfig = {
            "configurable": {"search_kwargs": {"k": 3, "filter": lambda document: document.metadata["tenant"] == "b"}}
        }
        assert {document.page_content for document in retriever.invoke("?", chosen)} == {"b"}
        assert {document.page_content for document in await retriever.ainvoke("?", chosen)} == {"b"}
        assert {document.page_content for document in (retriever | (lambda found: found)).invoke("?", chosen)} == {"b"}
        assert len(retriever.invoke("?")) == 4


async def test_a_scope_may_come_with_the_run(orderer: Recorder) -> None:
    tenant = operator.itemgetter("tenant")
    retriever = CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer, scope=tenant)
    reorder = CacheOrderTransformer(orderer, scope=tenant)
    for name in "ab":
        config: RunnableConfig = {"metadata": {"tenant": name}}
        retriever.invoke("abc: ?", config)
        await retriever.ainvoke("abc: ?", config)
        reorder.invoke(DOCUMENTS, config)
        await reorder.ainvoke(DOCUMENTS, config)
        reorder.batch([DOCUMENTS], config)
        assign = RunnablePassthrough.assign(documents=operator.itemgetter("found") | reorder)
        assign.invoke({"found": DOCUMENTS}, config)
    assert [request.scope for request in orderer.requests] == ["a"] * 6 + ["b"] * 6


async def test_the_step_follows_any_retriever(orderer: Recorder) -> None:
    chain = RunnableLambda(retrieve) | CacheOrderTransformer(orderer)
    assert names(chain.invoke("abc: ?")) == "abc"
    assert names(await chain.ainvoke("cba: ?")) == "abc"
    assert list(map(names, chain.batch(["bca: ?", "acb: ?"]))) == ["abc", "abc"]
    assert list(map(names, await chain.abatch(["bca: ?", "cab: ?"]))) == ["abc", "abc"]
    assert [names(found) for found in chain.stream("cab: ?")] == ["abc"]


# ---------------------------------------------------------------- in LangChain's own compositions


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
        chain.invoke("#7", watched(handler))
        await chain.ainvoke("#7", watched(handler))
        assert orderer.finished == [usage(7)] * 2

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
        answering(retriever).invoke("bac #7", watched(handler))
        assert orderer.finished[-1] == usage(7)


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
        retriever = outer(CacheOrderRetriever(Finder(), orderer))
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
        answering(retriever).invoke("ab bc ca #7", watched(FeedbackHandler()))
        assert len(orderer.requests) == 1
        assert orderer.finished == [usage(7)]
        assert orderer.degraded == []

    def test_one_around_another_orders_once(self, orderer: Recorder) -> None:
        inner = CacheOrderRetriever(Finder(), orderer)
        retriever = CacheOrderRetriever(retriever=EachLetter(retriever=inner), orderer=orderer)
        assert sorted(names(retriever.invoke("ab cd"))) == list("abcd")
        assert asked(orderer) == ["abcd"]

    def test_the_number_of_documents_is_kept(self, orderer: Recorder) -> None:
        inner = CacheOrderRetriever(retriever=Finder(), orderer=orderer, k=1)
        assert names(EachLetter(retriever=inner).invoke("ab cd")) == "ac"

    def test_a_chain_or_tool_around_it_is_no_retriever(self, orderer: Recorder) -> None:
        retriever = CacheOrderRetriever(Finder(), orderer)
        answering(RunnableLambda(retriever.invoke)).invoke("ab #7", watched(FeedbackHandler()))
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
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda adapter: pickle.loads(pickle.dumps(adapter))])  # noqa: S301
    def test_of_adapters_have_the_same_options(self, copied: Callable[[Any], Any]) -> None:
        options: Any = {"key": by_name, "k": 3}
        for adapter in (
            CacheOrderRetriever(Finder(), Orderer(), **options),
            CacheOrderTransformer(Orderer(), **options),
        ):
            other = copied(adapter)
            assert (type(other), other.key, other.k) == (type(adapter), by_name, 3)
            assert other.orderer is not adapter.orderer and other.orderer.settings == adapter.orderer.settings
            assert names(other.invoke("abcd" if isinstance(adapter, BaseRetriever) else DOCUMENTS)) == "abc"
            assert other.orderer.fallbacks == 0

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])  # noqa: S301
    def test_of_the_handler_follow_nothing_yet(self, orderer: Recorder, copied: Callable[[Any], Any]) -> None:
        handler = FeedbackHandler(max_runs=50)
        handler.on_chain_start({}, {}, run_id=uuid4())
        other = copied(handler)
        assert (handler.open_runs, other.open_runs) == (1, 0)
        answering(CacheOrderRetriever(Finder(), orderer)).invoke("ab #7", watched(other))
        assert orderer.finished == [usage(7)]
