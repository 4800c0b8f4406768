"""Copies of an orderer, pickled or not: cold, with the same settings and callables, and honest about what they lack."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import itemgetter
from typing import Any

import pytest

from ragorder import DegradedWarning, Document, Orderer, PromptBuilder
from ragorder.adapters.observing.observed import ObservedOrderer
from ragorder.trie.residency.blocks import EngineBlocks

DOCUMENTS = [Document(id, f"text of {id}", tokens=32) for id in "abc"]
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),  # noqa: S301
}


def one_token(document: Document) -> range:
    return range(document.token_count)


def order(orderer: Orderer) -> tuple[str, int]:
    ordering = orderer.order(DOCUMENTS[::-1])
    return "".join(document.id for document in ordering.documents), ordering.cached_tokens


class Tokenizer:
    """As much of a tokenizer as a builder needs."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    all_special_tokens: tuple[str, ...] = ()

    def encode(self, text: str, **_: object) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize("way", WAYS)
class TestCopies:
    def test_a_copy_starts_cold(self, way: str) -> None:
        orderer = Orderer(capacity_tokens=8_000, keep_groups=True, strict=True)
        orderer.order(DOCUMENTS).confirm()
        copied = WAYS[way](orderer)
        assert copied.settings == orderer.settings and not copied.degraded
        assert order(copied) == ("cba", 0) and copied.tree_size == 3
        assert orderer.preview(DOCUMENTS[::-1]) == DOCUMENTS, "the original knows what it knew"

    def test_with_its_callables_and_without_those_that_were_not_given(self, way: str) -> None:
        copied = WAYS[way](Orderer(key=itemgetter("id"), tokens=itemgetter("length"), strict=True))
        given = [{"id": id, "length": 32} for id in "ab"]
        copied.order(given).confirm()
        assert copied.order(given[::-1]).cached_tokens == 64
        with pytest.raises(TypeError, match="Orderer"):
            WAYS[way](Orderer()).order(["no document"])

    def test_without_events_and_it_says_so(self, way: str) -> None:
        orderer = Orderer(token_ids=one_token, blocks=EngineBlocks(16), strict=True)
        with pytest.warns(DegradedWarning, match="KV events"):
            copied = WAYS[way](orderer)
        assert "LRU mirror" in repr(copied) and copied.degraded[0] in repr(copied)
        assert order(copied)[0] == "cba" and not orderer.degraded

    @pytest.mark.parametrize("shadow", [False, True])
    def test_of_an_observed_orderer(self, way: str, shadow: bool) -> None:
        told: list[Any] = []

        class Watcher:
            def ordered(self, observation: Any) -> Callable[[Any], None]:
                told.append(observation)
                return lambda outcome: None

        watched = ObservedOrderer(Orderer(strict=True), [Watcher()], shadow=shadow)
        if way == "pickle":
            with pytest.warns(DegradedWarning, match="no watchers"):
                copied = WAYS[way](watched)
        else:
            copied = WAYS[way](watched)
        copied.order(DOCUMENTS).confirm()
        assert (copied.shadow, copied.settings) == (shadow, watched.settings)
        assert len(told) == (0 if way == "pickle" else 1) and watched.tree_size == 0

    @pytest.mark.parametrize("tokenizer", [None, Tokenizer()], ids=["estimated", "tokenizer"])
    def test_of_a_prompt_builder(self, way: str, tokenizer: Any) -> None:
        builder = PromptBuilder("System", document_template="<{id}> {text}", tokenizer=tokenizer, state_ranking=True)
        copied = WAYS[way](builder)
        assert copied.build("why?", DOCUMENTS) == builder.build("why?", DOCUMENTS)
        assert copied.prefix_tokens == builder.prefix_tokens
        orderer = WAYS[way](Orderer(tokens=builder.document_tokens, strict=True))
        assert order(orderer)[0] == "cba"

    def test_an_ordering_refuses_and_says_why(self, way: str) -> None:
        with pytest.raises(TypeError, match=r"request in flight.*ordering\.documents"):
            WAYS[way](Orderer().order(DOCUMENTS))


def test_in_a_process_pool() -> None:
    orderer = Orderer(strict=True)
    orderer.order(DOCUMENTS).confirm()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(order, orderer).result() == ("cba", 0)
