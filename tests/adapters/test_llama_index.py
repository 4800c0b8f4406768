"""LlamaIndex: nodes come back as they are, in the order that the cache wants, wherever LlamaIndex asks for them."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import pytest

pytest.importorskip("llama_index.core")

from hypothesis import strategies as st
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, LLMMetadata
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LongContextReorder, SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import TransformRetriever
from llama_index.core.schema import ImageNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from support.framework_contract import FrameworkContract, RecordingOrderer
from support.network import local_connections_only  # noqa: F401

from ragorder import Orderer
from ragorder.adapters.llama_index import CacheOrderPostprocessor, CacheOrderRetriever, FeedbackHandler

SMALL: Any = {"block_size": 1, "capacity_tokens": 60, "suffix_tokens": 8}
REQUESTS = st.lists(st.lists(st.sampled_from("abcdefg"), max_size=12), min_size=1, max_size=6)
needs_asynchronous_postprocessors = pytest.mark.skipif(
    not hasattr(CacheOrderPostprocessor, "apostprocess_nodes"),
    reason="postprocessors are synchronous here",
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_index_query_engine.py"


@pytest.fixture
def orderer() -> Orderer:
    return Orderer(block_size=1)


@pytest.fixture
def recorder(orderer: Orderer) -> RecordingOrderer:
    return RecordingOrderer(orderer)


@pytest.fixture
def feedback() -> Iterator[FeedbackHandler]:
    """A `FeedbackHandler` at LlamaIndex's dispatcher."""
    dispatcher, handler = get_dispatcher(), FeedbackHandler()
    dispatcher.add_span_handler(handler)
    yield handler
    dispatcher.span_handlers.remove(handler)


class Fixed(BaseRetriever):
    """Finds the nodes whose names are in the question, best first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[QueryBundle] = []
        self.awaited = 0

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.asked.append(query_bundle)
        return found(*query_bundle.query_str.split())

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        await asyncio.sleep(0)
        self.awaited += 1
        return self._retrieve(query_bundle)


def found(*names: str, **options: Any) -> list[NodeWithScore]:
    nodes = [TextNode(id_=name, text=f"the text of {name}.", **options) for name in names]
    return [NodeWithScore(node=node, score=1 / rank) for rank, node in enumerate(nodes, 1)]


def names(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [node.node_id for node in nodes]


def shown(text: Any) -> list[str]:
    """The names of the nodes in a prompt, in its order."""
    return re.findall(r"the text of (\w+)\.", str(text))


class _LlamaIndexContract(FrameworkContract):
    package, extra, module = "llama_index", "llama-index", "ragorder.adapters.llama_index"

    def found(self, *names: str, text: str = "the text of {}.", source: str | None = None) -> list[NodeWithScore]:
        metadata = {} if source is None else {"source": source}
        return [NodeWithScore(node=TextNode(id_=name, text=text.format(name), metadata=metadata)) for name in names]

    def read(self, document: Any) -> tuple[str, str]:
        if not isinstance(document, NodeWithScore):
            return "", ""
        return document.node_id, document.get_content(metadata_mode=MetadataMode.LLM)


class TestPostprocessorContract(_LlamaIndexContract):
    def adapter(self, orderer: Any, **options: Any) -> CacheOrderPostprocessor:
        return CacheOrderPostprocessor(orderer, **options)

    def order(self, adapter: Any, documents: list[NodeWithScore]) -> list[NodeWithScore]:
        nodes: list[NodeWithScore] = adapter.postprocess_nodes(documents)
        return nodes

    async def aorder(self, adapter: Any, documents: list[NodeWithScore]) -> list[NodeWithScore]:
        nodes: list[NodeWithScore] = await adapter._apostprocess_nodes(documents)
        return nodes


class Given(BaseRetriever):
    """A retriever whose query says which of the test's lists it finds."""

    lists: ClassVar[dict[str, list[NodeWithScore]]] = {}

    @classmethod
    def query(cls, nodes: list[NodeWithScore]) -> str:
        query = str(uuid4())
        cls.lists[query] = nodes
        return query

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.lists.pop(query_bundle.query_str)

    # LlamaIndex would drop repeated nodes here, before they get to the adapter.
    def _handle_recursive_retrieval(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        return nodes

    async def _ahandle_recursive_retrieval(
        self, query_bundle: QueryBundle, nodes: list[NodeWithScore]
    ) -> list[NodeWithScore]:
        return nodes


class TestRetrieverContract(_LlamaIndexContract):
    def adapter(self, orderer: Any, **options: Any) -> CacheOrderRetriever:
        return CacheOrderRetriever(Given(), orderer, **options)

    def order(self, adapter: Any, documents: list[NodeWithScore]) -> list[NodeWithScore]:
        nodes: list[NodeWithScore] = adapter.retrieve(Given.query(documents))
        return nodes

    async def aorder(self, adapter: Any, documents: list[NodeWithScore]) -> list[NodeWithScore]:
        nodes: list[NodeWithScore] = await adapter.aretrieve(Given.query(documents))
        return nodes

    def test_an_unreadable_document_leaves_retrieval_order_and_is_counted(self, orderer: Orderer) -> None:
        pytest.skip("LlamaIndex's own retrievers refuse other objects")


class TestNodesArePutInOrder:
    def test_nothing_of_a_node_changes_and_nothing_of_the_list_that_was_given(self, orderer: Orderer) -> None:
        postprocessor = CacheOrderPostprocessor(orderer)
        postprocessor.postprocess_nodes(found("a", "b", "c"))
        nodes = found("c", "b", "a", metadata={"page": 3})
        given = list(nodes)
        before = {node.node_id: node.model_dump_json() for node in nodes}
        ordered = postprocessor.postprocess_nodes(nodes)
        assert {node.node_id: node.model_dump_json() for node in ordered} == before
        assert list(map(id, nodes)) == list(map(id, given))

    def test_nodes_without_score_and_without_text_are_ordered_like_others(self, orderer: Orderer) -> None:
        postprocessor = CacheOrderPostprocessor(orderer)
        images = [NodeWithScore(node=ImageNode(id_=name, image_url=f"http://localhost/{name}")) for name in "abc"]
        postprocessor.postprocess_nodes(found("x") + images)
        ordered = postprocessor.postprocess_nodes([images[1], images[0], *found("x"), images[2]])
        assert names(ordered)[0] == "x"
        assert orderer.fallbacks == 0
        assert Counter(names(ordered)) == Counter("xabc")

    def test_what_sorts_the_nodes_behind_ours_undoes_it(self, orderer: Orderer) -> None:
        ours, last = CacheOrderPostprocessor(orderer), LongContextReorder()
        ours.postprocess_nodes(found("a", "b", "c"))
        nodes = found("c", "b", "a")
        assert names(ours.postprocess_nodes(nodes)) != names(nodes)
        assert names(last.postprocess_nodes(ours.postprocess_nodes(nodes))) == names(last.postprocess_nodes(nodes))

    @needs_asynchronous_postprocessors
    async def test_the_asynchronous_path_gives_the_same_without_a_thread(self, orderer: Orderer) -> None:
        threads: list[int] = []
        postprocessor = CacheOrderPostprocessor(orderer, key=lambda node: threads.append(threading.get_ident()))
        await postprocessor.apostprocess_nodes(found("a", "b", "c"), query_str="?")
        assert names(await postprocessor.apostprocess_nodes(found("c", "b", "a"))) == ["a", "b", "c"]
        assert set(threads) == {threading.get_ident()}


class TestANodeIsKnownByItsIdAndWhatTheModelIsShown:
    def order(self, postprocessor: CacheOrderPostprocessor, *requests: list[NodeWithScore]) -> list[str]:
        for request in requests:
            nodes = postprocessor.postprocess_nodes(request)
        return names(nodes)

    def test_metadata_that_the_model_sees_belong_to_the_text(self, orderer: Orderer) -> None:
        changed = found("b", "a", metadata={"title": "new"})
        assert self.order(CacheOrderPostprocessor(orderer), found("a", "b"), changed) == ["b", "a"]

    def test_metadata_that_the_model_does_not_see_do_not(self, orderer: Orderer) -> None:
        changed = found("b", "a", metadata={"seen": "today"}, excluded_llm_metadata_keys=["seen"])
        assert self.order(CacheOrderPostprocessor(orderer), found("a", "b"), changed) == ["a", "b"]

    def test_equal_texts_under_other_ids_are_other_nodes_unless_key_says_the_same_of_them(
        self, orderer: Orderer
    ) -> None:
        again = [NodeWithScore(node=TextNode(id_=name.upper(), text=f"the text of {name}.")) for name in "ba"]
        assert self.order(CacheOrderPostprocessor(orderer), found("a", "b"), again) == ["B", "A"]
        by_name = CacheOrderPostprocessor(Orderer(block_size=1), key=lambda node: node.node_id.lower())
        assert self.order(by_name, found("a", "b"), again) == ["A", "B"]


class TestScopesShareNothing:
    @pytest.mark.parametrize("whole", [CacheOrderPostprocessor, CacheOrderRetriever])
    def test_a_function_names_the_scope_of_a_query(self, orderer: Orderer, whole: Any) -> None:
        scopes = []

        def tenant(query: QueryBundle | None) -> str | None:
            scopes.append(query and query.custom_embedding_strs[0])  # type: ignore[index]
            return scopes[-1]

        def ask(text: str, tenant: str) -> list[str]:
            bundle = QueryBundle(text, custom_embedding_strs=[tenant])
            if whole is CacheOrderRetriever:
                return names(adapter.retrieve(bundle))
            return names(adapter.postprocess_nodes(found(*text.split()), query_bundle=bundle))

        adapter = whole(*([Fixed()] if whole is CacheOrderRetriever else []), orderer, scope=tenant)
        ask("a b", "ours")
        assert ask("b a", "theirs") == ["b", "a"]
        assert ask("b a", "ours") == ["a", "b"]
        assert scopes == ["ours", "theirs", "ours"]

    def test_a_query_that_is_unknown_is_none(self, orderer: Orderer) -> None:
        asked: list[object] = []
        CacheOrderPostprocessor(orderer, scope=asked.append).postprocess_nodes(found("a"))
        assert asked == [None]
        assert orderer.fallbacks == 0


def _broken(*_: object) -> Any:
    raise LookupError("broken")


class TestWhatFailsLeavesRetrievalOrder:
    async def test_an_error_of_the_wrapped_retriever_is_raised_as_it_is(self, orderer: Orderer) -> None:
        class Broken(Fixed):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                raise LookupError("no index")

        retriever = CacheOrderRetriever(Broken(), orderer)
        with pytest.raises(LookupError, match="no index"):
            retriever.retrieve("a")
        with pytest.raises(LookupError, match="no index"):
            await retriever.aretrieve("a")
        assert orderer.fallbacks == 0


class TestTheRetrieverWrapsAnother:
    @pytest.mark.parametrize(
        "query", ["c b a", QueryBundle("c b a", custom_embedding_strs=["x"])], ids=["str", "bundle"]
    )
    async def test_the_query_is_passed_on_and_its_result_ordered(self, orderer: Orderer, query: Any) -> None:
        inner = Fixed()
        retriever = CacheOrderRetriever(inner, orderer)
        assert names(retriever.retrieve("a b c")) == ["a", "b", "c"]
        assert names(retriever.retrieve(query)) == ["a", "b", "c"]
        assert names(await retriever.aretrieve(query)) == ["a", "b", "c"]
        asked = query if isinstance(query, QueryBundle) else QueryBundle(query)
        assert inner.asked[1:] == [asked, asked]
        assert inner.awaited == 1

    def test_callbacks_of_the_wrapped_retriever_go_on_and_see_its_order(self, orderer: Orderer) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        retriever = CacheOrderRetriever(Fixed(callback_manager=CallbackManager([debug])), orderer)
        retriever.retrieve("a b")
        debug.flush_event_logs()
        retriever.retrieve("b a")
        ends = [end.payload["nodes"] for _, end in debug.get_event_pairs(CBEventType.RETRIEVE)]  # type: ignore[index]
        assert sorted(map(names, ends)) == [["a", "b"], ["b", "a"]]

    def test_a_retriever_without_callbacks_is_wrapped_as_well(self, orderer: Orderer) -> None:
        class Bare(BaseRetriever):
            def __init__(self) -> None:
                pass

            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                return found("a")

            _verbose, object_map = False, {}

        assert names(CacheOrderRetriever(Bare(), orderer).retrieve("?")) == ["a"]

    def test_instrumentation_sees_both_retrievers(self, orderer: Orderer) -> None:
        class Ear(BaseEventHandler):
            heard: list[Any] = []  # noqa: RUF012

            def handle(self, event: Any, **kwargs: Any) -> None:
                self.heard.append(event)

        ear = Ear()
        get_dispatcher().add_event_handler(ear)
        try:
            CacheOrderRetriever(Fixed(), orderer).retrieve("a")
        finally:
            get_dispatcher().event_handlers.remove(ear)
        kinds = [type(event) for event in ear.heard if isinstance(event, RetrievalStartEvent | RetrievalEndEvent)]
        assert kinds == [RetrievalStartEvent, RetrievalStartEvent, RetrievalEndEvent, RetrievalEndEvent]
        spans = [event.span_id.split("-")[0] for event in ear.heard if isinstance(event, RetrievalStartEvent)]
        # In 0.12.0 a span bears the name of the class that its method is written in.
        assert spans in (["CacheOrderRetriever.retrieve", "Fixed.retrieve"], ["BaseRetriever.retrieve"] * 2)

    async def test_what_a_node_stands_for_is_looked_up_by_the_wrapped_retriever_alone(self, orderer: Orderer) -> None:
        deeper = IndexNode(id_="inner", text="", index_id="inner", obj=TextNode(id_="never", text=""))

        class Indexed(Fixed):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                return [NodeWithScore(node=IndexNode(id_="outer", text="", index_id="outer", obj=deeper), score=1.0)]

        inner = Indexed()
        retriever = CacheOrderRetriever(inner, orderer)
        assert names(retriever.retrieve("?")) == names(inner.retrieve("?")) == ["inner"]
        assert names(await retriever.aretrieve("?")) == names(await inner.aretrieve("?"))

    def test_prompts_of_the_wrapped_retriever_can_be_reached(self, orderer: Orderer) -> None:
        inner = TransformRetriever(Fixed(), HyDEQueryTransform(llm=MockLLM()))
        reached = CacheOrderRetriever(inner, orderer).get_prompts()
        assert set(reached) == {f"retriever:{name}" for name in inner.get_prompts()}
        assert reached


class TestInAQueryEngine:
    def engine(self, retriever: BaseRetriever, *postprocessors: Any, **options: Any) -> RetrieverQueryEngine:
        options = {"llm": MockLLM()} | options
        return RetrieverQueryEngine.from_args(retriever, node_postprocessors=list(postprocessors), **options)

    @pytest.mark.parametrize("wrapped", [False, True], ids=["postprocessor", "retriever"])
    async def test_the_prompt_shows_the_nodes_in_the_new_order(self, orderer: Orderer, wrapped: bool) -> None:
        retriever = CacheOrderRetriever(Fixed(), orderer) if wrapped else Fixed()
        engine = self.engine(retriever, *([] if wrapped else [CacheOrderPostprocessor(orderer)]))
        assert shown(engine.query("a b c")) == ["a", "b", "c"]
        response = engine.query("d b a c")
        assert shown(response) == names(response.source_nodes) == ["a", "b", "c", "d"]
        response = await engine.aquery("c e a b")
        assert shown(response) == names(response.source_nodes) == ["a", "b", "c", "e"]
        assert orderer.fallbacks == 0

    def test_it_stands_behind_other_postprocessors(self, orderer: Orderer) -> None:
        engine = self.engine(Fixed(), SimilarityPostprocessor(similarity_cutoff=0.3), CacheOrderPostprocessor(orderer))
        assert shown(engine.query("a b c d")) == ["a", "b", "c"]
        assert shown(engine.query("c b a d")) == ["a", "b", "c"]

    async def test_it_serves_a_vector_index(self, orderer: Orderer) -> None:
        nodes = [node.node for node in found("a", "b", "c")]
        index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
        CacheOrderPostprocessor(orderer).postprocess_nodes(found("c", "a", "b"))
        engine = index.as_query_engine(
            llm=MockLLM(), similarity_top_k=3, node_postprocessors=[CacheOrderPostprocessor(orderer)]
        )
        assert shown(engine.query("?")) == shown(await engine.aquery("?")) == ["c", "a", "b"]

    def test_it_serves_a_streamed_answer_and_a_chat(self, orderer: Orderer) -> None:
        postprocessor = CacheOrderPostprocessor(orderer)
        engine = self.engine(Fixed(), postprocessor, streaming=True)
        assert shown("".join(engine.query("a b").response_gen)) == ["a", "b"]
        assert shown("".join(engine.query("b a").response_gen)) == ["a", "b"]
        chat = ContextChatEngine.from_defaults(
            Fixed(), llm=MockLLM(), memory=ChatMemoryBuffer(token_limit=1000), node_postprocessors=[postprocessor]
        )
        assert names(chat.chat("c b a").source_nodes) == ["a", "b", "c"]


class TestSerialisation:
    def test_it_says_its_class_and_nothing_of_the_orderer(self, orderer: Orderer) -> None:
        postprocessor = CacheOrderPostprocessor(orderer, key=_broken, scope="a tenant")
        assert postprocessor.to_dict() == {"class_name": "CacheOrderPostprocessor"}
        assert json.loads(postprocessor.to_json()) == postprocessor.to_dict()

    def test_what_is_read_again_is_given_an_orderer(self, orderer: Orderer) -> None:
        data = CacheOrderPostprocessor(orderer).to_dict()
        again = CacheOrderPostprocessor.from_dict(data, orderer=orderer)
        again.postprocess_nodes(found("a", "b"))
        assert names(again.postprocess_nodes(found("b", "a"))) == ["a", "b"]
        with pytest.raises(TypeError, match="orderer"):
            CacheOrderPostprocessor.from_dict(data)

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda adapter: adapter.model_copy(deep=True)])
    def test_copies_share_the_orderer(self, orderer: Orderer, copied: Callable[[Any], Any]) -> None:
        postprocessor = CacheOrderPostprocessor(orderer)
        postprocessor.postprocess_nodes(found("a", "b"))
        assert names(copied(postprocessor).postprocess_nodes(found("b", "a"))) == ["a", "b"]

    def test_copies_of_the_retriever_share_it_too(self, orderer: Orderer) -> None:
        retriever = CacheOrderRetriever(Fixed(), orderer)
        retriever.retrieve("a b")
        assert names(copy.deepcopy(retriever).retrieve("b a")) == ["a", "b"]


USAGE = SimpleNamespace(prompt_tokens=50, total_tokens=57, prompt_tokens_details=SimpleNamespace(cached_tokens=32))


class Reporting(MockLLM):
    """A model that echoes, and reports its usage: 50 tokens of prompt and 7 of answer, 32 of them cached."""

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        if "fail" in prompt:
            raise LookupError("the engine is gone")
        return CompletionResponse(text=prompt, raw=SimpleNamespace(usage=copy.copy(USAGE)))


class Streaming(Reporting):
    """It streams as OpenAI does: a piece at a time, and the usage at the end, if `include_usage` asks for it. It breaks
    before the piece `breaks_at`."""

    include_usage: bool = True
    breaks_at: int = -1

    def pieces(self, prompt: str) -> Iterator[CompletionResponse]:
        words = re.split("(?<= )", prompt)
        for place in range(len(words)):
            if place == self.breaks_at:
                raise LookupError("the engine is gone")
            text = "".join(words[: place + 1])
            yield CompletionResponse(text=text, delta=words[place], raw=SimpleNamespace(usage=None))
        if self.include_usage:
            yield CompletionResponse(text=prompt, delta="", raw=SimpleNamespace(usage=copy.copy(USAGE)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        def stream() -> Iterator[CompletionResponse]:
            yield from self.pieces(prompt)

        return stream()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        async def stream() -> AsyncIterator[CompletionResponse]:
            for piece in self.pieces(prompt):
                await asyncio.sleep(0)
                yield piece

        return stream()


class TestFeedback:
    def engine(self, recorder: RecordingOrderer, llm: Any = None, **options: Any) -> RetrieverQueryEngine:
        options = {"llm": llm or Reporting(), "node_postprocessors": [CacheOrderPostprocessor(recorder)]} | options
        return RetrieverQueryEngine.from_args(Fixed(), **options)

    def test_without_it_an_ordering_counts_as_served_at_once(self, recorder: RecordingOrderer) -> None:
        CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
        self.engine(recorder).query("a")
        assert recorder.finished == [(True, None, None, None)] * 2

    @pytest.mark.parametrize("wrapped", [False, True], ids=["postprocessor", "retriever"])
    async def test_the_tokens_that_the_engine_reports_reach_the_orderer(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler, wrapped: bool
    ) -> None:
        engine = self.engine(recorder)
        if wrapped:
            retriever = CacheOrderRetriever(Fixed(), recorder)
            engine = RetrieverQueryEngine.from_args(retriever, llm=Reporting())
        engine.query("a b")
        await engine.aquery("b a")
        assert recorder.finished == [(True, 32, 57, 50)] * 2
        assert not feedback.open_spans

    def test_a_chat_is_a_request_too(self, recorder: RecordingOrderer, feedback: FeedbackHandler) -> None:
        postprocessors: Any = [CacheOrderPostprocessor(recorder)]
        memory = ChatMemoryBuffer(token_limit=1000)
        ContextChatEngine.from_defaults(
            Fixed(), llm=Reporting(), memory=memory, node_postprocessors=postprocessors
        ).chat("a")
        assert recorder.finished == [(True, 32, 57, 50)]

    def test_what_was_asked_before_there_were_documents_does_not_count(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        @get_dispatcher().span
        def ask() -> None:
            Reporting().complete("what to look for?")
            nodes = CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
            get_response_synthesizer(llm=Reporting()).synthesize("?", nodes)

        ask()
        TransformQueryEngine(self.engine(recorder), HyDEQueryTransform(llm=Reporting())).query("a")
        assert recorder.finished == [(True, 32, 57, 50)] * 2

    def test_several_prompts_for_one_ordering_have_no_numbers(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        self.engine(recorder, response_mode="refine").query("a b")
        assert recorder.finished == [(True, None, None, None)]

    def test_several_orderings_in_one_request_have_none_either(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        postprocessor = CacheOrderPostprocessor(recorder)
        self.engine(recorder, node_postprocessors=[postprocessor, postprocessor]).query("a b")
        assert recorder.finished == [(True, None, None, None)] * 2

    @pytest.mark.parametrize("raw", [None, {}, SimpleNamespace(usage=None), SimpleNamespace(usage={"x": "y"})])
    def test_an_engine_that_reports_nothing_says_that_it_served(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler, raw: Any
    ) -> None:
        class Silent(MockLLM):
            @llm_completion_callback()
            def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
                return CompletionResponse(text="", raw=raw)

        self.engine(recorder, llm=Silent()).query("a")
        assert recorder.finished == [(True, None, None, None)]

    async def test_a_request_that_failed_is_discarded(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        engine = self.engine(recorder)
        with pytest.raises(LookupError, match="gone"):
            engine.query("fail")
        with pytest.raises(LookupError, match="gone"):
            await engine.aquery("fail")
        assert [outcome.served for outcome in recorder.finished] == [False, False]
        assert not feedback.open_spans

    def test_a_request_that_failed_after_its_answer_was_served(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        @get_dispatcher().span
        def ask() -> None:
            nodes = CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
            get_response_synthesizer(llm=Reporting()).synthesize("?", nodes)
            raise LookupError("nobody understands the answer")

        with pytest.raises(LookupError, match="nobody"):
            ask()
        assert recorder.finished == [(True, 32, 57, 50)]

    def test_outside_any_request_an_ordering_counts_as_served_at_once(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        CacheOrderRetriever(Fixed(), recorder).retrieve("a")
        assert recorder.finished == [(True, None, None, None)]

    def test_a_chat_model_that_completes_counts_once(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        class Chatting(Reporting):
            @property
            def metadata(self) -> LLMMetadata:
                return LLMMetadata(is_chat_model=True)

            def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
                return super().chat(messages, **kwargs)

        self.engine(recorder, llm=Chatting()).query("a")
        assert recorder.finished == [(True, 32, 57, 50)]

    async def test_concurrent_requests_get_their_own_numbers(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        class Counting(Reporting):
            @llm_completion_callback()
            async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
                number = int(shown(prompt)[0][1:])
                await asyncio.sleep(0.001 * (number * 7 % 13))
                usage = SimpleNamespace(prompt_tokens=number, total_tokens=number, prompt_tokens_details=None)
                return CompletionResponse(text="", raw=SimpleNamespace(usage=usage))

        expected = {}
        order = recorder.order

        def remember(documents: Sequence[Any], **options: Any) -> Any:
            ordering = order(documents, **options)
            ordering.add_done_callback(lambda outcome: expected.update({documents[0].id: outcome.prompt_tokens}))
            return ordering

        recorder.order = remember  # type: ignore[method-assign]
        engine = self.engine(recorder, llm=Counting())
        await asyncio.gather(*[engine.aquery(f"n{number}") for number in range(64)])
        assert expected == {f"n{number}": number for number in range(64)}
        assert not feedback.open_spans


class TestStreamedAnswers:
    """They are finished when they have been served, with what stands at their end."""

    def engine(self, recorder: RecordingOrderer, **options: Any) -> RetrieverQueryEngine:
        postprocessors: Any = [CacheOrderPostprocessor(recorder)]
        llm = Streaming()
        for name, value in options.items():
            setattr(llm, name, value)
        return RetrieverQueryEngine.from_args(Fixed(), llm=llm, streaming=True, node_postprocessors=postprocessors)

    def test_report_at_their_end_and_not_before(self, recorder: RecordingOrderer, feedback: FeedbackHandler) -> None:
        response: Any = self.engine(recorder).query("a b")
        assert recorder.finished == []
        pieces = iter(response.response_gen)
        text = next(pieces)
        assert recorder.finished == []
        assert shown(text + "".join(pieces)) == ["a", "b"]
        assert recorder.finished == [(True, 32, 57, 50)]
        assert not feedback.open_spans and not feedback._streams
        assert recorder.degraded == []

    async def test_report_to_coroutines_too(self, recorder: RecordingOrderer, feedback: FeedbackHandler) -> None:
        response: Any = await self.engine(recorder).aquery("a b")
        assert recorder.finished == []
        assert shown("".join([piece async for piece in response.response_gen])) == ["a", "b"]
        assert recorder.finished == [(True, 32, 57, 50)]
        assert not feedback.open_spans and not feedback._streams

    def test_of_a_chat_report_too(self, recorder: RecordingOrderer, feedback: FeedbackHandler) -> None:
        postprocessors: Any = [CacheOrderPostprocessor(recorder)]
        memory = ChatMemoryBuffer(token_limit=1000)
        chat = ContextChatEngine.from_defaults(
            Fixed(), llm=Streaming(), memory=memory, node_postprocessors=postprocessors
        )
        # A thread of LlamaIndex's reads it for the history meanwhile.
        assert "".join(chat.stream_chat("a b").response_gen)
        assert recorder.finished == [(True, 32, 57, 50)]

    def test_without_usage_count_and_degrade_the_orderer(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        response: Any = self.engine(recorder, include_usage=False).query("a")
        assert "".join(response.response_gen)
        assert recorder.finished == [(True, None, None, None)]
        assert len(recorder.degraded) == 1 and "include_usage" in recorder.degraded[0]

    @pytest.mark.parametrize(("breaks_at", "served"), [(0, False), (1, True)])
    async def test_that_break_count_from_their_first_token_on(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler, breaks_at: int, served: bool
    ) -> None:
        engine = self.engine(recorder, breaks_at=breaks_at)
        response: Any = engine.query("a")
        with pytest.raises(LookupError, match="gone"):
            list(response.response_gen)
        response = await engine.aquery("a")
        with pytest.raises(LookupError, match="gone"):
            [piece async for piece in response.response_gen]
        assert recorder.finished == [(served, None, None, None)] * 2
        assert not feedback._streams
        assert recorder.degraded == []

    @pytest.mark.parametrize(("read", "served"), [(0, False), (1, True)])
    def test_that_are_dropped_count_from_their_first_token_on(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler, read: int, served: bool
    ) -> None:
        response: Any = self.engine(recorder).query("b")
        list(response.response_gen)
        response = self.engine(recorder).query("a")
        for _ in range(read):
            next(response.response_gen)
        assert len(recorder.finished) == 1
        del response
        gc.collect()
        # What the collector finishes may wait for the next call of the orderer.
        recorder.orderer.order([])
        assert recorder.finished[1:] == [(served, None, None, None)]
        assert not feedback._streams and not feedback._pending

    def test_concurrent_streams_get_their_own_numbers(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        """Read in turns and from threads, long after their requests have ended."""

        class Counting(Streaming):
            def pieces(self, prompt: str) -> Iterator[CompletionResponse]:
                number = int(shown(prompt)[0][1:])
                *most, last = super().pieces(prompt)
                yield from most
                last.raw.usage.prompt_tokens = number
                yield last

        expected: dict[str, Any] = {}
        order = recorder.order

        def remember(documents: Sequence[Any], **options: Any) -> Any:
            ordering = order(documents, **options)
            ordering.add_done_callback(lambda outcome: expected.update({documents[0].id: outcome.prompt_tokens}))
            return ordering

        recorder.order = remember  # type: ignore[method-assign]
        postprocessors: Any = [CacheOrderPostprocessor(recorder)]
        engine = RetrieverQueryEngine.from_args(
            Fixed(), llm=Counting(), streaming=True, node_postprocessors=postprocessors
        )
        responses: list[Any] = [engine.query(f"n{number}") for number in range(48)]
        assert expected == {}
        streams = [iter(response.response_gen) for response in responses]
        for stream in streams:
            next(stream)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(list, streams))
        assert expected == {f"n{number}": number for number in range(48)}
        assert not feedback._streams and not feedback._pending

    def test_of_several_prompts_have_no_numbers(self, recorder: RecordingOrderer, feedback: FeedbackHandler) -> None:
        postprocessors: Any = [CacheOrderPostprocessor(recorder)]
        engine = RetrieverQueryEngine.from_args(
            Fixed(), llm=Streaming(), streaming=True, node_postprocessors=postprocessors, response_mode="refine"
        )
        response: Any = engine.query("a b")
        list(response.response_gen)
        assert recorder.finished == [(True, None, None, None)]

    def test_after_which_the_request_fails_count_for_nothing(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        kept = []

        @get_dispatcher().span
        def ask() -> None:
            nodes = CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
            kept.append(get_response_synthesizer(llm=Streaming(), streaming=True).synthesize("?", nodes))
            raise LookupError("no use for it")

        with pytest.raises(LookupError, match="no use"):
            ask()
        assert recorder.finished == [(False, None, None, None)]

    def test_that_a_request_reads_itself_report_when_it_ends(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        @get_dispatcher().span
        def ask() -> None:
            nodes = CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
            response: Any = get_response_synthesizer(llm=Streaming(), streaming=True).synthesize("?", nodes)
            assert "".join(response.response_gen)
            assert recorder.finished == []

        ask()
        assert recorder.finished == [(True, 32, 57, 50)]

    def test_models_that_call_their_base_count_once(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        class Chatting(Streaming):
            @llm_completion_callback()
            def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
                return super().stream_complete(prompt, formatted, **kwargs)

        postprocessors: Any = [CacheOrderPostprocessor(recorder)]
        engine = RetrieverQueryEngine.from_args(
            Fixed(), llm=Chatting(), streaming=True, node_postprocessors=postprocessors
        )
        response: Any = engine.query("a")
        assert "".join(response.response_gen)
        assert recorder.finished == [(True, 32, 57, 50)]

    def test_one_listener_serves_all_handlers(self, recorder: RecordingOrderer, feedback: FeedbackHandler) -> None:
        before = len(get_dispatcher().event_handlers)
        for _ in range(3):
            response: Any = self.engine(recorder).query("a")
            list(response.response_gen)
        assert len(get_dispatcher().event_handlers) <= before + 1
        assert recorder.finished == [(True, 32, 57, 50)] * 3

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda handler: pickle.loads(pickle.dumps(handler))])  # noqa: S301
    def test_copies_of_the_handler_follow_nothing_yet(
        self, recorder: RecordingOrderer, feedback: FeedbackHandler, copied: Callable[[Any], Any]
    ) -> None:
        response: Any = self.engine(recorder).query("a")
        next(response.response_gen)
        assert feedback._streams and feedback.lock
        other = copied(feedback)
        assert type(other) is FeedbackHandler
        assert not other._streams and not other.open_spans
        list(response.response_gen)


class TestConcurrency:
    """64 at a time over one adapter: each call gets its own nodes, each once."""

    QUERIES = tuple(["abcdefgh"[n % 8], *(f"n{n}x{place}" for place in range(5)), "z"] for n in range(64))

    async def test_tasks(self, orderer: Orderer) -> None:
        engine = RetrieverQueryEngine.from_args(
            Fixed(), llm=MockLLM(), node_postprocessors=[CacheOrderPostprocessor(orderer)]
        )
        responses = await asyncio.gather(*[engine.aquery(" ".join(query)) for query in self.QUERIES])
        assert [sorted(shown(response)) for response in responses] == list(map(sorted, self.QUERIES))
        assert orderer.fallbacks == 0


@pytest.mark.slow
@pytest.mark.vllm
class TestWithVLLM:
    def test_the_servers_own_count_arrives_at_the_end_of_a_stream(
        self, vllm_server: Any, recorder: RecordingOrderer, feedback: FeedbackHandler
    ) -> None:
        openai_like = pytest.importorskip("llama_index.llms.openai_like")
        vllm_server.reset()
        llm = openai_like.OpenAILike(
            model=vllm_server.model_name,
            api_base=f"{vllm_server.base_url}/v1",
            api_key="none",
            is_chat_model=True,
            max_tokens=4,
            context_window=2048,
            additional_kwargs={"stream_options": {"include_usage": True}},
        )
        postprocessors: Any = [CacheOrderPostprocessor(recorder)]
        engine = RetrieverQueryEngine.from_args(Fixed(), llm=llm, streaming=True, node_postprocessors=postprocessors)
        for question in ("a b c", "c b a"):
            response: Any = engine.query(question)
            list(response.response_gen)
        first, second = recorder.finished
        assert first.cached_tokens == 0 and first.prompt_tokens > 0
        assert second.cached_tokens > 0 and second.total_tokens == second.prompt_tokens + 4
        assert recorder.degraded == []


@pytest.mark.vllm
class TestTheExample:
    @pytest.mark.slow
    def test_it_answers_its_questions_and_shows_that_the_cache_is_used(self, vllm_server: Any, python: Any) -> None:
        done = python(EXAMPLE, f"{vllm_server.base_url}/v1")
        assert done.returncode == 0, done.stderr
        reported = re.findall(r"(\d+) of (\d+) prompt tokens cached", done.stdout)
        shares = [int(cached) / int(prompt) for cached, prompt in reported]
        assert len(shares) == done.stdout.count("Q: ") == 4
        # In retrieval order no question has its four documents as an earlier one had them.
        assert sum(share > 0.85 for share in shares) == 2
