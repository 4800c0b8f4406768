"""The LangChain adapter: documents in order, nothing else changed, and each ordering told what became of it."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import operator
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice, permutations
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder import Orderer
from ragorder.ordering import RequestOutcome

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field
from support.framework_contract import FrameworkContract, Recorder

from ragorder.adapters.langchain import CacheOrderRetriever, CacheOrderTransformer, FeedbackHandler

pytestmark = pytest.mark.merge

try:
    from langchain_tests.integration_tests import RetrieversIntegrationTests
except ImportError:  # It asks for newer versions than the adapter does.
    RetrieversIntegrationTests = object  # type: ignore[assignment, misc]
try:
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Command, Send
except ImportError:  # So does LangGraph.
    StateGraph = None  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [Document(f"Secret number {name} is kept in drawer {name}.", id=name) for name in "abcdefgh"]
BY_ID = {document.id: document for document in DOCUMENTS}
Show = Callable[[list[Document]], str]
FIFTY = [f"{''.join(order)}: #{number}" for number, order in enumerate(islice(permutations("abcde"), 50))]
NO_NUMBERS = RequestOutcome(True)
DISCARDED = RequestOutcome(False)

# ---------------------------------------------------------------- a model that says what a test tells it to report


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


class TextModel(BaseLLM):
    """A text model, which sums up the usage of a batch as OpenAI's does, or tells that of each prompt."""

    of_each: bool = False

    def _generate(self, prompts: list[str], *_: Any, **__: Any) -> LLMResult:
        used = {"prompt_tokens": 1000, "total_tokens": 1003, "prompt_tokens_details": {"cached_tokens": 7}}
        each = {"usage": used} if self.of_each else {}
        generations = [[Generation(text="so it is", generation_info=each)] for _ in prompts]
        return LLMResult(generations=generations, llm_output={} if self.of_each else {"token_usage": used})

    @property
    def _llm_type(self) -> str:
        return "text"


PROMPT = ChatPromptTemplate.from_messages([("system", "Answer."), ("human", "{context}\n\nQuestion: {question}")])


def plain(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def shouted(documents: list[Document]) -> str:
    """A format that leaves nothing of the texts as it was."""
    return plain(documents).upper()


def retrieve(question: str) -> list[Document]:
    """Documents by the names before the question: "cab: what is it? #7"."""
    return [BY_ID[name] for name in question.partition(":")[0]]


def rag(orderer: Any, model: Runnable[Any, Any], show: Show = plain) -> Runnable[str, Any]:
    """The chain of the tutorials."""
    retriever = CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer)
    inputs = {"context": retriever | show, "question": RunnablePassthrough()}
    return inputs | PROMPT | model | StrOutputParser()


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


@pytest.fixture
def orderer(caplog: pytest.LogCaptureFixture) -> Iterator[Watched]:
    """Whatever happens in a test, nothing waits in the handler afterwards, and it had no trouble of its own."""
    orderer = Watched(Orderer(block_size=4, strict=True))
    with caplog.at_level(logging.WARNING, "ragorder"):
        yield orderer
    gc.collect()
    assert (orderer.handler.waiting_orderings, orderer.handler.open_runs) == (0, 0)
    logged = [record.getMessage() for record in caplog.get_records("call") if record.name == "ragorder"]
    # The log names a wrong report once a process, whichever test comes first.
    assert [text for text in logged if "an engine reported an invalid token count" not in text] == []


@pytest.fixture
def retriever(orderer: Watched) -> Any:
    return CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer)


def watched(handler: BaseCallbackHandler, **config: Any) -> RunnableConfig:
    return {"callbacks": [handler], **config}


# ---------------------------------------------------------------- the retriever


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


def steps(orderer: Any, found: list[list[Document]]) -> list[Callable[[], list[Document]]]:
    """The four ways of having documents put in order."""
    retriever = CacheOrderRetriever(retriever=RunnableLambda(lambda _: found[-1]), orderer=orderer, rank_key="place")
    reorder = CacheOrderTransformer(orderer, rank_key="place")
    return [
        lambda: retriever.invoke("?"),
        lambda: asyncio.run(retriever.ainvoke("?")),
        lambda: reorder.invoke(found[-1]),
        lambda: asyncio.run(reorder.ainvoke(found[-1])),
    ]


class _LangChainContract(FrameworkContract):
    package, extra, module = "langchain_core", "langchain", "ragorder.adapters.langchain"

    def found(self, *names: str, text: str = "the text of {}.", source: str | None = None) -> list[Document]:
        metadata = {} if source is None else {"source": source}
        return [Document(text.format(name), id=name, metadata=metadata) for name in names]

    def read(self, document: Any) -> tuple[str, str]:
        return (document.id, document.page_content) if isinstance(document, Document) else ("", "")


class TestTransformerContract(_LangChainContract):
    def adapter(self, orderer: Any, **options: Any) -> CacheOrderTransformer:
        return CacheOrderTransformer(orderer, **options)

    def order(self, adapter: Any, documents: list[Document]) -> list[Document]:
        ordered: list[Document] = adapter.invoke(documents)
        return ordered

    async def aorder(self, adapter: Any, documents: list[Document]) -> list[Document]:
        ordered: list[Document] = await adapter.ainvoke(documents)
        return ordered


GIVEN: dict[str, list[Document]] = {}
"""The documents that a question finds."""


def _question(documents: list[Document]) -> str:
    question = str(uuid4())
    GIVEN[question] = documents
    return question


def _find(question: str) -> list[Document]:
    return GIVEN.pop(question)


class TestRetrieverContract(_LangChainContract):
    test_without_the_framework_the_import_names_the_extra = None  # type: ignore[assignment]

    def adapter(self, orderer: Any, **options: Any) -> CacheOrderRetriever:
        retriever: CacheOrderRetriever = CacheOrderRetriever(RunnableLambda(_find), orderer, **options)
        return retriever

    def order(self, adapter: Any, documents: list[Document]) -> list[Document]:
        ordered: list[Document] = adapter.invoke(_question(documents))
        return ordered

    async def aorder(self, adapter: Any, documents: list[Document]) -> list[Document]:
        ordered: list[Document] = await adapter.ainvoke(_question(documents))
        return ordered


class TestDocuments:
    @given(requests=requests, way=st.integers(0, 3))
    def test_come_back_as_they_were_each_as_often_whatever_they_hold(
        self, requests: list[list[Document]], way: int
    ) -> None:
        found: list[list[Document]] = []
        step = steps(Orderer(block_size=1, strict=True), found)[way]
        for given_documents in requests:
            before = copy.deepcopy(given_documents)
            found.append(given_documents)
            got = step()
            assert given_documents == before
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


def test_a_chain_with_callbacks_at_the_model_alone_has_no_numbers(orderer: Watched) -> None:
    rag(orderer, Model(callbacks=[orderer.handler])).invoke("ab: #7")
    assert orderer.outcomes == [NO_NUMBERS]


# ---------------------------------------------------------------- feedback


class TestReportedTokens:
    async def test_reach_the_ordering(self, orderer: Watched) -> None:
        chain = rag(orderer, Model())
        chain.invoke("ab: #1", orderer.config)
        await chain.ainvoke("cd: #2", orderer.config)
        assert list(chain.stream("ef: #3", orderer.config))[1:] == ["so ", "it ", "is", ""]
        assert [piece async for piece in chain.astream("gh: #4", orderer.config)][1:] == ["so ", "it ", "is", ""]
        chain.with_config(callbacks=[orderer.handler]).invoke("ah: #5")
        assert [event async for event in chain.astream_events("bg: #6", orderer.config, version="v2")]
        assert orderer.outcomes == [usage(1), usage(2), usage(3), usage(4), usage(5), usage(6)]

    def test_reach_the_ordering_of_the_step(self, orderer: Watched) -> None:
        reorder = CacheOrderTransformer(orderer)
        chain = RunnablePassthrough.assign(documents=lambda given: retrieve(given["question"])).assign(
            context=operator.itemgetter("documents") | reorder | plain
        )
        (chain | PROMPT | Model()).invoke({"question": "ab: #7"}, orderer.config)
        assert orderer.outcomes == [usage(7)]

    @pytest.mark.parametrize("threads", [True, False])
    async def test_reach_each_ordering_of_fifty_concurrent_runs(self, orderer: Watched, threads: bool) -> None:
        """All retrieve the same documents, in orders of their own: the ranking says whose ordering it is."""
        chain = rag(orderer, Model(delay_s=0.005))
        if threads:
            chain.batch(FIFTY, {**orderer.config, "max_concurrency": 16})
        else:
            await chain.abatch(FIFTY, orderer.config)
        assert dict(by_ranking(orderer)) == {question[:5]: usage(number) for number, question in enumerate(FIFTY)}

    @pytest.mark.parametrize("show", [plain, shouted])
    def test_are_missing_where_the_engine_reports_none(self, orderer: Watched, show: Show) -> None:
        rag(orderer, Model(reports=False), show).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [NO_NUMBERS]

    def test_cached_answers_of_langchain_belong_to_no_ordering(self, orderer: Watched) -> None:
        chain = rag(orderer, Model(cache=InMemoryCache()))
        chain.invoke("ab: #7", orderer.config)
        chain.invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [usage(7), DISCARDED]


def chat(message: AIMessage, **generation_info: Any) -> ChatGeneration:
    return ChatGeneration(message=message, generation_info=generation_info)


OPENAI = {"prompt_tokens": 90, "total_tokens": 93, "prompt_tokens_details": {"cached_tokens": 64}}


class Told(Model):
    """A model with a result of its own making."""

    result: Any

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return self.result


def answered(llm_output: Any = None, info: dict[str, Any] | None = None, **message: Any) -> ChatResult:
    return ChatResult(generations=[chat(AIMessage("a", **message), **(info or {}))], llm_output=llm_output)


class TestTheDialectsOfUsage:
    COUNTS = 64, 93, 90

    @pytest.mark.parametrize(
        ("result", "counts"),
        [
            (answered({"token_usage": OPENAI}), COUNTS),
            (answered({"usage": OPENAI}), COUNTS),
            (answered(info={"token_usage": OPENAI}), COUNTS),
            (answered(response_metadata={"token_usage": OPENAI}), COUNTS),
            # What the standard field does not say, another may.
            (
                answered(
                    info={"usage": OPENAI}, usage_metadata={"input_tokens": 90, "output_tokens": 3, "total_tokens": 93}
                ),
                COUNTS,
            ),
            # More cached than there is, or no count at all: nothing that can be.
            (answered({"token_usage": OPENAI | {"prompt_tokens_details": {"cached_tokens": 91}}}), (None, 93, 90)),
            (answered({"token_usage": {"prompt_tokens": True, "total_tokens": -1, "prompt_tokens_details": 3}}), ()),
            (answered({"token_usage": "?"}), ()),
        ],
    )
    def test_are_understood(self, orderer: Watched, result: Any, counts: Any) -> None:
        rag(orderer, Told(result=result)).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [RequestOutcome(True, *counts)]

    async def test_text_models_report_beside_the_text(self, orderer: Watched) -> None:
        chain = rag(orderer, TextModel())
        chain.invoke("ab: #7", orderer.config)
        await chain.ainvoke("ba: #7", orderer.config)
        assert orderer.outcomes == [RequestOutcome(True, 7, 1003, 1000)] * 2

    def test_a_total_over_several_prompts_belongs_to_no_ordering(self, orderer: Watched) -> None:
        rag(orderer, TextModel()).batch(["ab: #7", "cd: #8"], orderer.config)
        rag(orderer, TextModel(of_each=True)).batch(["ab: #7", "cd: #8"], orderer.config)
        assert orderer.outcomes == [NO_NUMBERS] * 2 + [RequestOutcome(True, 7, 1003, 1000)] * 2


class TestWhichCallAnOrderingBelongsTo:
    """A run may have many LLM calls: the one counts whose prompt has the documents."""

    def test_not_one_that_rewrites_the_question_first(self, orderer: Watched) -> None:
        rewrite = RunnableLambda(lambda question: f"Rewrite {question} #99") | Model() | StrOutputParser()
        chain = RunnablePassthrough.assign(rewritten=operator.itemgetter("question") | rewrite)
        chain |= operator.itemgetter("question") | rag(orderer, Model())
        chain.invoke({"question": "ab: #7"}, orderer.config)
        assert orderer.outcomes == [usage(7)]

    @pytest.mark.parametrize("show", [plain, shouted])
    def test_not_those_that_grade_single_documents(self, orderer: Watched, show: Show, retriever: Any) -> None:
        grader = Model()

        def grade(documents: list[Document], config: RunnableConfig) -> list[Document]:
            grader.batch([f"Is this any good? {document.page_content} #99" for document in documents], config)
            return documents

        chain = {"context": retriever | grade | show, "question": RunnablePassthrough()} | PROMPT | Model()
        chain.invoke("abc: #7", orderer.config)
        assert orderer.outcomes == [usage(7) if show is plain else NO_NUMBERS]

    def test_the_one_of_its_own_branch(self, orderer: Watched, retriever: Any) -> None:
        """Four branches retrieve the same documents, which come in the same order: only the branch tells them apart.
        The last one to retrieve is the first one to ask."""
        turns = [threading.Event() for _ in range(5)]

        def branch(number: int, question: str, last: bool) -> Any:
            def show(documents: list[Document]) -> str:
                turns[number].set()
                assert last or turns[number + 1].wait(60)
                return plain(documents)

            def ask(prompt: str, config: RunnableConfig) -> Any:
                return Model().invoke(f"{prompt} #{number}", config)

            wait = RunnableLambda(lambda _: number == 0 or turns[number - 1].wait(60))
            return wait | (lambda _: question) | retriever | show | ask

        questions = ["abc: ?", "acb: ?", "bca: ?", "cab: ?"]
        branches = [branch(number, question, number == 3) for number, question in enumerate(questions)]
        RunnableParallel({str(number): each for number, each in enumerate(branches)}).invoke("go", orderer.config)
        assert len({names(request.ordering.documents) for request in orderer.requests}) == 1
        assert by_ranking(orderer) == [(question[:3], usage(number)) for number, question in enumerate(questions)]

    @pytest.mark.parametrize(
        ("asked", "prompts", "outcomes"),
        [
            # All its documents and no more: what one has retrieved is part of what the other one has.
            (["ab", "abc"], [("abc", 3), ("ab", 2)], [usage(2), usage(3)]),
            # Two retrievers into one prompt: what the engine had cached says something of the first one's documents.
            (["abc", "def"], [("defabc", 7)], [NO_NUMBERS, usage(7)]),
            # Documents in another order are not those of the ordering.
            (["abc"], [("cba", 99), ("abc", 7)], [usage(7)]),
        ],
        ids=["no more", "foremost", "order"],
    )
    def test_the_one_that_begins_with_its_documents_in_their_order(
        self, orderer: Watched, retriever: Any, asked: Any, prompts: Any, outcomes: Any
    ) -> None:
        """Side by side in one node."""

        def work(_: str, config: RunnableConfig) -> None:
            for each in asked:
                retriever.invoke(f"{each}: ?", config)
            for shown, number in prompts:
                Model().invoke(f"{plain([BY_ID[name] for name in shown])} #{number}", config)

        RunnableLambda(work).invoke("go", orderer.config)
        assert orderer.outcomes == outcomes

    def test_the_first_of_several_with_the_same_documents(self, orderer: Watched, retriever: Any) -> None:
        """The second one is served from what the first one has computed, even if it is ready first."""
        first, second = Model(delay_s=0.2, started=threading.Event()), Model()

        def late(prompt: str, config: RunnableConfig) -> Any:
            assert first.started.wait(60)
            return second.invoke(f"{prompt} #2", config)

        both = RunnableParallel(one=RunnableLambda(lambda prompt: f"{prompt} #1") | first, two=late)
        (retriever | plain | both).invoke("abc: ?", orderer.config)
        assert orderer.outcomes == [usage(1)]

    def test_the_second_if_the_first_fails(self, orderer: Watched, retriever: Any) -> None:
        first, others = Slow(errors=[ValueError("no")], started=threading.Event()), Model()

        def late(prompt: str, config: RunnableConfig) -> Any:
            assert first.started.wait(60)
            others.invoke(f"{prompt} #2", config)
            others.invoke(f"{prompt} #3", config)
            first.free.set()

        both = RunnableParallel(one=first.with_fallbacks([RunnableLambda(lambda _: "none")]), two=late)
        (retriever | plain | both).invoke("abc: ?", orderer.config)
        assert orderer.outcomes == [usage(2)]

    def test_and_others_may_still_be_under_way_then(self, orderer: Watched, retriever: Any) -> None:
        first, second = Slow(started=threading.Event()), Slow(started=threading.Event())

        def early(prompt: str, config: RunnableConfig) -> Any:
            assert second.started.wait(60)
            first.free.set()
            while not orderer.outcomes[0]:
                time.sleep(0.001)
            second.free.set()

        def late(prompt: str, config: RunnableConfig) -> Any:
            assert first.started.wait(60)
            return second.invoke(f"{prompt} #2", config)

        calls = RunnableParallel(one=RunnableLambda(lambda prompt: f"{prompt} #1") | first, two=late, three=early)
        (retriever | plain | calls).invoke("abc: ?", orderer.config)
        assert orderer.outcomes == [usage(1)]

    def test_not_one_that_is_anothers(self, orderer: Watched, retriever: Any) -> None:
        """Of what the other retriever found, the prompt shows nothing that could be recognised."""
        both = RunnableLambda(lambda question: plain(retriever.invoke("ab: ?")) + shouted(retriever.invoke("cd: ?")))
        (both | (lambda prompt: f"{prompt} #7") | Model()).invoke("go", orderer.config)
        assert orderer.outcomes == [usage(7), NO_NUMBERS]

    def test_not_only_if_the_prompt_shows_them_to_the_last_blank(self, orderer: Watched) -> None:
        found = [Document(" first\n"), Document("\tsecond "), Document(" ")]
        retriever = CacheOrderRetriever(retriever=RunnableLambda(lambda _: found), orderer=orderer)
        trimmed = RunnableLambda(lambda documents: "|".join(each.page_content.strip() for each in documents))
        chain = retriever | trimmed | (lambda prompt: f"{prompt} #7") | Model() | (lambda answer: "#99") | Model()
        chain.invoke("?", orderer.config)
        assert orderer.outcomes == [usage(7)]

    def test_none_if_several_might_be_it(self, orderer: Watched) -> None:
        chain = rag(orderer, Model(), shouted) | (lambda answer: f"{answer} #8") | Model()
        chain.invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [NO_NUMBERS]

    def test_none_if_one_call_might_be_that_of_two(self, orderer: Watched, retriever: Any) -> None:
        both = RunnableParallel(one=retriever, two=retriever) | (lambda found: f"{shouted(found['one'])} #7")
        (both | Model()).invoke("ab: ?", orderer.config)
        assert orderer.outcomes == [NO_NUMBERS] * 2

    def test_none_if_one_of_several_is_the_only_one_of_another(self, orderer: Watched, retriever: Any) -> None:
        """No documents can be recognised. The second were retrieved during the first one's call."""
        slow = Slow(started=threading.Event())

        def late(prompt: str, config: RunnableConfig) -> None:
            assert slow.started.wait(60)
            Model().invoke(f"{shouted(retriever.invoke('cd: ?', config))} #2", config)
            slow.free.set()

        calls = RunnableParallel(one=RunnableLambda(lambda prompt: f"{prompt} #1") | slow, two=late)
        (retriever | shouted | calls).invoke("ab: ?", orderer.config)
        assert orderer.outcomes == [NO_NUMBERS, usage(2)]

    def test_an_agent_retrieves_and_generates_repeatedly(self, orderer: Watched, retriever: Any) -> None:
        """Each prompt has all that was retrieved before; a tool retrieves."""

        @tool
        def search(question: str) -> str:
            """Search."""
            return plain(retriever.invoke(question))

        def agent(_: str, config: RunnableConfig) -> None:
            history, model = "", Model()
            for number, question in enumerate(["ab: ?", "cd: ?", "ba: ?"]):
                history += "\n" + search.invoke({"question": question}, config)
                model.invoke(f"{history} #{number}", config)

        RunnableLambda(agent).invoke("go", orderer.config)
        assert orderer.outcomes == [usage(0), usage(1), usage(2)]

    def test_a_model_outside_of_any_run_belongs_to_no_ordering(self, orderer: Watched, retriever: Any) -> None:
        found = retriever.invoke("ab: ?", orderer.config)
        Model().invoke(f"{plain(found)} #7", orderer.config)
        assert orderer.outcomes == [NO_NUMBERS]


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


# ---------------------------------------------------------------- what goes wrong


class BoomError(Exception):
    pass


def fails(_: Any) -> Any:
    raise BoomError


class Unreadable:
    def __getattr__(self, name: str) -> Any:
        raise BoomError


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


class TestErrors:
    """After any error the ordering is finished rightly and the handler holds nothing: its fixture checks that."""

    async def test_of_the_retriever_leave_nothing_to_finish(self, orderer: Watched) -> None:
        assert await raised(rag(orderer, Model()), PLAIN, "x: #7", orderer.config) == [KeyError] * 2
        assert orderer.requests == []

    async def test_of_the_model_discard(self, orderer: Watched) -> None:
        chain = rag(orderer, Model(errors=[BoomError() for _ in range(4)]))
        assert await raised(chain, PLAIN + STREAMED, "ab: #7", orderer.config) == [BoomError] * 4
        assert orderer.outcomes == [DISCARDED] * 4

    async def test_between_retrieval_and_model_discard(self, orderer: Watched, retriever: Any) -> None:
        chain = retriever | fails | Model()
        assert await raised(chain, PLAIN, "ab: #7", orderer.config) == [BoomError] * 2
        assert chain.batch(["ab: #7", "x: #7"], orderer.config, return_exceptions=True)
        assert orderer.outcomes == [DISCARDED] * 3

    @pytest.mark.parametrize("show", [plain, shouted])
    def test_after_the_model_change_nothing(self, orderer: Watched, show: Show) -> None:
        with pytest.raises(BoomError):
            (rag(orderer, Model(), show) | fails).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [usage(7)]

    @pytest.mark.parametrize("show", [plain, shouted])
    async def test_of_a_model_with_a_fallback_leave_it_to_the_fallback(self, orderer: Watched, show: Show) -> None:
        chain = rag(orderer, Model(errors=[BoomError(), BoomError()]).with_fallbacks([Model()]), show)
        chain.invoke("ab: #7", orderer.config)
        await chain.ainvoke("ba: #8", orderer.config)
        assert orderer.outcomes == [usage(7), usage(8)]

    def test_a_fallback_model_without_documents_discards(self, orderer: Watched) -> None:
        apology = RunnableLambda(lambda _: "Say that you are sorry. #99") | Model()
        rag(orderer, Model(errors=[BoomError()]).with_fallbacks([apology])).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [DISCARDED]

    def test_of_a_model_that_tries_again_leave_it_to_the_last_attempt(self, orderer: Watched) -> None:
        retries = Model(errors=[BoomError(), BoomError(), None]).with_retry(
            retry_if_exception_type=(BoomError,), wait_exponential_jitter=False
        )
        rag(orderer, retries).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [usage(7)]

    def test_of_a_chain_with_a_fallback_discard_the_first_attempt(self, orderer: Watched) -> None:
        """The fallback retrieves the same documents once more: its model's numbers are those of its own ordering."""
        chain = rag(orderer, Model(errors=[BoomError()])).with_fallbacks([rag(orderer, Model())])
        chain.invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [DISCARDED, usage(7)]

    def test_that_the_application_catches_discard(self, orderer: Watched) -> None:
        chain = rag(orderer, Model(errors=[BoomError()]))

        def work(question: str, config: RunnableConfig) -> str:
            with pytest.raises(BoomError):
                chain.invoke(question, config)
            return "none"

        (RunnableLambda(work) | (lambda _: "What else? #99") | Model()).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [DISCARDED]

    def test_of_a_first_attempt_leave_the_numbers_to_the_second_with_what_it_retrieved(
        self, orderer: Watched, retriever: Any
    ) -> None:
        model = Model(errors=[BoomError()])

        def work(question: str, config: RunnableConfig) -> None:
            with pytest.raises(BoomError):
                model.invoke(f"{plain(retriever.invoke(question, config))} #7", config)
            model.invoke(f"{plain(retriever.invoke(question, config))} #7", config)

        RunnableLambda(work).invoke("ab: ?", orderer.config)
        assert orderer.outcomes == [DISCARDED, usage(7)]

    def test_of_the_tool_that_retrieves_discard(self, orderer: Watched, retriever: Any) -> None:

        @tool
        def search(question: str) -> str:
            """Search."""
            retriever.invoke(question)
            raise BoomError

        def agent(_: str, config: RunnableConfig) -> str:
            with pytest.raises(BoomError):
                search.invoke({"question": "ab: ?"}, config)
            assert orderer.outcomes == [DISCARDED]
            return "none"

        RunnableLambda(agent).invoke("go", orderer.config)

    def test_of_a_handlers_own_are_not_the_chains(self, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise ValueError("Secret number a")

        orderer = Recorder(Orderer(block_size=4, strict=True))
        chain = rag(orderer, Model())
        for name in ("begin", "call", "answered", "expect"):
            with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG):
                patch.setattr(f"ragorder.adapters.langchain.runs.Runs.{name}", broken)
                assert chain.invoke("ab: #7", watched(FeedbackHandler())) == "so it is"
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
        assert "ValueError" in caplog.text and "Secret" not in caplog.text
        # An ordering that could not be handed over counts as served; one that was is finished at the end of its run.
        assert orderer.outcomes == [NO_NUMBERS] * 4

    def test_in_reported_usage_are_not_the_chains(self, orderer: Watched) -> None:
        chain = rag(orderer, Told(result=answered({"token_usage": Unreadable()})))
        chain.invoke("ab: #7", orderer.config)
        with pytest.raises(BoomError):
            (chain | fails).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [NO_NUMBERS] * 2


async def finishing(orderer: Recorder) -> None:
    """Asynchronous generators within one that was closed are closed by the event loop, in its own time."""
    for _ in range(200):
        gc.collect()
        if None not in orderer.outcomes:
            break
        await asyncio.sleep(0.01)


class TestStreams:
    @pytest.mark.parametrize(("breaks_after", "outcome"), [(0, DISCARDED), (1, DISCARDED), (2, NO_NUMBERS)])
    async def test_that_break_count_without_numbers_after_their_first_token(
        self, orderer: Watched, breaks_after: int, outcome: RequestOutcome
    ) -> None:
        """That a message begins, in a role, says nothing: some servers tell before they have computed anything."""
        chain = rag(orderer, Model(breaks_after=breaks_after))
        assert await raised(chain, STREAMED, "ab: #7", orderer.config) == [ConnectionError] * 2
        assert orderer.outcomes == [outcome] * 2

    @pytest.mark.parametrize("closed", [True, False])
    async def test_closed_or_dropped_early_count_without_numbers(self, orderer: Watched, closed: bool) -> None:
        chain = rag(orderer, Model())
        stream = chain.stream("ab: #7", orderer.config)
        assert [next(stream), next(stream)] == ["", "so "]
        pieces = chain.astream("ab: #7", orderer.config)
        assert [await anext(pieces), await anext(pieces)] == ["", "so "]
        if closed:
            stream.close()
            await pieces.aclose()
        del stream, pieces
        await finishing(orderer)
        assert orderer.outcomes == [NO_NUMBERS] * 2

    async def test_broken_with_a_fallback_count_without_numbers(self, orderer: Watched) -> None:
        """The first model has computed the prompt; its answer is lost, and the run with it."""
        chain = rag(orderer, Model(breaks_after=3).with_fallbacks([Model()]))
        assert await raised(chain, STREAMED[:1], "ab: #7", orderer.config) == [ConnectionError]
        assert orderer.outcomes == [NO_NUMBERS]

    async def test_without_usage_degrade_the_orderer_and_say_what_to_set(self, orderer: Watched) -> None:
        chain = rag(orderer, Model(reports=False))
        list(chain.stream("ab: #7", orderer.config))
        assert [piece async for piece in chain.astream("ba: #7", orderer.config)]
        assert orderer.outcomes == [NO_NUMBERS, NO_NUMBERS]
        assert len(set(orderer.degraded)) == 1
        assert "streamed without usage" in orderer.degraded[0] and "stream_usage=True" in orderer.degraded[0]

    def test_with_usage_or_broken_or_no_streams_at_all_degrade_nothing(self, orderer: Watched) -> None:
        list(rag(orderer, Model()).stream("ab: #7", orderer.config))
        rag(orderer, Model(reports=False)).invoke("ab: #7", orderer.config)
        with pytest.raises(ConnectionError):
            list(rag(orderer, Model(reports=False, breaks_after=2)).stream("ab: #7", orderer.config))
        closed = rag(orderer, Model(reports=False)).stream("ab: #7", orderer.config)
        next(closed)
        closed.close()
        assert orderer.outcomes == [usage(7), NO_NUMBERS, NO_NUMBERS, NO_NUMBERS]
        assert orderer.degraded == []

    def test_dropped_in_a_cycle_wait_for_no_lock(self, orderer: Watched) -> None:
        """The collector may close a stream in the middle of an event, in the very thread that is at that event."""
        chain = rag(orderer, Model())

        class Collecting:
            def __getattr__(self, name: str) -> Any:
                gc.collect()
                raise AttributeError(name)

        def ask() -> None:
            stream = chain.stream("ab: #1", orderer.config)
            next(stream)
            holder = [stream]
            # It has itself, and so is left to the collector.
            holder.append(holder)
            del stream, holder
            rag(orderer, Told(result=answered({"token_usage": Collecting()}))).invoke("cd: #2", orderer.config)
            list(chain.stream("ef: #3", orderer.config))

        gc.disable()
        try:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "an event of a finaliser waits for the event that it interrupted"
        finally:
            gc.enable()
        assert orderer.outcomes == [NO_NUMBERS, NO_NUMBERS, usage(3)]
        assert (orderer.handler.waiting_orderings, orderer.handler.open_runs) == (0, 0)

    @pytest.mark.skipif(not hasattr(BaseChatModel, "stream_events"), reason="this version has no stream_events")
    def test_by_protocol_events_are_understood(self, orderer: Watched, retriever: Any) -> None:
        def asks(model: Model) -> Runnable[str, Any]:
            def work(prompt: str, config: RunnableConfig) -> Any:
                stream = model.stream_events(f"{prompt} #7", config, version="v3")
                return stream.output

            return retriever | plain | work

        asks(Model()).invoke("ab: ?", orderer.config)
        for breaks_after in (2, 1):
            with pytest.raises(ConnectionError):
                asks(Model(breaks_after=breaks_after)).invoke("ab: ?", orderer.config)
        assert orderer.outcomes == [usage(7), NO_NUMBERS, DISCARDED]


class TestCancellation:
    async def cancel(self, work: Any, started: asyncio.Event) -> None:
        task = asyncio.create_task(work)
        async with asyncio.timeout(60):
            await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    @pytest.mark.parametrize("streams", [False, True])
    async def test_before_the_first_token_discards(self, orderer: Watched, streams: bool) -> None:
        async def stream(chain: Any) -> None:
            async for _ in chain.astream("ab: #7", orderer.config):
                pass

        started = asyncio.Event()
        chain = rag(orderer, Model(started=started, delay_s=10))
        await self.cancel(stream(chain) if streams else chain.ainvoke("ab: #7", orderer.config), started)
        assert orderer.outcomes == [DISCARDED]

    async def test_of_a_stream_after_its_first_token_counts(self, orderer: Watched) -> None:
        async def work() -> None:
            async for piece in rag(orderer, Model()).astream("ab: #7", orderer.config):
                if piece:
                    started.set()
                    await asyncio.sleep(10)

        started = asyncio.Event()
        await self.cancel(work(), started)
        await finishing(orderer)
        assert orderer.outcomes == [NO_NUMBERS]

    @pytest.mark.parametrize("alone", [True, False])
    async def test_of_the_retrieval_leaves_nothing(self, orderer: Watched, alone: bool) -> None:
        """LangChain reports no end of a cancelled retriever."""
        started = asyncio.Event()

        async def slow(question: str) -> list[Document]:
            started.set()
            await asyncio.sleep(10)
            return []

        retriever = CacheOrderRetriever(retriever=RunnableLambda(slow), orderer=orderer)
        await self.cancel((retriever if alone else retriever | plain).ainvoke("ab: ?", orderer.config), started)
        assert orderer.handler.open_runs == 0

    async def test_of_a_model_that_is_asked_alone_leaves_nothing(self, orderer: Watched) -> None:
        """LangChain reports none of that either."""
        started = asyncio.Event()
        await self.cancel(Model(started=started, delay_s=10).ainvoke("#7", orderer.config), started)
        assert orderer.handler.open_runs == 0

    async def test_of_many_leaves_nothing(self, orderer: Watched) -> None:
        chain = rag(orderer, Model(delay_s=0.01))
        tasks = [asyncio.create_task(chain.ainvoke(f"abc: #{number}", orderer.config)) for number in range(40)]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.001 * (number % 3))
            if number % 2:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        assert None not in orderer.outcomes
        assert {usage(number) for number in range(0, 40, 2)} <= set(orderer.outcomes)


class TestBounds:
    def test_runs_that_never_end_are_given_up(self, orderer: Recorder, retriever: Any) -> None:
        """A cancelled retriever of another kind: its end is not reported."""
        handler = FeedbackHandler(max_runs=10)
        streams = []
        for _ in range(20):
            chain = RunnablePassthrough.assign(documents=lambda given: retriever.invoke(given["question"]))
            stream = (chain | RunnableLambda(lambda given: given)).stream({"question": "ab: ?"}, watched(handler))
            next(stream)
            streams.append(stream)
            assert handler.open_runs <= 10
        assert orderer.outcomes.count(None) == handler.waiting_orderings <= 10
        assert set(orderer.outcomes) <= {NO_NUMBERS, None}
        for stream in streams:
            stream.close()
        assert (handler.waiting_orderings, handler.open_runs) == (0, 0)

    def test_a_run_without_end_keeps_so_many_orderings(self, orderer: Watched, retriever: Any) -> None:
        most = []

        def work(_: str, config: RunnableConfig) -> None:
            for _ in range(300):
                retriever.invoke("ab: ?", config)
                most.append(orderer.handler.waiting_orderings)

        RunnableLambda(work).invoke("go", orderer.config)
        assert max(most) == 256
        assert orderer.outcomes == [NO_NUMBERS] * 300

    def test_a_long_run_forgets_what_has_ended(self, orderer: Watched) -> None:
        chain = rag(orderer, Model())
        most = []

        def work(_: str, config: RunnableConfig) -> None:
            for number in range(50):
                chain.invoke(f"ab: #{number}", config)
                most.append((orderer.handler.open_runs, orderer.handler.waiting_orderings))

        RunnableLambda(work).invoke("go", orderer.config)
        assert set(most) == {(1, 0)}


# ---------------------------------------------------------------- LangGraph


class State(TypedDict, total=False):
    question: str
    documents: list[Document]
    answers: Annotated[list[str], operator.add]


@pytest.mark.skipif(StateGraph is None, reason="needs langgraph")
class TestLangGraph:
    def graph(self, orderer: Recorder, model: Model) -> Any:
        retriever = CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer)
        return self.in_two_nodes(
            lambda state: {"documents": retriever.invoke(state["question"])}, lambda state: self.ask(model, state)
        )

    @staticmethod
    def in_two_nodes(retrieve: Any, ask: Any) -> Any:
        """The nodes know of no callbacks."""
        graph = StateGraph(State).add_sequence([("retrieve", retrieve), ("ask", ask)])
        return graph.add_edge(START, "retrieve").compile()

    @staticmethod
    def prompt(state: Any) -> Any:
        return PROMPT.invoke({"context": plain(state["documents"]), "question": state["question"]})

    @classmethod
    def ask(cls, model: Model, state: Any) -> dict[str, Any]:
        return {"answers": [model.invoke(cls.prompt(state)).text]}

    async def test_hands_on_from_node_to_node(self, orderer: Watched) -> None:
        graph = self.graph(orderer, Model())
        graph.invoke({"question": "ab: #1"}, orderer.config)
        assert list(graph.stream({"question": "ab: #2"}, orderer.config, stream_mode="updates"))
        assert list(graph.stream({"question": "ab: #3"}, orderer.config, stream_mode="messages"))
        assert [update async for update in graph.astream({"question": "ab: #4"}, orderer.config)]
        graph.batch([{"question": "ab: #5"}], orderer.config)
        assert orderer.outcomes == [usage(number) for number in (1, 2, 3, 4, 5)]

    async def test_hands_on_between_coroutines(self, orderer: Watched, retriever: Any) -> None:
        model = Model(delay_s=0.01)

        async def search(state: State) -> State:
            return {"documents": await retriever.ainvoke(state["question"])}

        async def ask(state: State) -> State:
            return {"answers": [(await model.ainvoke(self.prompt(state))).text]}

        graph = self.in_two_nodes(search, ask)
        await asyncio.gather(*(graph.ainvoke({"question": f"abc: #{number}"}, orderer.config) for number in range(10)))
        assert sorted(orderer.outcomes, key=str) == sorted(map(usage, range(10)), key=str)

    def fan_out(self, orderer: Recorder, questions: list[str], model: Model) -> Any:
        graph = StateGraph(State)
        inner = self.graph(orderer, model)
        graph.add_node("work", lambda state: {"answers": inner.invoke(state)["answers"]})
        graph.add_conditional_edges(START, lambda _: [Send("work", {"question": question}) for question in questions])
        graph.add_edge("work", END)
        return graph.compile()

    async def test_keeps_nodes_apart_that_run_side_by_side(self, orderer: Watched) -> None:
        """Six at a time retrieve the same documents, in the same order, in one outermost run."""
        six = [f"{''.join(order)}: #{number}" for number, order in enumerate(permutations("abc"))]
        graph = self.fan_out(orderer, six, Model(delay_s=0.01))
        graph.invoke({}, orderer.config)
        await graph.ainvoke({}, orderer.config)
        assert sorted(by_ranking(orderer)) == sorted([(question[:3], usage(int(question[-1]))) for question in six] * 2)

    def test_keeps_questions_apart_that_part_after_retrieval(self, orderer: Watched, retriever: Any) -> None:
        """Nodes that retrieve, then nodes that ask: of the same documents, each ordering gets one call's numbers."""

        class Many(TypedDict, total=False):
            question: str
            found: Annotated[list[State], operator.add]
            answers: Annotated[list[str], operator.add]

        def search(state: Any) -> Any:
            return {"found": [{"question": state["question"], "documents": retriever.invoke(state["question"])}]}

        graph = StateGraph(Many)
        graph.add_node("retrieve", search)
        graph.add_node("gather", lambda state: {})
        graph.add_node("ask", lambda state: self.ask(Model(), state))
        questions = ["abc: #0", "abc: #1", "def: #2", "abcd: #3"]
        graph.add_conditional_edges(START, lambda _: [Send("retrieve", {"question": each}) for each in questions])
        graph.add_edge("retrieve", "gather")
        graph.add_conditional_edges("gather", lambda state: [Send("ask", found) for found in state["found"]], ["ask"])
        graph.compile().invoke({}, orderer.config)
        assert set(by_ranking(orderer)) == {("abc", usage(0)), ("abc", usage(1)), ("def", usage(2)), ("abcd", usage(3))}

    async def test_discards_what_a_failing_node_retrieved(self, orderer: Watched) -> None:
        graph = self.graph(orderer, Model(errors=[BoomError(), BoomError(), BoomError()]))
        ways = ("invoke", "ainvoke", "stream")
        assert await raised(graph, ways, {"question": "ab: #7"}, orderer.config) == [BoomError] * 3
        assert orderer.outcomes == [DISCARDED] * 3

    def test_finishes_a_stream_that_is_closed_early(self, orderer: Watched) -> None:
        stream = self.graph(orderer, Model()).stream({"question": "ab: #7"}, orderer.config, stream_mode="updates")
        assert "retrieve" in next(stream)
        stream.close()
        assert orderer.outcomes == [DISCARDED]

    def test_takes_the_numbers_of_the_attempt_that_succeeded(self, orderer: Watched, retriever: Any) -> None:
        from langgraph.types import RetryPolicy

        model = Model(errors=[BoomError()])
        graph = StateGraph(State)

        def both(state: State) -> dict[str, Any]:
            return self.ask(model, state | {"documents": retriever.invoke(state["question"])})

        policy = RetryPolicy(initial_interval=0.001, retry_on=BoomError)
        graph.add_node("both", both, retry_policy=policy)
        graph.add_edge(START, "both")
        graph.compile().invoke({"question": "ab: #7"}, orderer.config)
        assert orderer.outcomes == [DISCARDED, usage(7)]

    def test_does_not_take_a_way_out_of_a_subgraph_for_an_error(self, orderer: Watched, retriever: Any) -> None:
        """A subgraph retrieves and leaves for a node of its parent's, which LangGraph does by raising."""

        def search(state: State) -> Command[str]:
            found = {"documents": retriever.invoke(state["question"])}
            return Command(graph=Command.PARENT, goto="ask", update=found)

        inner = StateGraph(State)
        inner.add_node("retrieve", search)
        inner.add_edge(START, "retrieve")
        graph = StateGraph(State)
        graph.add_node("inner", inner.compile(), destinations=("ask",))
        graph.add_node("ask", lambda state: self.ask(Model(), state))
        graph.add_edge(START, "inner")
        graph.compile().invoke({"question": "ab: #7"}, orderer.config)
        assert orderer.outcomes == [usage(7)]


# ---------------------------------------------------------------- beside it


class Others(AsyncCallbackHandler):
    """A handler of another kind."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self.heard.append("start")

    async def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.heard.append("end")


class TestOtherHandlers:
    async def test_hear_what_they_heard_before(self, orderer: Watched) -> None:
        others = Others()
        config: RunnableConfig = {"callbacks": [others, orderer.handler]}
        chain = rag(orderer, Model())
        chain.invoke("ab: #7", config)
        await chain.ainvoke("ab: #7", config)
        assert others.heard == ["start", "end"] * 2

    def test_of_our_kind_one_is_enough(self, orderer: Watched) -> None:
        """One bound to the chain and another one given with the call: one of them finishes, both forget."""
        other = FeedbackHandler()
        rag(orderer, Model()).with_config(callbacks=[other]).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [usage(7)]
        assert (other.open_runs, other.waiting_orderings) == (0, 0)


# ---------------------------------------------------------------- a real server


@pytest.mark.vllm
class TestWithVLLM:
    def chain(self, server: Any, orderer: Recorder, salt: str) -> Runnable[str, Any]:
        openai = pytest.importorskip("langchain_openai")
        model = openai.ChatOpenAI(
            base_url=f"{server.base_url}/v1",
            api_key="none",
            model=server.model_name,
            max_completion_tokens=4,
            temperature=0,
            stream_usage=True,
            extra_body={"cache_salt": salt},
        )
        return rag(orderer, model)

    @pytest.mark.slow
    async def test_the_servers_own_count_arrives_plain_and_streamed(self, vllm_server: Any, caplog: Any) -> None:
        sizes = {"block_size": vllm_server.block_size, "capacity_tokens": vllm_server.capacity_tokens}
        orderer = Watched(Orderer(**sizes, strict=True))
        chain = self.chain(vllm_server, orderer, uuid4().hex)
        chain.invoke("abcdefgh: #1", orderer.config)
        chain.invoke("hgfedcba: #2", orderer.config)
        assert "".join(chain.stream("badcfehg: #3", orderer.config)) is not None
        async for _ in chain.astream("aebfcgdh: #4", orderer.config):
            pass
        first, *later = orderer.outcomes
        assert first is not None and first.cached_tokens in (0, None) and first.prompt_tokens
        for finished in later:
            assert finished is not None and finished.served
            # The documents come in one order, so that all but the question is in the cache.
            assert finished.cached_tokens is not None and finished.cached_tokens % vllm_server.block_size == 0
            assert finished.prompt_tokens - 2 * vllm_server.block_size < finished.cached_tokens < finished.prompt_tokens
            assert finished.total_tokens == finished.prompt_tokens + 4
        assert "ragorder" not in {record.name for record in caplog.records}
        assert (orderer.handler.waiting_orderings, orderer.handler.open_runs) == (0, 0)

    @pytest.mark.slow
    def test_the_example_shows_what_it_saves(self, vllm_server: Any, python: Any) -> None:
        done = python(ROOT / "examples" / "langchain_rag.py", f"{vllm_server.base_url}/v1", path=(ROOT,))
        assert done.returncode == 0, done.stderr
        totals = dict(re.findall(r"^(retrieval order|ordered): (\d+) of \d+ prompt tokens", done.stdout, re.M))
        assert int(totals["ordered"]) > int(totals["retrieval order"])
