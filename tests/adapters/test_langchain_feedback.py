"""Feedback from LangChain: each ordering is told what became of the LLM call that has its documents."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice, permutations
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ragorder import Orderer
from ragorder.ordering import RequestOutcome

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import HumanMessage
from langchain_core.outputs import Generation, LLMResult
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnablePassthrough
from support.framework_contract import Recorder
from support.langchain_chains import (
    BY_ID,
    DISCARDED,
    NO_NUMBERS,
    PLAIN,
    PROMPT,
    STREAMED,
    BoomError,
    Model,
    Show,
    Told,
    Watched,
    answered,
    by_ranking,
    plain,
    rag,
    raised,
    retrieve,
    shouted,
    usage,
    watched,
    watching,
)

from ragorder.adapters.langchain import CacheOrderRetriever, CacheOrderTransformer, FeedbackHandler

pytestmark = pytest.mark.merge

ROOT = Path(__file__).resolve().parents[2]
FIFTY = [f"{''.join(order)}: #{number}" for number, order in enumerate(islice(permutations("abcde"), 50))]
OPENAI = {"prompt_tokens": 90, "total_tokens": 93, "prompt_tokens_details": {"cached_tokens": 64}}


@pytest.fixture
def orderer(caplog: pytest.LogCaptureFixture) -> Iterator[Watched]:
    with watching(caplog) as orderer:
        yield orderer


@pytest.fixture
def retriever(orderer: Watched) -> Any:
    return CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer)


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

    def test_reach_it_once_if_there_are_two_handlers(self, orderer: Watched) -> None:
        """One bound to the chain and another one given with the call: one of them finishes, both forget."""
        other = FeedbackHandler()
        rag(orderer, Model()).with_config(callbacks=[other]).invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [usage(7)]
        assert (other.open_runs, other.waiting_orderings) == (0, 0)

    def test_a_chain_with_callbacks_at_the_model_alone_has_no_numbers(self, orderer: Watched) -> None:
        rag(orderer, Model(callbacks=[orderer.handler])).invoke("ab: #7")
        assert orderer.outcomes == [NO_NUMBERS]


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


def shown(names: str) -> str:
    """Documents by their names, of capitals those of which nothing can be recognised."""
    shows = {True: shouted, False: plain}
    return "\n\n".join(shows[name.isupper()]([BY_ID[name.lower()]]) for name in names)


class TestWhichCallAnOrderingBelongsTo:
    """A run may have many LLM calls: the one counts whose prompt has the documents."""

    @pytest.mark.parametrize(
        ("steps", "outcomes"),
        [
            pytest.param("#99 ?ab ab#7", [usage(7)], id="not one that rewrites the question first"),
            pytest.param("?abc a#99 b#99 c#99 abc#7", [usage(7)], id="not those that grade single documents"),
            pytest.param("?abc A#99 B#99 C#99 ABC#7", [NO_NUMBERS], id="none if several might be it"),
            pytest.param("?ab ?ab AB#7", [NO_NUMBERS] * 2, id="none if one call might be that of two"),
            pytest.param("?ab ?cd abCD#7", [usage(7), NO_NUMBERS], id="not one that is another's"),
            # All its documents and no more: what one has retrieved is part of what the other one has.
            pytest.param("?ab ?abc abc#3 ab#2", [usage(2), usage(3)], id="no more"),
            # Two retrievers into one prompt: what the engine had cached says something of the first one's documents.
            pytest.param("?abc ?def defabc#7", [NO_NUMBERS, usage(7)], id="foremost"),
            pytest.param("?abc cba#99 abc#7", [usage(7)], id="in their order"),
            # An agent: each prompt has all that was retrieved before.
            pytest.param("?ab ab#0 ?cd abcd#1 ?ba abcdba#2", [usage(0), usage(1), usage(2)], id="the next of an agent"),
            # Branches retrieve the same documents, which come in the same order: only the branch tells them apart.
            pytest.param("x/?abc y/?acb y/abc#2 x/abc#1", [usage(1), usage(2)], id="the one of its own branch"),
            # Some branches retrieve, then others ask: each ordering gets one call's numbers.
            pytest.param(
                "u/?abc v/?abc w/?abcd x/abc#0( y/abc#1( z/abcd#2( 0) 1) 2)",
                [usage(0), usage(1), usage(2)],
                id="one each of branches that part after retrieval",
            ),
            # The second one is served from what the first one has computed, even if it is ready first.
            pytest.param("?abc abc#1( abc#2( 2) 1)", [usage(1)], id="the first of several at once"),
            pytest.param("?abc abc#1( abc#2( 1) . 2)", [usage(1)], id="while others are under way"),
            pytest.param("?abc abc#1( abc#2( 2) abc#3( 3) 1!", [usage(2)], id="the second if the first fails"),
            # No documents can be recognised. The second were retrieved during the first one's call.
            pytest.param("?ab AB#1( ?cd CD#2( 2) 1)", [NO_NUMBERS, usage(2)], id="the only one of another"),
            pytest.param("?ab ab#7! ab#8! ab#9", [usage(9)], id="the last attempt"),
            pytest.param("x/?ab x/! . #99", [DISCARDED], id="none of a tool or chain that failed before it asked"),
            pytest.param("?ab ab#7! #99", [DISCARDED], id="none that has no documents after one that failed"),
            pytest.param("?ab ab#7! ?ab ab#7", [DISCARDED, usage(7)], id="an attempt with its own retrieval"),
        ],
    )
    def test_of_one_run(self, orderer: Watched, retriever: Any, steps: str, outcomes: list[RequestOutcome]) -> None:
        """?ab retrieves a and b; ab#7 asks about them with the number 7, in vain with an exclamation mark; ab#7( begins
        to ask, and 7) has the answer. What stands before a slash is the branch, and x/! fails as a whole. At the
        stop all orderings so far have been told."""
        branches: dict[str, Any] = {}
        begun: dict[str, Any] = {}

        def work(_: str, config: RunnableConfig) -> None:
            for step in steps.split():
                if step == ".":
                    assert None not in orderer.outcomes
                    continue
                parts = re.fullmatch(r"(?:(\w)/)?(\?)?([a-zA-Z]*)#?(\d*)([(!)]?)", step)
                assert parts is not None
                branch, retrieves, documents, number, end = parts.groups()
                manager: Any = config["callbacks"]
                if branch is not None:
                    if branch not in branches:
                        branches[branch] = manager.on_chain_start({}, {})
                    manager = branches[branch].get_child()
                messages = [HumanMessage(f"{shown(documents)} #{number}")]
                if retrieves:
                    retriever.invoke(f"{documents}: ?", {"callbacks": manager})
                elif end == "(":
                    (begun[number],) = manager.on_chat_model_start({}, [messages])
                elif not number:
                    branches[branch].on_chain_error(BoomError())
                elif number in begun and end == "!":
                    begun[number].on_llm_error(BoomError())
                elif number in begun:
                    begun[number].on_llm_end(Model().generate([messages]))
                else:
                    with pytest.raises(BoomError) if end else nullcontext():
                        Model(errors=[BoomError()] * bool(end)).invoke(messages, {"callbacks": manager})

        RunnableLambda(work).invoke("go", orderer.config)
        assert orderer.outcomes == outcomes

    def test_not_only_if_the_prompt_shows_them_to_the_last_blank(self, orderer: Watched) -> None:
        found = [Document(" first\n"), Document("\tsecond "), Document(" ")]
        retriever = CacheOrderRetriever(retriever=RunnableLambda(lambda _: found), orderer=orderer)
        trimmed = RunnableLambda(lambda documents: "|".join(each.page_content.strip() for each in documents))
        chain = retriever | trimmed | (lambda prompt: f"{prompt} #7") | Model() | (lambda answer: "#99") | Model()
        chain.invoke("?", orderer.config)
        assert orderer.outcomes == [usage(7)]

    def test_a_model_outside_of_any_run_belongs_to_no_ordering(self, orderer: Watched, retriever: Any) -> None:
        found = retriever.invoke("ab: ?", orderer.config)
        Model().invoke(f"{plain(found)} #7", orderer.config)
        assert orderer.outcomes == [NO_NUMBERS]


def fails(_: Any) -> Any:
    raise BoomError


class Unreadable:
    def __getattr__(self, name: str) -> Any:
        raise BoomError


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

    def test_of_a_chain_with_a_fallback_discard_the_first_attempt(self, orderer: Watched) -> None:
        """The fallback retrieves the same documents once more: its model's numbers are those of its own ordering."""
        chain = rag(orderer, Model(errors=[BoomError()])).with_fallbacks([rag(orderer, Model())])
        chain.invoke("ab: #7", orderer.config)
        assert orderer.outcomes == [DISCARDED, usage(7)]

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


# ---------------------------------------------------------------- a real server


@pytest.mark.vllm
class TestWithVLLM:
    @pytest.mark.slow
    async def test_the_servers_own_count_arrives_plain_and_streamed(self, vllm_server: Any, caplog: Any) -> None:
        openai = pytest.importorskip("langchain_openai")
        model = openai.ChatOpenAI(
            base_url=f"{vllm_server.base_url}/v1",
            api_key="none",
            model=vllm_server.model_name,
            max_completion_tokens=4,
            temperature=0,
            stream_usage=True,
            extra_body={"cache_salt": uuid4().hex},
        )
        sizes = {"block_size": vllm_server.block_size, "capacity_tokens": vllm_server.capacity_tokens}
        orderer = Watched(Orderer(**sizes, strict=True))
        chain = rag(orderer, model)
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
