"""DSPy: a retrieval module that gives the passages in the order that the cache wants, and all else along with them."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import asyncio
import copy
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dspy")

import dspy
import numpy as np
from dspy.dsp.utils import dotdict
from dspy.utils import DummyLM
from hypothesis import given
from hypothesis import strategies as st
from support.framework_contract import FrameworkContract
from support.network import local_connections_only  # noqa: F401

from ragorder import Orderer
from ragorder.adapters.dspy import CacheOrderRetriever


@pytest.fixture
def orderer() -> Orderer:
    return Orderer(block_size=1)


def words(query: str) -> list[str]:
    """A retriever: the words of the question are its passages, best first."""
    return query.split()


class Found(dspy.Module):  # type: ignore[misc]
    """The same, as a module that can be awaited, with what it found them by."""

    def forward(self, query: str, k: int = 9) -> Any:
        passages = query.split()[:k]
        return dspy.Prediction(passages=passages, indices=list(map(ord, passages)), query=query)

    async def aforward(self, query: str, k: int = 9) -> Any:
        await asyncio.sleep(0)
        return self(query, k).copy(awaited=True)


class Once(dspy.Module):  # type: ignore[misc]
    """A module that cannot be awaited."""

    def forward(self, query: str) -> list[str]:
        return query.split()


class TestContract(FrameworkContract):
    has_metadata = False

    def adapter(self, orderer: Any, **options: Any) -> CacheOrderRetriever:
        return CacheOrderRetriever(list, orderer, **options)

    def found(self, *names: str, text: str = "the text of {}.", source: str | None = None) -> list[str]:
        return [text.format(name) for name in names]

    def order(self, adapter: Any, documents: list[str]) -> Any:
        return adapter(documents).passages

    async def aorder(self, adapter: Any, documents: list[str]) -> Any:
        return (await adapter.acall(documents)).passages

    def read(self, document: Any) -> tuple[str, str]:
        return "", str(document)


class TestPassagesArePutInOrder:
    def test_the_retriever_is_called_with_the_same_arguments(self, orderer: Orderer) -> None:
        assert CacheOrderRetriever(Found(), orderer)("a b c", k=2).passages == ["a", "b"]
        assert CacheOrderRetriever(Found(), orderer)(query="a b c", k=1).passages == ["a"]

    def test_an_error_of_the_retriever_is_raised_as_it_is(self, orderer: Orderer) -> None:
        def broken(query: str) -> list[str]:
            raise LookupError("no index")

        with pytest.raises(LookupError, match="no index"):
            CacheOrderRetriever(broken, orderer)("a")
        assert orderer.fallbacks == 0


ROWS = [{"long_text": text, "pid": pid, "prob": 0.5} for text, pid in (("c", 3), ("a", 1), ("b", 2))]
TEXTS = {"passages": ["a", "b", "c"]}


class TestWhatARetrieverGives:
    """Whatever it is, it becomes a Prediction whose parallel fields still say the same of each passage."""

    def orders(self, orderer: Orderer, found: Any) -> Any:
        """What becomes of `found` where the cache holds a, b, c."""
        CacheOrderRetriever(words, orderer)("a b c")
        return CacheOrderRetriever(lambda query: found, orderer)("?")

    def test_a_prediction_keeps_its_fields_and_those_of_the_number_of_its_passages_go_along(
        self, orderer: Orderer
    ) -> None:
        found = dspy.Prediction(
            passages=["c", "a", "b"],
            indices=[3, 1, 2],
            scores=(0.9, 0.5, 0.4),
            vectors=np.array([[3.0], [1.0], [2.0]]),
            ranks=np.array([3, 1, 2]),
            queries=["one", "two"],
            total=np.float64(3.0),
            answer="abc",
            mapping={1: 1, 2: 2, 3: 3},
        )
        found.set_lm_usage({"model": {"total_tokens": 3}})
        ordered = self.orders(orderer, found)
        assert isinstance(ordered, dspy.Prediction)
        assert (found.passages, found.indices) == (["c", "a", "b"], [3, 1, 2]), "the retriever's own is not changed"
        assert ordered.passages == ["a", "b", "c"]
        assert ordered.indices == [1, 2, 3]
        assert ordered.scores == (0.5, 0.4, 0.9)
        assert ordered.vectors.tolist() == [[1.0], [2.0], [3.0]]
        assert ordered.ranks.tolist() == [1, 2, 3]
        for name in ("queries", "total", "answer", "mapping"):
            assert ordered[name] is found[name]
        assert ordered.get_lm_usage() == found.get_lm_usage()

    @given(st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers()), max_size=12))
    def test_rows_stay_together(self, rows: list[tuple[str, int]]) -> None:
        orderer = Orderer(block_size=1, strict=True)
        passages, numbers = [row[0] for row in rows], [row[1] for row in rows]
        found = dspy.Prediction(passages=passages, numbers=numbers)
        ordered = self.orders(orderer, found)
        # Nothing tells copies of a passage apart, but each keeps what stood beside it.
        assert Counter(zip(ordered.passages, ordered.numbers, strict=True)) == Counter(rows)

    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            *(
                (make(passages=["c", "a", "b"], pids=[3, 1, 2], took="1 s"), TEXTS | {"pids": [1, 2, 3], "took": "1 s"})
                for make in (dict, dotdict, dspy.Example)
            ),
            *((make(["c", "a", "b"]), TEXTS) for make in (list, tuple)),
            # Rows become columns, of what all of them have.
            *(
                (
                    [make(row) for row in ROWS[:2]] + [make(ROWS[2] | {"only": "here"})],
                    TEXTS | {"pid": [1, 2, 3], "prob": [0.5] * 3},
                )
                for make in (dict, dotdict)
            ),
            ([dspy.Example(long_text=text) for text in "cab"], TEXTS),
        ],
    )
    def test_whatever_it_is_becomes_a_prediction(self, orderer: Orderer, found: Any, expected: dict[str, Any]) -> None:
        ordered = self.orders(orderer, found)
        assert isinstance(ordered, dspy.Prediction)
        assert dict(ordered.items()) == expected

    def test_rows_within_a_prediction_stay_rows(self, orderer: Orderer) -> None:
        rows = [dotdict(long_text=text) for text in "cab"]
        assert self.orders(orderer, dspy.Prediction(passages=rows)).passages == [rows[1], rows[2], rows[0]]

    @pytest.mark.parametrize("found", [None, "a b c", 3, dspy.Prediction(answer="x"), {"answer": "x"}], ids=repr)
    def test_what_has_no_passages_is_given_back_and_counted(self, orderer: Orderer, found: Any) -> None:
        assert self.orders(orderer, found) is found
        assert orderer.fallbacks == 1

    @pytest.mark.parametrize("odd", [None, 3, {"text": "x"}, dotdict(long_text=None)], ids=repr)
    def test_passages_that_cannot_be_read_stay_in_retrieval_order(self, orderer: Orderer, odd: Any) -> None:
        ordered = self.orders(orderer, dspy.Prediction(passages=["b", odd, "a"], indices=[2, 0, 1]))
        assert (ordered.passages, ordered.indices) == (["b", odd, "a"], [2, 0, 1])
        assert CacheOrderRetriever(lambda query: ["b", odd, "a"], orderer)("?").passages == ["b", odd, "a"]
        assert orderer.fallbacks == 2


@pytest.mark.parametrize(("key", "expected"), [(None, [4, 3]), (lambda row: row.pid, [3, 4])])
def test_a_passage_is_known_by_its_text_and_its_key(orderer: Orderer, key: Any, expected: list[int]) -> None:
    rows = [dotdict(long_text="a", pid=1), dotdict(long_text="b", pid=2)]
    other = [dotdict(long_text="b", pid=3), dotdict(long_text="a", pid=4)]
    for found, pids in ((rows, [1, 2]), (other, expected), (rows[::-1], [1, 2])):
        assert CacheOrderRetriever(lambda query, found=found: found, orderer, key=key)("?").pid == pids


class TestScopesShareNothing:
    async def test_a_function_names_the_scope_of_a_request_from_what_the_retriever_is_asked(
        self, orderer: Orderer
    ) -> None:
        def search(query: str, tenant: str) -> list[str]:
            return query.split()

        retrieve = CacheOrderRetriever(search, orderer, scope=lambda query, tenant: tenant)
        retrieve("a b", tenant="ours")
        assert retrieve("b a", tenant="theirs").passages == ["b", "a"]
        assert (await retrieve.acall("b a", tenant="ours")).passages == ["a", "b"]


class TestAsynchronously:
    async def _words(self, query: str) -> list[str]:
        await asyncio.sleep(0)
        return query.split()

    @pytest.mark.parametrize("kind", ["function", "module", "method", "module that can be awaited", "returns one"])
    async def test_any_retriever_can_be_awaited(self, orderer: Orderer, kind: str) -> None:
        retriever: Any = {
            "function": words,
            "module": Once(),
            "method": self._words,
            "module that can be awaited": Found(),
            "returns one": lambda query: self._words(query),
        }[kind]
        retrieve = CacheOrderRetriever(retriever, orderer)
        assert (await retrieve.acall("a b c")).passages == ["a", "b", "c"]
        again = await retrieve.acall("c b a")
        assert again.passages == ["a", "b", "c"]
        assert bool(again.get("awaited")) == (kind == "module that can be awaited")

    async def test_a_retriever_that_blocks_runs_in_a_thread(self, orderer: Orderer) -> None:
        found = await CacheOrderRetriever(lambda query: [str(threading.get_ident())], orderer).acall("a")
        assert found.passages != [str(threading.get_ident())]


class RAG(dspy.Module):  # type: ignore[misc]
    """Answers a question from what it retrieves."""

    def __init__(self, retrieve: Any) -> None:
        self.retrieve = retrieve
        self.respond = dspy.ChainOfThought("context: list[str], question -> answer")

    def forward(self, question: str) -> Any:
        return self.respond(context=self.retrieve(question).passages, question=question)

    async def aforward(self, question: str) -> Any:
        context = (await self.retrieve.acall(question)).passages
        return await self.respond.acall(context=context, question=question)


def shown(lm: Any) -> list[list[str]]:
    """The passages in each prompt that the model was sent, in its order."""
    prompts = [call["messages"][-1]["content"] for call in lm.history]
    return [json.loads(re.findall(r"## context ## \]\]\n(.*)", prompt)[0]) for prompt in prompts]


class TestInAProgram:
    @pytest.fixture
    def lm(self) -> Any:
        return DummyLM([{"reasoning": "it is so", "answer": "yes"}] * 9)

    async def test_the_prompt_shows_the_passages_in_the_new_order(self, orderer: Orderer, lm: Any) -> None:
        program = RAG(CacheOrderRetriever(words, orderer))
        with dspy.context(lm=lm):
            assert program(question="a b c").answer == "yes"
            program(question="d c a b")
            await program.acall(question="c e b a")
        assert shown(lm) == [["a", "b", "c"], ["a", "b", "c", "d"], ["a", "b", "c", "e"]]

    def test_it_wraps_the_retriever_of_the_settings(self, orderer: Orderer) -> None:
        def rm(query: str, k: int) -> list[Any]:
            return [dotdict(long_text=word) for word in query.split()[:k]]

        retrieve = CacheOrderRetriever(dspy.Retrieve(k=3), orderer)
        with dspy.context(rm=rm):
            assert retrieve("a b c d").passages == ["a", "b", "c"]
            assert retrieve("c b a d").passages == ["a", "b", "c"]


class TestCopiesAndFiles:
    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda module: module.deepcopy(), lambda module: module.reset_copy()]
    )
    def test_copies_share_the_orderer(self, orderer: Orderer, copied: Callable[[Any], Any]) -> None:
        program = RAG(CacheOrderRetriever(Found(), orderer))
        program.retrieve("a b")
        assert copied(program).retrieve("b a").passages == ["a", "b"]

    def test_a_copy_of_a_retriever_that_cannot_be_copied_shares_that_as_well(self, orderer: Orderer) -> None:
        class Locked:
            def __init__(self) -> None:
                self.lock = threading.Lock()

            def __call__(self, query: str) -> list[str]:
                return query.split()

        retrieve = CacheOrderRetriever(Locked(), orderer)
        retrieve("a b")
        assert retrieve.deepcopy()("b a").passages == ["a", "b"]

    def test_parameters_of_the_wrapped_module_are_found(self, orderer: Orderer) -> None:
        class Rewriting(Found):
            def __init__(self) -> None:
                self.rewrite = dspy.Predict("question -> query")

        predictors = CacheOrderRetriever(Rewriting(), orderer).named_predictors()
        assert [name for name, _ in predictors] == ["retriever.rewrite"]

    def test_the_state_of_a_program_is_saved_and_loaded(self, orderer: Orderer, tmp_path: Path) -> None:
        program = RAG(CacheOrderRetriever(words, orderer))
        program.respond.predictors()[0].demos = [dspy.Example(question="?", answer="!")]
        program.save(tmp_path / "program.json")
        again = RAG(CacheOrderRetriever(words, orderer))
        again.load(tmp_path / "program.json")
        assert again.dump_state() == program.dump_state()
        program.retrieve("a b")
        assert again.retrieve("b a").passages == ["a", "b"]
