"""One orderer under threads and tasks at once."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from support.orders import check_sound
from support.rings import length
from support.waiting import counted_lines

from ragorder import Document, Orderer, Ordering
from ragorder.ordering import RequestOutcome
from ragorder.scope.request import RequestReader
from ragorder.trie.residency.blocks import EngineBlocks

ORDERS = length(50_000, 6_000)
THREADS = 16
TASKS = 64
TOP_K = 5


def token_ids(document: Document) -> range:
    first = 1_000 * int(document.id)
    return range(first, first + document.token_count)


def make_orderer(residency: str, documents: Sequence[Document]) -> tuple[Orderer, Any]:
    """An orderer, and what an engine's events are told to if it hears of any."""
    blocks = EngineBlocks(16) if residency == "events" else None
    told = {"blocks": blocks, "token_ids": token_ids} if blocks is not None else {"residency": residency}
    return Orderer(capacity_tokens=60_000, block_size=16, strict=True, **told), blocks


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    yield
    sys.setswitchinterval(interval)


class Load:
    """Orders from threads and from tasks; what was given and what came back is kept for the checks."""

    def __init__(self, orderer: Orderer, documents: Sequence[Document], orders: int = ORDERS) -> None:
        self.orderer = orderer
        self.errors: list[BaseException] = []
        self.results: list[tuple[list[Document], Ordering[Document]]] = []
        rng = random.Random(0)
        topics = [rng.sample(documents, 8) for _ in range(len(documents) // 4)]
        requests = [rng.sample(rng.choice(topics[: 1 + rng.randrange(len(topics))]), TOP_K) for _ in range(orders)]
        ways = THREADS + TASKS
        self.shares = [requests[way::ways] for way in range(ways)]

    def step(self, number: int, given: list[Document], mine: list[Any]) -> None:
        ordering = self.ask(number, given, None if number % 3 else "tenant")
        if number % 11 == 0:
            ordering.discard()
        elif number % 7:
            ordering.confirm(ordering.cached_tokens if number % 5 else 0, 1_200)
        mine.append((given, ordering))

    def ask(self, number: int, given: list[Document], scope: str | None) -> Ordering[Document]:
        return self.orderer.order(given, scope=scope)

    def work(self, share: Sequence[list[Document]]) -> None:
        mine: list[Any] = []
        try:
            for number, given in enumerate(share):
                self.step(number, given, mine)
        except BaseException as error:
            self.errors.append(error)
        self.results += mine

    async def task(self, share: Sequence[list[Document]]) -> None:
        mine: list[Any] = []
        for number, given in enumerate(share):
            self.step(number, given, mine)
            await asyncio.sleep(0)
        self.results += mine

    def loop(self) -> None:
        async def run() -> None:
            await asyncio.gather(*map(self.task, self.shares[THREADS:]))

        try:
            asyncio.run(run())
        except BaseException as error:
            self.errors.append(error)

    def run(self) -> None:
        threads = [threading.Thread(target=self.work, args=(share,)) for share in self.shares[:THREADS]]
        threads.append(threading.Thread(target=self.loop))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def check(self) -> None:
        assert self.errors == []
        assert len(self.results) == sum(map(len, self.shares))
        for given, ordering in self.results:
            assert sorted(map(id, ordering.documents)) == sorted(map(id, given))
            assert [given[rank] for rank in ordering.permutation] == ordering.documents
        check_sound(self.orderer)
        assert self.orderer.fallbacks == 0


class MixedLoad(Load):
    """Batches too, and orders that know of a waiting request."""

    def ask(self, number: int, given: list[Document], scope: str | None) -> Ordering[Document]:
        if number % 13 == 0:
            return next(iter(self.orderer.order_batch([given], scope=scope)))
        return self.orderer.order(given, scope=scope, waiting=[] if number % 5 else [given[::-1]])


@pytest.fixture
def documents() -> list[Document]:
    rng = random.Random(1)
    return [Document(str(number), "", tokens=rng.randint(50, 300)) for number in range(400)]


@pytest.mark.parametrize("residency", ["lru", "none", "events"])
@pytest.mark.usefixtures("often_interrupted")
def test_every_result_is_a_permutation_of_its_own_input_and_the_trees_are_sound(
    residency: str, documents: list[Document]
) -> None:
    orderer, blocks = make_orderer(residency, documents)
    load = MixedLoad(orderer, documents, orders=length(10_000, 2_500) if blocks is not None else ORDERS)
    stop = threading.Event()
    engine = threading.Thread(target=talk, args=(blocks, documents, stop))
    if blocks is not None:
        engine.start()
    load.run()
    stop.set()
    if blocks is not None:
        engine.join()
    load.check()


def talk(blocks: EngineBlocks, documents: Sequence[Document], stop: threading.Event) -> None:
    """An engine that tells of blocks of ours that come and go, and of its restarts."""
    rng = random.Random(2)
    hashes: list[int] = []
    while not stop.is_set():
        ids = [token for document in rng.sample(documents, 3) for token in token_ids(document)]
        count = len(ids) // 16
        first = rng.randrange(10**12)
        blocks.store(range(first, first + count), None, ids[: count * 16])
        hashes += range(first, first + count)
        blocks.remove(rng.sample(hashes, min(len(hashes), 20)))
        if rng.random() < 0.01:
            blocks.clear()
        if rng.random() < 0.01:
            blocks.replace(blocks.make_successor(same_engine=False), same_engine=False)
        time.sleep(0.0005)


def test_an_order_and_its_confirmation_run_no_more_than_1_500_lines_of_python(documents: list[Document]) -> None:
    load = Load(make_orderer("lru", documents)[0], documents, orders=2_000)
    mine: list[Any] = []
    with counted_lines() as lines:
        for share in load.shares:
            for number, given in enumerate(share):
                load.step(number, given, mine)
    load.results += mine
    load.check()
    assert lines[0] < 1_500 * len(mine)


def interrupted(work: Callable[[], object], meanwhile: Callable[[], object], every: int = 1) -> int:
    """Do the work, and something else in another thread between any two of its steps (bytecodes), or between `every` so
    many. How often."""
    steps = count()
    times = 0

    def step(frame: Any, event: str, argument: object) -> Any:
        nonlocal times
        frame.f_trace_opcodes = True
        if event == "opcode" and not next(steps) % every:
            times += 1
            other = threading.Thread(target=meanwhile)
            other.start()
            other.join()
        return step

    former = sys.gettrace()
    sys.settrace(step)
    try:
        work()
    finally:
        sys.settrace(former)
    return times


@pytest.mark.parametrize("end", ["confirm", "discard"])
def test_a_collection_of_another_thread_at_any_step_disturbs_no_outcome(end: str, documents: list[Document]) -> None:
    orderer, told = Orderer(strict=True), list[RequestOutcome]()
    ordering = orderer.order(documents[:3])
    for _ in range(2):
        ordering.add_done_callback(told.append)
    assert interrupted(getattr(ordering, end), partial(gc.collect, 0)) > 100
    assert told == [RequestOutcome(end == "confirm")] * 2
    assert orderer.predict_cached_tokens(documents[:3])[0] > 0 or end == "discard"


def closed_at(place: int, documents: Sequence[Document]) -> bool:
    """Order, and close the orderer before step (bytecode) number `place` outside its lock. Whether there is one."""
    orderer, _ = make_orderer("events", documents)
    orderer.events = SimpleNamespace(close=lambda: None)
    steps = count()

    def trace(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code not in (Orderer.order.__code__, RequestReader.read.__code__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == place:
            orderer.close()
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        ordering = orderer.order(documents)
    finally:
        sys.settrace(former)
    assert sorted(map(id, ordering.documents)) == sorted(map(id, documents))
    ordering.confirm()
    return next(steps) > place


def test_an_orderer_may_be_closed_at_any_step_of_an_order(documents: list[Document]) -> None:
    steps = next(place for place in count() if not closed_at(place, documents[:3]))
    assert steps > 100


class TestLengthsThatACloneLearnsAtTheSameTime:
    """They are of both, and each has its own lock."""

    def test_scopes_that_it_adds(self, documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 10_000)
        orderer, scopes = Orderer(strict=True, capacity_tokens=10**8), count()
        clone = orderer.clone()
        orderer.order(documents[:3]).confirm(0)
        lost = orderer.order(documents[:3])
        assert lost.cached_tokens > 0
        assert interrupted(lambda: lost.confirm(0), lambda: clone.order(documents[:3], scope=next(scopes)), 11) > 100
        assert orderer.predict_cached_tokens(documents[:3])[0] > 0

    def test_prompts_that_it_reports(self) -> None:
        given = [Document(str(number), "x" * 40 * number) for number in range(1, 5)]
        orderer = Orderer(strict=True)
        clone = orderer.clone()

        def serve(by: Orderer, requests: int = 1) -> None:
            for _ in range(requests):
                by.order(given).confirm(prompt_tokens=500)

        serve(clone, 300)
        assert interrupted(partial(serve, orderer, 400), partial(serve, clone), every=2003) > 50


def test_a_page_of_metrics_while_an_application_watches_more_orderers() -> None:
    pytest.importorskip("prometheus_client")
    from ragorder.adapters.observing.prometheus import Metrics

    class Idle:
        tree_size = evicted_blocks = 0
        shadow = False

    metrics, pages = Metrics(), list[list[Any]]()
    applications = [Idle() for _ in range(20_000)]
    more = map(metrics.watch, applications)
    for _ in range(10):
        next(more)
    assert interrupted(lambda: pages.append([*metrics.registry.collect()]), lambda: next(more), every=25) > 50
    assert pages
