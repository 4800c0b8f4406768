"""LlamaIndex: nodes come back as they are, in the order that the cache wants, wherever LlamaIndex asks for them."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, LLMMetadata
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import TransformRetriever
from llama_index.core.schema import ImageNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from support.framework_contract import FrameworkContract, Recorder, broken
from support.network import local_connections_only  # noqa: F401

from ragorder import Orderer
from ragorder.adapters.llama_index import CacheOrderPostprocessor, CacheOrderRetriever, FeedbackHandler

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_index_query_engine.py"


@pytest.fixture
def orderer() -> Orderer:
    return Orderer(block_size=1)


@pytest.fixture
def recorder(orderer: Orderer) -> Recorder:
    return Recorder(orderer)


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

    def order(self, adapter: Any, documents: list[NodeWithScore]) -> Any:
        return adapter.postprocess_nodes(documents)

    async def aorder(self, adapter: Any, documents: list[NodeWithScore]) -> Any:
        return await adapter.apostprocess_nodes(documents)


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

    def order(self, adapter: Any, documents: list[NodeWithScore]) -> Any:
        return adapter.retrieve(Given.query(documents))

    async def aorder(self, adapter: Any, documents: list[NodeWithScore]) -> Any:
        return await adapter.aretrieve(Given.query(documents))

    def test_an_unreadable_document_leaves_retrieval_order_and_is_counted(self, orderer: Orderer) -> None:
        pytest.skip("LlamaIndex's own retrievers refuse other objects")


def test_nodes_without_score_and_without_text_are_ordered_like_others(orderer: Orderer) -> None:
    postprocessor = CacheOrderPostprocessor(orderer)
    images = [NodeWithScore(node=ImageNode(id_=name, image_url=f"http://localhost/{name}")) for name in "abc"]
    postprocessor.postprocess_nodes(found("x") + images)
    ordered = postprocessor.postprocess_nodes([images[1], images[0], *found("x"), images[2]])
    assert names(ordered)[0] == "x"
    assert orderer.fallbacks == 0
    assert Counter(names(ordered)) == Counter("xabc")


def test_metadata_belong_to_the_text_if_the_model_sees_them(orderer: Orderer) -> None:
    postprocessor = CacheOrderPostprocessor(orderer)
    postprocessor.postprocess_nodes(found("a", "b"))
    for hidden, expected in ((["seen"], ["a", "b"]), ([], ["b", "a"])):
        changed = found("b", "a", metadata={"seen": "today"}, excluded_llm_metadata_keys=hidden)
        assert names(postprocessor.postprocess_nodes(changed)) == expected


class TestScopesShareNothing:
    @pytest.mark.parametrize("wrapped", [False, True], ids=["postprocessor", "retriever"])
    def test_a_function_names_the_scope_of_a_query(self, orderer: Orderer, wrapped: bool) -> None:
        scopes: list[str] = []

        def tenant(query: QueryBundle | None) -> str:
            scopes.append(query.custom_embedding_strs[0])  # type: ignore[index, union-attr]
            return scopes[-1]

        retriever = CacheOrderRetriever(Fixed(), orderer, scope=tenant)
        postprocessor = CacheOrderPostprocessor(orderer, scope=tenant)
        for text, scope, expected in (("a b", "ours", "ab"), ("b a", "theirs", "ba"), ("b a", "ours", "ab")):
            query = QueryBundle(text, custom_embedding_strs=[scope])
            given = found(*text.split())
            nodes = retriever.retrieve(query) if wrapped else postprocessor.postprocess_nodes(given, query_bundle=query)
            assert names(nodes) == list(expected)
        assert scopes == ["ours", "theirs", "ours"]
        assert orderer.fallbacks == 0

    def test_a_query_that_is_unknown_is_none(self, orderer: Orderer) -> None:
        asked: list[object] = []
        CacheOrderPostprocessor(orderer, scope=asked.append).postprocess_nodes(found("a"))
        assert asked == [None]
        assert orderer.fallbacks == 0


class TestTheRetrieverWrapsAnother:
    async def test_its_error_is_raised_as_it_is(self, orderer: Orderer) -> None:
        class Broken(Fixed):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                raise LookupError("no index")

        retriever = CacheOrderRetriever(Broken(), orderer)
        with pytest.raises(LookupError, match="no index"):
            retriever.retrieve("a")
        with pytest.raises(LookupError, match="no index"):
            await retriever.aretrieve("a")
        assert orderer.fallbacks == 0

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

    async def test_the_object_of_an_index_node_is_looked_up_by_the_wrapped_retriever_only(
        self, orderer: Orderer
    ) -> None:
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


def engine_of(orderer: Any, llm: Any, *, wrapped: bool = False, **options: Any) -> Any:
    retriever = CacheOrderRetriever(Fixed(), orderer) if wrapped else Fixed()
    postprocessors: Any = [] if wrapped else [CacheOrderPostprocessor(orderer)]
    return RetrieverQueryEngine.from_args(retriever, **{"llm": llm, "node_postprocessors": postprocessors} | options)


class TestInAQueryEngine:
    @pytest.mark.parametrize("wrapped", [False, True], ids=["postprocessor", "retriever"])
    async def test_the_prompt_shows_the_nodes_in_the_new_order(self, orderer: Orderer, wrapped: bool) -> None:
        engine = engine_of(orderer, MockLLM(), wrapped=wrapped)
        assert shown(engine.query("a b c")) == ["a", "b", "c"]
        response = engine.query("d b a c")
        assert shown(response) == names(response.source_nodes) == ["a", "b", "c", "d"]
        response = await engine.aquery("c e a b")
        assert shown(response) == names(response.source_nodes) == ["a", "b", "c", "e"]
        assert orderer.fallbacks == 0


class TestSerialisation:
    def test_data_hold_nothing_of_the_orderer_which_is_given_again(self, orderer: Orderer) -> None:
        postprocessor = CacheOrderPostprocessor(orderer, key=broken, scope="a tenant")
        data = postprocessor.to_dict()
        assert data == json.loads(postprocessor.to_json()) == {"class_name": "CacheOrderPostprocessor"}
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
        assert names(copy.deepcopy(CacheOrderRetriever(Fixed(), orderer)).retrieve("b a")) == ["a", "b"]


NO_NUMBERS, NUMBERS = (True, None, None, None), (True, 32, 57, 50)
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
        return self.pieces(prompt)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        async def stream() -> AsyncIterator[CompletionResponse]:
            for piece in self.pieces(prompt):
                await asyncio.sleep(0)
                yield piece

        return stream()


def prompt_tokens_of(recorder: Recorder) -> dict[str, Any]:
    """The reported prompt tokens of each request, by its only document."""
    return {each.documents[0].id: each.outcome and each.outcome.prompt_tokens for each in recorder.requests}


@pytest.mark.usefixtures("feedback")
class TestFeedback:
    @pytest.mark.parametrize("wrapped", [False, True], ids=["postprocessor", "retriever"])
    async def test_the_tokens_that_the_engine_reports_reach_the_orderer(
        self, recorder: Recorder, feedback: FeedbackHandler, wrapped: bool
    ) -> None:
        engine = engine_of(recorder, Reporting(), wrapped=wrapped)
        engine.query("a b")
        await engine.aquery("b a")
        assert recorder.finished == [NUMBERS] * 2
        assert not feedback.open_spans

    def test_a_chat_is_a_request_too(self, recorder: Recorder) -> None:
        options: Any = {"memory": ChatMemoryBuffer(token_limit=1000)}
        options |= {"node_postprocessors": [CacheOrderPostprocessor(recorder)]}
        ContextChatEngine.from_defaults(Fixed(), llm=Reporting(), **options).chat("a")
        # A thread of LlamaIndex's reads the stream for the history meanwhile.
        streamed = ContextChatEngine.from_defaults(Fixed(), llm=Streaming(), **options).stream_chat("a b")
        assert "".join(streamed.response_gen)
        assert recorder.finished == [NUMBERS] * 2

    def test_what_was_asked_before_there_were_documents_does_not_count(self, recorder: Recorder) -> None:
        @get_dispatcher().span
        def ask() -> None:
            Reporting().complete("what to look for?")
            nodes = CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
            get_response_synthesizer(llm=Reporting()).synthesize("?", nodes)

        ask()
        TransformQueryEngine(engine_of(recorder, Reporting()), HyDEQueryTransform(llm=Reporting())).query("a")
        assert recorder.finished == [NUMBERS] * 2

    def test_several_prompts_or_several_orderings_in_one_request_have_no_numbers(self, recorder: Recorder) -> None:
        engine_of(recorder, Reporting(), response_mode="refine").query("a b")
        assert recorder.finished == [NO_NUMBERS]
        postprocessor = CacheOrderPostprocessor(recorder)
        engine_of(recorder, Reporting(), node_postprocessors=[postprocessor, postprocessor]).query("a b")
        assert recorder.finished == [NO_NUMBERS] * 3

    @pytest.mark.parametrize("raw", [None, {}, SimpleNamespace(usage=None), SimpleNamespace(usage={"x": "y"})])
    def test_an_engine_that_reports_nothing_says_that_it_served(self, recorder: Recorder, raw: Any) -> None:
        class Silent(MockLLM):
            @llm_completion_callback()
            def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
                return CompletionResponse(text="", raw=raw)

        engine_of(recorder, Silent()).query("a")
        assert recorder.finished == [NO_NUMBERS]

    async def test_a_request_that_failed_is_discarded(self, recorder: Recorder, feedback: FeedbackHandler) -> None:
        engine = engine_of(recorder, Reporting())
        with pytest.raises(LookupError, match="gone"):
            engine.query("fail")
        with pytest.raises(LookupError, match="gone"):
            await engine.aquery("fail")
        assert [outcome.served for outcome in recorder.finished] == [False, False]
        assert not feedback.open_spans

    def test_a_request_that_failed_after_its_answer_was_served(self, recorder: Recorder) -> None:
        @get_dispatcher().span
        def ask() -> None:
            nodes = CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
            get_response_synthesizer(llm=Reporting()).synthesize("?", nodes)
            raise LookupError("nobody understands the answer")

        with pytest.raises(LookupError, match="nobody"):
            ask()
        assert recorder.finished == [NUMBERS]

    def test_outside_any_request_an_ordering_counts_as_served_at_once(self, recorder: Recorder) -> None:
        CacheOrderRetriever(Fixed(), recorder).retrieve("a")
        assert recorder.finished == [NO_NUMBERS]

    def test_a_chat_model_that_completes_counts_once(self, recorder: Recorder) -> None:
        class Chatting(Reporting):
            @property
            def metadata(self) -> LLMMetadata:
                return LLMMetadata(is_chat_model=True)

            def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
                return super().chat(messages, **kwargs)

        engine_of(recorder, Chatting()).query("a")
        assert recorder.finished == [NUMBERS]

    async def test_concurrent_requests_get_their_own_numbers(
        self, recorder: Recorder, feedback: FeedbackHandler
    ) -> None:
        class Counting(Reporting):
            @llm_completion_callback()
            async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
                number = int(shown(prompt)[0][1:])
                await asyncio.sleep(0.001 * (number * 7 % 13))
                usage = SimpleNamespace(prompt_tokens=number, total_tokens=number, prompt_tokens_details=None)
                return CompletionResponse(text="", raw=SimpleNamespace(usage=usage))

        engine = engine_of(recorder, Counting())
        await asyncio.gather(*[engine.aquery(f"n{number}") for number in range(64)])
        assert prompt_tokens_of(recorder) == {f"n{number}": number for number in range(64)}
        assert not feedback.open_spans


def streaming(recorder: Recorder, llm: Any, **options: Any) -> Any:
    return engine_of(recorder, llm, streaming=True, **options)


@pytest.mark.usefixtures("feedback")
class TestStreamedAnswers:
    """They are finished when they have been served, with what stands at their end."""

    async def test_report_at_their_end_and_not_before(self, recorder: Recorder, feedback: FeedbackHandler) -> None:
        response: Any = streaming(recorder, Streaming()).query("a b")
        assert recorder.finished == []
        pieces = iter(response.response_gen)
        text = next(pieces)
        assert recorder.finished == []
        assert shown(text + "".join(pieces)) == ["a", "b"]
        assert recorder.finished == [NUMBERS]
        response = await streaming(recorder, Streaming()).aquery("a b")
        assert len(recorder.finished) == 1
        assert shown("".join([piece async for piece in response.response_gen])) == ["a", "b"]
        assert recorder.finished == [NUMBERS] * 2
        assert not feedback.open_spans and not feedback.open_answers
        assert recorder.degraded == []

    def test_without_usage_count_and_degrade_the_orderer(self, recorder: Recorder) -> None:
        response: Any = streaming(recorder, Streaming().model_copy(update={"include_usage": False})).query("a")
        assert "".join(response.response_gen)
        assert recorder.finished == [NO_NUMBERS]
        assert len(recorder.degraded) == 1 and "include_usage" in recorder.degraded[0]

    @pytest.mark.parametrize(("breaks_at", "served"), [(0, False), (1, True)])
    async def test_that_break_count_from_their_first_token_on(
        self, recorder: Recorder, feedback: FeedbackHandler, breaks_at: int, served: bool
    ) -> None:
        engine = streaming(recorder, Streaming().model_copy(update={"breaks_at": breaks_at}))
        response: Any = engine.query("a")
        with pytest.raises(LookupError, match="gone"):
            list(response.response_gen)
        response = await engine.aquery("a")
        with pytest.raises(LookupError, match="gone"):
            [piece async for piece in response.response_gen]
        assert recorder.finished == [(served, None, None, None)] * 2
        assert feedback.open_answers == 0
        assert recorder.degraded == []

    @pytest.mark.parametrize(("read", "served"), [(0, False), (1, True)])
    def test_that_are_dropped_count_from_their_first_token_on(
        self, recorder: Recorder, feedback: FeedbackHandler, read: int, served: bool
    ) -> None:
        list(streaming(recorder, Streaming()).query("b").response_gen)
        response: Any = streaming(recorder, Streaming()).query("a")
        for _ in range(read):
            next(response.response_gen)
        assert len(recorder.finished) == 1
        del response
        gc.collect()
        # What the collector finishes may wait for the next call of the orderer.
        recorder.orderer.order([])
        assert recorder.finished[1:] == [(served, None, None, None)]
        assert feedback.open_answers == 0

    def test_concurrent_streams_get_their_own_numbers(self, recorder: Recorder, feedback: FeedbackHandler) -> None:
        """Read in turns and from threads, long after their requests have ended."""

        class Counting(Streaming):
            def pieces(self, prompt: str) -> Iterator[CompletionResponse]:
                number = int(shown(prompt)[0][1:])
                *most, last = super().pieces(prompt)
                yield from most
                last.raw.usage.prompt_tokens = number
                yield last

        engine, listeners = streaming(recorder, Counting()), len(get_dispatcher().event_handlers)
        responses: list[Any] = [engine.query(f"n{number}") for number in range(48)]
        assert recorder.finished == []
        streams = [iter(response.response_gen) for response in responses]
        for stream in streams:
            next(stream)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(list, streams))
        assert prompt_tokens_of(recorder) == {f"n{number}": number for number in range(48)}
        assert len(get_dispatcher().event_handlers) <= listeners + 1
        assert feedback.open_answers == 0

    def test_of_several_prompts_have_no_numbers(self, recorder: Recorder) -> None:
        list(streaming(recorder, Streaming(), response_mode="refine").query("a b").response_gen)
        assert recorder.finished == [NO_NUMBERS]

    def test_after_which_the_request_fails_count_for_nothing(self, recorder: Recorder) -> None:
        kept = []

        @get_dispatcher().span
        def ask() -> None:
            nodes = CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
            kept.append(get_response_synthesizer(llm=Streaming(), streaming=True).synthesize("?", nodes))
            raise LookupError("no use for it")

        with pytest.raises(LookupError, match="no use"):
            ask()
        assert recorder.finished == [(False, None, None, None)]

    def test_that_a_request_reads_itself_report_when_it_ends(self, recorder: Recorder) -> None:
        @get_dispatcher().span
        def ask() -> None:
            nodes = CacheOrderPostprocessor(recorder).postprocess_nodes(found("a"))
            response: Any = get_response_synthesizer(llm=Streaming(), streaming=True).synthesize("?", nodes)
            assert "".join(response.response_gen)
            assert recorder.finished == []

        ask()
        assert recorder.finished == [NUMBERS]

    def test_models_that_call_their_base_count_once(self, recorder: Recorder) -> None:
        class Chatting(Streaming):
            @llm_completion_callback()
            def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
                return super().stream_complete(prompt, formatted, **kwargs)

        assert "".join(streaming(recorder, Chatting()).query("a").response_gen)
        assert recorder.finished == [NUMBERS]

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda handler: pickle.loads(pickle.dumps(handler))])  # noqa: S301
    def test_copies_of_the_handler_follow_nothing_yet(
        self, recorder: Recorder, feedback: FeedbackHandler, copied: Callable[[Any], Any]
    ) -> None:
        response: Any = streaming(recorder, Streaming()).query("a")
        next(response.response_gen)
        assert feedback.open_answers == 1 and feedback.lock
        other = copied(feedback)
        assert type(other) is FeedbackHandler
        assert not other.open_answers and not other.open_spans
        list(response.response_gen)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.usefixtures("feedback")
class TestWithVLLM:
    def test_the_servers_own_count_arrives_at_the_end_of_a_stream(self, vllm_server: Any, recorder: Recorder) -> None:
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
        engine = streaming(recorder, llm)
        for question in ("a b c", "c b a"):
            list(engine.query(question).response_gen)
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
