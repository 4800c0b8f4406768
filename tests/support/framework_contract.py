"""The contract of all framework adapters: what a user of any framework may rely on.

A new adapter is one folder or file, and a subclass here with its five hooks.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragorder import Document, Orderer
from ragorder.common.lock import run_deferred
from ragorder.ordering import RequestOutcome

SMALL: Any = {"block_size": 1, "capacity_tokens": 60, "suffix_tokens": 8}
REQUESTS = st.lists(st.lists(st.sampled_from("abcdefg"), max_size=12), min_size=1, max_size=6)
CONCURRENT = tuple(["abcdefgh"[n % 8], *(f"n{n}x{place}" for place in range(5)), "z"] for n in range(64))

inherited = settings(suppress_health_check=[HealthCheck.differing_executors])


@dataclass
class Asked:
    """A request, as the orderer saw it, and what became of it."""

    documents: list[Any]
    scope: Any
    ordering: Any
    outcome: RequestOutcome | None = None


class Recorder:
    """A real orderer that records its requests, and the outcomes in the order of their coming."""

    def __init__(self, orderer: Orderer) -> None:
        self.orderer, self.settings = orderer, orderer.settings
        self.fall_back, self.order_batch = orderer.fall_back, orderer.order_batch
        self.requests: list[Asked] = []
        self.finished: list[Any] = []
        self.degraded: list[str] = []

    def degrade(self, reason: str) -> None:
        self.degraded.append(reason)

    def order(self, documents: Iterable[Any], *, scope: Any = None, **options: Any) -> Any:
        documents = list(documents)
        ordering = self.orderer.order(documents, scope=scope, **options)
        request = Asked(documents, scope, ordering)
        self.requests.append(request)

        def finish(outcome: RequestOutcome) -> None:
            request.outcome = outcome
            self.finished.append(outcome)

        ordering.add_done_callback(finish)
        return ordering

    @property
    def documents(self) -> list[Any]:
        return [document for request in self.requests for document in request.documents]

    @property
    def outcomes(self) -> list[RequestOutcome | None]:
        """The outcome of each request, in their order (None: none yet)."""
        # One that came during a garbage collection of another thread waits for the next call.
        run_deferred()
        return [request.outcome for request in self.requests]


def broken(*_: object, **__: object) -> Any:
    raise LookupError("broken")


class FrameworkContract(ABC):
    options: ClassVar[tuple[str, ...]] = ("key", "tokens", "scope")
    """Options that may be a function."""
    has_metadata: ClassVar[bool] = True

    @abstractmethod
    def adapter(self, orderer: Any, **options: Any) -> Any:
        """An adapter with the options `key`, `tokens`, `scope`."""

    @abstractmethod
    def found(self, *names: str, text: str = "the text of {}.", source: str | None = None) -> list[Any]:
        """Documents of the framework, in retrieval order."""

    @abstractmethod
    def order(self, adapter: Any, documents: list[Any]) -> list[Any]:
        """One request, of exactly these documents."""

    @abstractmethod
    async def aorder(self, adapter: Any, documents: list[Any]) -> list[Any]: ...

    @abstractmethod
    def read(self, document: Any) -> tuple[str, str]:
        """A document's id ("" if it has none) and text."""

    def texts(self, documents: Sequence[Any]) -> list[str]:
        return [self.read(document)[1] for document in documents]

    def expected(self, *names: str) -> list[str]:
        return self.texts(self.found(*names))

    @pytest.fixture
    def orderer(self) -> Orderer:
        return Orderer(block_size=1)

    @inherited
    @given(REQUESTS)
    def test_the_same_objects_come_back_unchanged_each_as_often_as_given(self, requests: list[list[str]]) -> None:
        adapter = self.adapter(Orderer(block_size=1, strict=True))
        known = dict(zip("abcdefg", self.found(*"abcdefg", source="book"), strict=True))
        before = copy.deepcopy(known)
        for request in requests:
            documents = [known[name] for name in request]
            given_documents = list(documents)
            ordered = self.order(adapter, documents)
            assert Counter(map(id, ordered)) == Counter(map(id, given_documents))
            assert list(map(id, documents)) == list(map(id, given_documents))
        assert known == before

    @inherited
    @given(REQUESTS)
    def test_the_order_is_that_of_the_plain_orderer(self, requests: list[list[str]]) -> None:
        plain, adapter = Orderer(**SMALL), self.adapter(Orderer(**SMALL))
        for request in requests:
            documents = self.found(*request)
            ordering = plain.order([Document(*self.read(document)) for document in documents])
            ordering.confirm()
            ordered = self.order(adapter, documents)
            assert self.texts(ordered) == self.texts([documents[rank] for rank in ordering.permutation])

    async def test_no_documents_are_no_documents(self, orderer: Orderer) -> None:
        adapter = self.adapter(orderer)
        assert self.order(adapter, []) == await self.aorder(adapter, []) == []
        assert orderer.fallbacks == 0

    async def test_the_asynchronous_path_gives_the_same_without_a_thread(self, orderer: Orderer) -> None:
        threads: list[int] = []
        adapter = self.adapter(orderer, key=lambda document: threads.append(threading.get_ident()))
        assert self.texts(await self.aorder(adapter, self.found(*"abc"))) == self.expected(*"abc")
        assert self.texts(await self.aorder(adapter, self.found(*"dcba"))) == self.expected(*"abcd")
        assert set(threads) == {threading.get_ident()}

    def test_changed_text_under_an_old_id_is_another_document(self, orderer: Orderer) -> None:
        adapter = self.adapter(orderer)
        self.order(adapter, self.found(*"ab"))
        changed = self.found(*"ba", text="something else {}")
        assert self.texts(self.order(adapter, changed)) == self.texts(changed)

    def test_key_gives_an_identity_and_none_means_the_own_id(self, orderer: Orderer) -> None:
        recorder = Recorder(orderer)
        document = self.found("a")
        self.order(self.adapter(recorder, key=lambda document: 8), document)
        self.order(self.adapter(recorder, key=lambda document: None), document)
        assert [read.id for read in recorder.documents] == ["8", self.read(document[0])[0]]

    def test_tokens_gives_the_length(self, orderer: Orderer) -> None:
        recorder = Recorder(orderer)
        self.order(self.adapter(recorder, tokens=lambda document: 7), self.found("a"))
        self.order(self.adapter(recorder), self.found("a"))
        assert [read.tokens for read in recorder.documents] == [7, None]
        assert [read.text for read in recorder.documents] == self.expected("a", "a")

    def test_scopes_share_nothing(self, orderer: Orderer) -> None:
        ours, theirs = (self.adapter(orderer, scope=tenant) for tenant in ("ours", "theirs"))
        self.order(ours, self.found(*"ab"))
        assert self.texts(self.order(theirs, self.found(*"ba"))) == self.expected(*"ba")
        assert self.texts(self.order(ours, self.found(*"ba"))) == self.expected(*"ab")

    async def test_a_broken_function_leaves_retrieval_order_and_is_counted_or_raises_if_strict(
        self, orderer: Orderer
    ) -> None:
        self.order(self.adapter(orderer), self.found(*"ab"))
        cases = [{name: broken} for name in self.options] + [{"tokens": str}, {"tokens": lambda _: -1}]
        for count, options in enumerate(cases):
            adapter = self.adapter(orderer, **options)
            assert self.texts(self.order(adapter, self.found(*"ba"))) == self.expected(*"ba"), options
            assert self.texts(await self.aorder(adapter, self.found(*"ba"))) == self.expected(*"ba"), options
            assert orderer.fallbacks == 2 * count + 2, options
        with pytest.raises(LookupError):
            self.order(self.adapter(Orderer(strict=True), key=broken), self.found("a"))

    def test_an_unreadable_document_leaves_retrieval_order_and_is_counted(self, orderer: Orderer) -> None:
        documents: list[Any] = [*self.found("b"), object(), *self.found("a")]
        assert self.order(self.adapter(orderer), documents) == documents
        assert orderer.fallbacks == 1

    def test_an_ordering_counts_as_served_at_once(self, orderer: Orderer) -> None:
        recorder = Recorder(orderer)
        self.order(self.adapter(recorder), self.found("a"))
        assert recorder.finished == [(True, None, None, None)]

    def test_chunks_of_one_source_keep_their_order(self) -> None:
        """The orderer sees a document's metadata: its guards work in every framework."""
        if not self.has_metadata:
            pytest.skip("documents of this framework have no metadata")
        for keep_groups, expected in ((False, "ab"), (True, "ba")):
            adapter = self.adapter(Orderer(block_size=1, keep_groups=keep_groups))
            self.order(adapter, self.found(*"ab", source="book"))
            ordered = self.order(adapter, self.found(*"ba", source="book"))
            assert self.texts(ordered) == self.texts(self.found(*expected, source="book"))

    def test_a_pickle_has_a_new_orderer_with_the_same_settings(self) -> None:
        adapter = self.adapter(Orderer(block_size=1, keep_first=1))
        self.order(adapter, self.found(*"abc"))
        again = pickle.loads(pickle.dumps(adapter))  # noqa: S301
        assert self.texts(self.order(again, self.found(*"acb"))) == self.expected(*"acb")
        assert self.texts(self.order(again, self.found(*"abc"))) == self.expected(*"acb")
        assert self.texts(self.order(again, self.found(*"bca")))[0] == self.expected("b")[0]

    async def test_threads_and_tasks_get_their_own_documents(self, orderer: Orderer) -> None:
        adapter = self.adapter(orderer)
        with ThreadPoolExecutor(64) as pool:
            in_threads = list(pool.map(lambda names: self.order(adapter, self.found(*names)), CONCURRENT))
        in_tasks = await asyncio.gather(*[self.aorder(adapter, self.found(*names)) for names in CONCURRENT])
        for results in (in_threads, in_tasks):
            assert [sorted(self.texts(each)) for each in results] == [sorted(self.expected(*n)) for n in CONCURRENT]
        assert orderer.fallbacks == 0
