"""No request of decoupled batches is lost or answered twice, whatever allocation or disk fails, and whenever."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.inside import file_of, scanner_of
from support.rings import length

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.waiting import turns
from support.workflow_server import SlowEngine, answer_of, asking, document, embed, question, small_index
from support.workflows import Asked, Committed, PlainPrompts

from ragorder.pipelining import AnswerChunk, PartitionedSearch
from ragorder.pipelining.batching import (
    AllWaiting,
    BacklogAware,
    BatchEvent,
    DecoupledServer,
    PartitionedRetrieval,
    RequestTrace,
    TrieKV,
)
from ragorder.pipelining.workflow import NodeQuestion

SITES = {
    *("before the answer", "within the answer", "after the answer", "commit", "relief"),
    *("embed", "centroids", "read", "scan", "before a stage's scan", "after a stage's scan", "document"),
    *("policy", "observer", "hook"),
}
# Never fits, even alone.
POISON = question(99)


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


SHORTAGES = (MemoryError, OSError, OutOfMemoryError)


class Faults:
    """Injects failures by call site, and counts them, and those of memory and input or output alone."""

    def __init__(self, seed: int, share: float) -> None:
        self.random = Random(seed)
        self.share = share
        self.injected: Counter[str] = Counter()
        self.shortages = 0

    def at(self, site: str, *kinds: type[Exception], share: float | None = None) -> None:
        if self.random.random() < (self.share if share is None else share):
            self.injected[site] += 1
            kind = self.random.choice(kinds or SHORTAGES)
            self.shortages += issubclass(kind, SHORTAGES)
            raise kind("a secret")

    def wrapped(self, function: Any, site: str, *kinds: type[Exception], share: float | None = None) -> Any:
        """A function that may fail instead of running."""

        def failing(*arguments: Any, **options: Any) -> Any:
            self.at(site, *kinds, share=share)
            return function(*arguments, **options)

        return failing


class FailingEngine(SlowEngine):
    """Fails before, within and after answers."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        self.faults.at("before the answer", share=1.0 if request.question == POISON else None)
        async with aclosing(super().stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                self.faults.at("within the answer", share=self.faults.share / 10)
        self.sent.clear()
        self.faults.at("after the answer")

    def relieve(self) -> bool:
        self.faults.at("relief", ZeroDivisionError, share=0.2)
        return self.faults.random.random() < 0.3


class FailingPrompts(PlainPrompts):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    def commit(self, question: NodeQuestion, documents: Sequence[Any], /) -> Committed:
        self.faults.at("commit")
        return super().commit(question, documents)


def fail_in(search: PartitionedSearch, faults: Faults) -> None:
    """Fail reads and scans of a search by partition, and its second scans."""
    file, index, scanner = file_of(search), file_of(search).index, scanner_of(search)
    visit = scanner.scan_visits

    def visited(*arguments: Any) -> Any:
        found = visit(*arguments)
        faults.at("after a stage's scan")
        return found

    file.read = faults.wrapped(file.read, "read", OSError, MemoryError)
    index.scan = faults.wrapped(index.scan, "scan", MemoryError, share=faults.share / 4)
    index.nearest_clusters = faults.wrapped(index.nearest_clusters, "centroids", MemoryError)
    scanner.scan_visits = faults.wrapped(visited, "before a stage's scan")


@pytest.fixture(scope="module")
def index() -> Any:
    """Half of its vectors twice, for ties."""
    index, copy = small_index(), small_index()
    copy.make_direct_map()
    index.add(copy.reconstruct_n(0, 200))
    return index


class OnlyBatches:
    """A retrieval whose batches no request joins."""

    def __init__(self, retrieval: PartitionedRetrieval[Any, Any]) -> None:
        self.search_batch = retrieval.search_batch
        self.relieve = retrieval.relieve


@pytest.mark.parametrize(
    ("joins", "passes"),
    [(True, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, True), (True, False)))],
)
async def test_ten_thousand_failures(joins: bool, passes: bool, path: Path, index: Any) -> None:
    """Of allocations, input and output, beside cancellations at random times, streams, reorganisations, policies and
    observers that fail; with engines and passes that requests join or not."""
    failures = length(10_000, 400)
    wanted = ("MemoryError", "OSError", "KeyError", "hooks that failed")
    faults = Faults(seed=int(joins) + 2 * int(passes), share=0.03)
    random, outcomes, events, traces = faults.random, Counter[str](), list[BatchEvent](), list[RequestTrace]()
    engine, prompts = FailingEngine(faults), FailingPrompts(faults)
    expected = {question(number).text: answer_of(index, question(number)) for number in range(6)}
    embedded = faults.wrapped(embed, "embed", MemoryError, ValueError)
    fetched = faults.wrapped(document, "document", MemoryError, KeyError, share=0.005)

    def observe(observed: Any) -> None:
        (events if isinstance(observed, BatchEvent) else traces).append(observed)
        faults.at("observer", ZeroDivisionError, share=0.01)

    class Policy(BacklogAware):
        def size(self, backlog: Any) -> int:
            faults.at("policy", ZeroDivisionError, share=0.01)
            return random.choice((super().size(backlog), 1, 3, 16))

    async def request(server: DecoupledServer[Any, Any, Any], streamed: bool) -> None:
        asked = question(99 if random.random() < 0.03 else random.randrange(6))

        async def ask() -> tuple[list[str], str]:
            if not streamed:
                answer = await server.run(asked)
                return list(answer.documents), answer.text
            async with server.stream(asked) as stream:
                pieces = [piece async for piece in stream]
            assert stream.answer is not None and "".join(pieces) == stream.answer.text
            return list(stream.answer.documents), stream.answer.text

        run = asyncio.create_task(ask())
        if random.random() < 0.2:
            await turns(random.randrange(150))
            run.cancel()
            if random.random() < 0.2:
                await asyncio.sleep(0)
                run.cancel()
        try:
            assert await run == expected.get(asked.text)
            outcomes["answered"] += 1
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
        except (*SHORTAGES, ValueError, KeyError) as error:
            assert "a secret" in str(error)
            outcomes[type(error).__name__] += 1

    async def reorganise(server: DecoupledServer[Any, Any, Any], search: PartitionedSearch) -> None:
        worker = random.choice((server.retrieving, server.generating))

        def hook() -> None:
            assert not worker.running
            search.resize(random.randrange(6))
            faults.at("hook", ZeroDivisionError, share=0.3)

        try:
            await asyncio.wait_for(worker.between_batches(hook), random.choice((30, 0.0001)))
        except (ZeroDivisionError, TimeoutError):
            outcomes["hooks that failed"] += 1

    count = 0
    tokens = faults.wrapped(lambda name: 100, "kv", ZeroDivisionError, share=0.002)
    kv: Any = TrieKV(key=str, tokens=tokens, own_tokens=lambda question: 10)
    with PartitionedSearch(path, 5, resident=2, cores=1) as search:
        fail_in(search, faults)
        retrieval: Any = PartitionedRetrieval(search, embedded, fetched, top_k=3)
        async with DecoupledServer(
            retrieval if passes else OnlyBatches(retrieval),
            prompts,
            engine,
            joins=joins,
            batching=Policy(most=16),
            searching=AllWaiting(12),
            kv=kv,
            kv_limit=1500,
            max_contexts=20,
            observer=observe,
        ) as server:
            while faults.shortages < failures or not all(outcomes[each] for each in wanted):
                assert count < 100 * failures, outcomes
                count += 40
                await asyncio.gather(
                    *(request(server, streamed=number % 5 == 0) for number in range(40)), reorganise(server, search)
                )
                assert server.unfinished == server.retrieving.waiting == server.generating.waiting == 0
                assert not server.retrieving.running and not server.generating.running
                assert engine.running == prompts.open == 0
    del outcomes["hooks that failed"]
    assert outcomes.total() == count and outcomes["answered"] > count / 2 and outcomes["cancelled"] > count / 50
    assert set(faults.injected) >= SITES
    ended = Counter(trace.outcome for trace in traces)
    # Each request has one trace; one that is cancelled before it starts has none.
    assert ended["answered"] == outcomes["answered"] and "running" not in ended
    assert ended["failed"] == count - outcomes["answered"] - outcomes["cancelled"]
    assert sum(trace.failures for trace in traces) > count / 20
    assert {"began", "ended", "failed", "relieved", "reorganised"} == {event.event for event in events}
    searches = Counter(event.event for event in events if event.worker == "retrieval")
    assert (searches["began"] > searches["ended"] + searches["failed"]) == passes


@pytest.mark.parametrize("site", ["read", "scan"])
async def test_a_failure_at_every_call(site: str, path: Path, index: Any) -> None:
    """Of reads and scans, each once: from the first to the last of a batch's search."""
    for failing in range(1, 200):
        with PartitionedSearch(path, 5, cores=1, nprobe=8) as search:
            owner: Any = file_of(search) if site == "read" else file_of(search).index
            call, calls = getattr(owner, site), 0

            def once(*arguments: Any, call: Any = call, failing: int = failing, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == failing:
                    raise MemoryError
                return call(*arguments, **options)

            setattr(owner, site, once)
            retrieval: Any = PartitionedRetrieval(search, embed, document, top_k=3)
            async with DecoupledServer(retrieval, PlainPrompts(), SlowEngine()) as server:
                answers = await asyncio.gather(*asking(server, *range(6)))
            assert [list(each.documents) for each in answers] == [answer_of(index, question(n))[0] for n in range(6)]
            if calls < failing:
                break
    assert failing > 5
