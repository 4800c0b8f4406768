"""Queries join a pass over partitions where it stands, go around, and find what FAISS finds."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import file_of
from support.rings import examples

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.decoupled import expected, picky
from support.ivf import IP, L2, assert_same, last, tied_index, write
from support.waiting import until
from support.workflow_server import SlowEngine, asking, document, embed, question
from support.workflows import PlainPrompts

from ragorder.pipelining import PartitionedSearch
from ragorder.pipelining.batching import AllWaiting, DecoupledServer, PartitionedRetrieval
from ragorder.pipelining.batching.pass_rows import PassRows
from ragorder.pipelining.batching.requests import BatchedRequest

PARTITIONS = 5


@pytest.fixture(scope="module")
def index(whole_index: Any) -> Any:
    return whole_index


@pytest.fixture
def search(path: Path) -> Iterator[PartitionedSearch]:
    with PartitionedSearch(path, PARTITIONS, cores=1) as search:
        yield search


def vectors(*numbers: int) -> Any:
    return embed([question(number) for number in numbers])


def wrap_reads(search: PartitionedSearch, before: Callable[[int], object]) -> None:
    """Call `before` with each partition that is read."""
    read = file_of(search).read

    def wrapped(partition: int) -> Any:
        before(partition)
        return read(partition)

    file_of(search).read = wrapped  # type: ignore[method-assign]


class TestResults:
    @settings(max_examples=examples(400))
    @given(
        metric=st.sampled_from([L2, IP]),
        nlist=st.integers(1, 12),
        k=st.integers(1, 12),
        read_ahead=st.booleans(),
        shares=st.tuples(*[st.sampled_from([0.0, 0.1, 0.3])] * 3),
        seed=st.integers(0, 2**16),
    )
    def test_are_those_of_faiss_whoever_joins_and_leaves(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        metric: int,
        nlist: int,
        k: int,
        read_ahead: bool,
        shares: tuple[float, float, float],
        seed: int,
    ) -> None:
        """Most distances are tied. Queries leave for ever, or with a checkpoint and come back; reads fail."""
        rng, random = np.random.default_rng(seed), Random(seed)
        index = tied_index(rng, metric, 4, 100, nlist)
        index.nprobe = random.randint(1, nlist)
        queries = rng.integers(0, 4, (12, 3)).astype(np.float32)
        partitions = random.randint(1, nlist)
        options: dict[str, Any] = {"resident": random.randint(0, partitions), "cores": 1, "read_ahead": read_ahead}
        path = write(index, tmp_path_factory.mktemp("tied"))
        try:
            with PartitionedSearch(path, partitions, **options) as search:
                found, gone = walk(search, queries, k, random, *shares)
        finally:
            shutil.rmtree(path.parent)
        distances, ids = index.search(queries, k)
        assert found.keys() | gone == set(range(12)) and not found.keys() & gone
        for query, (best, best_ids) in found.items():
            np.testing.assert_array_equal(best, distances[query])
            np.testing.assert_array_equal(best_ids, ids[query])

    @pytest.mark.parametrize("read_ahead", [True, False])
    def test_each_reads_no_partition_twice(self, index: Any, path: Path, read_ahead: bool) -> None:
        reads: list[int] = []
        with PartitionedSearch(path, PARTITIONS, cores=1, read_ahead=read_ahead) as search:
            wrap_reads(search, reads.append)
            passing = search.search(vectors(0), 3)
            for _ in range(3):
                next(passing)
            with pytest.raises(ValueError, match="same k"):
                passing.join([search.search(vectors(1), 4).rows])
            passing.join([search.search(vectors(1, 2), 3).rows])
            stages = list(passing)
        assert reads == [0, 1, 2, 3, 4, 0, 1, 2]
        assert [stage.final for stage in stages] == [False] * 4 + [True]
        assert_same(stages[-1], index.search(vectors(0, 1, 2), 3))
        # The first one had passed over all of them before the others had.
        np.testing.assert_array_equal(stages[1].ids[:1], index.search(vectors(0), 3)[1])

    def test_a_pass_that_has_ended_goes_on(self, index: Any, search: PartitionedSearch) -> None:
        passing = search.search(vectors(0), 3)
        assert last(passing).final and next(passing, None) is None
        passing.join([search.search(vectors(1), 3).rows])
        assert_same(last(passing), index.search(vectors(0, 1), 3))

    def test_those_that_join_all_the_time_hold_up_no_other(self, path: Path) -> None:
        with PartitionedSearch(path, PARTITIONS, resident=2, cores=1) as search:
            list(search.search(vectors(0), 3))
            assert len(search.held) == 2
            passing, stages = search.search(vectors(0), 3), 0
            while not passing.rows.ended[0]:
                next(passing)
                stages += 1
                if passing.joinable:
                    passing.join([search.search(vectors(stages), 3).rows])
                    assert not passing.joinable
            # The residents of those that have joined, and then a partition, over and over.
            assert stages <= 2 * (PARTITIONS - 2) + 1
            passing.close()


def walk(
    search: PartitionedSearch, queries: Any, k: int, random: Random, go: float, pause: float, fail: float
) -> tuple[dict[int, tuple[Any, Any]], set[int]]:
    """Results by query, and the queries that are gone."""

    def failing(partition: int) -> None:
        if random.random() < fail:
            raise OSError("the disk")

    wrap_reads(search, failing)
    waiting: list[tuple[int, Any]] = [(query, None) for query in range(len(queries))]
    random.shuffle(waiting)
    found: dict[int, tuple[Any, Any]] = {}
    gone: set[int] = set()

    def begin() -> tuple[list[int], list[Any]]:
        """The next ones: those that have left with a checkpoint, too."""
        chosen = [waiting.pop(random.randrange(len(waiting))) for _ in range(random.randint(1, min(3, len(waiting))))]
        parts = [search.search(queries[[query]], k).rows if rows is None else rows for query, rows in chosen]
        return [query for query, _ in chosen], parts

    while waiting:
        rows, parts = begin()
        passing = search.resume(parts)
        while rows:
            try:
                stage = next(passing)
            except OSError:
                continue
            left = []
            for row, ended in enumerate(passing.rows.ended.tolist()):
                if ended:
                    found[rows[row]] = stage.distances[row], stage.ids[row]
                elif random.random() < go:
                    gone.add(rows[row])
                elif random.random() < pause:
                    waiting.append((rows[row], passing.rows.part([row])))
                else:
                    left.append(row)
            if left and len(left) < len(rows):
                passing.keep(left)
            rows = [rows[row] for row in left]
            if rows and waiting and random.random() < 0.5:
                joining, parts = begin()
                passing.join(parts)
                rows += joining
        passing.close()
    return found, gone


class Gate:
    """Reads of partitions that wait until they are let through. `asked`: those that have come to it; `failures`: those
    that then fail, once."""

    def __init__(self, search: PartitionedSearch) -> None:
        self.asked: list[int] = []
        self.failures: list[int] = []
        self._open = threading.Semaphore(0)
        wrap_reads(search, self._wait)

    def _wait(self, partition: int) -> None:
        self.asked.append(partition)
        self._open.acquire()
        if partition in self.failures:
            self.failures.remove(partition)
            raise OSError("the disk")

    def let_through(self, count: int = 1) -> None:
        self._open.release(count)

    async def reached(self, *asked: int) -> None:
        await until(lambda: tuple(self.asked) == asked, 0.001)


@asynccontextmanager
async def gated_server(path: Path, **options: Any) -> AsyncIterator[tuple[DecoupledServer[Any, Any, Any], Gate]]:
    with PartitionedSearch(path, PARTITIONS, cores=1, read_ahead=False) as search:
        gate = Gate(search)
        retrieval = PartitionedRetrieval(search, picky, document, top_k=3)
        try:
            async with DecoupledServer(retrieval, PlainPrompts(), SlowEngine(), **options) as server:
                yield server, gate
        finally:
            gate.let_through(1000)


async def waiting(server: DecoupledServer[Any, Any, Any], count: int) -> None:
    await until(lambda: server.retrieving.waiting == count, 0.001)


async def join_a_pass(server: DecoupledServer[Any, Any, Any], gate: Gate, *numbers: int) -> list[asyncio.Task[Any]]:
    """Request 0 has come to its third partition when these come; then no read waits any more."""
    runs = asking(server, 0)
    gate.let_through(2)
    await gate.reached(0, 1, 2)
    runs += asking(server, *numbers)
    await waiting(server, len(numbers))
    gate.let_through(100)
    return runs


class TestServer:
    async def test_a_request_that_comes_during_a_pass_joins_it(self, path: Path, index: Any) -> None:
        async with gated_server(path) as (server, gate):
            answers = await asyncio.gather(*await join_a_pass(server, gate, 1, 2))
            assert gate.asked == [0, 1, 2, 3, 4, 0, 1, 2]
            assert [answer.text for answer in answers] == expected(index, 0, 1, 2)
            assert [answer.trace.retrieval_batch for answer in answers] == [3, 3, 3]
            began = [each.running for each in server.trace if (each.worker, each.event) == ("retrieval", "began")]
            assert began == [1, 3]
            assert not server.retrieving.running and server.unfinished == 0

    async def test_a_batch_is_no_larger_than_its_policy_says(self, path: Path, index: Any) -> None:
        async with gated_server(path, searching=AllWaiting(2)) as (server, gate):
            gate.let_through(100)
            answers = await asyncio.gather(*asking(server, *range(5)))
        assert [answer.text for answer in answers] == expected(index, *range(5))
        assert max(answer.trace.retrieval_batch for answer in answers) == 2

    async def test_a_hook_waits_for_those_that_run_and_for_no_others(self, path: Path) -> None:
        async with gated_server(path) as (server, gate):
            runs = asking(server, 0)
            gate.let_through(2)
            await gate.reached(0, 1, 2)
            hook = asyncio.create_task(server.retrieving.between_batches(lambda: list(gate.asked)))
            await asyncio.sleep(0)
            runs += asking(server, 1)
            await waiting(server, 1)
            gate.let_through(100)
            assert await hook == [0, 1, 2, 3, 4]
            await asyncio.gather(*runs)
            assert gate.asked == [0, 1, 2, 3, 4] * 2

    async def test_a_cancelled_request_leaves_the_pass_at_the_next_partition(self, path: Path, index: Any) -> None:
        async with gated_server(path) as (server, gate):
            stays, leaves = asking(server, 0, 1)
            await gate.reached(0)
            assert len(server.retrieving.running) == 2
            leaves.cancel()
            await asyncio.wait((leaves,))
            gate.let_through()
            await gate.reached(0, 1)
            assert len(server.retrieving.running) == 1
            gate.let_through(100)
            assert [(await stays).text] == expected(index, 0)

    async def test_a_pass_that_goes_on_keeps_nothing_of_those_that_have_left(self, path: Path) -> None:
        # Other tests of this process may have left some.
        gc.collect()
        left = [each for each in gc.get_objects() if isinstance(each, BatchedRequest | PassRows)]
        async with gated_server(path) as (server, gate):
            runs = asking(server, 0)
            await gate.reached(0)
            for step in range(1, 11):
                runs += asking(server, 20 + step)
                await waiting(server, 1)
                gate.let_through(4)
                await until(lambda reads=1 + 4 * step: len(gate.asked) == reads, 0.001)
            assert not any((each.worker, each.event) == ("retrieval", "ended") for each in server.trace)
            gc.collect()
            kept = [each for each in gc.get_objects() if not any(each is other for other in left)]
            # Those that still run, and no others.
            assert 0 < sum(isinstance(each, BatchedRequest) for each in kept) < 4
            assert 0 < max(len(each.queries) for each in kept if isinstance(each, PassRows)) < 4
            gate.let_through(100)
            await asyncio.gather(*runs)

    async def test_a_question_that_cannot_join_ends_alone(self, path: Path, index: Any) -> None:
        async with gated_server(path) as (server, gate):
            runs = await join_a_pass(server, gate, 1, 2, 13)
            *answers, refused = await asyncio.gather(*runs, return_exceptions=True)
            assert isinstance(refused, ValueError)
            assert [answer.text for answer in answers] == expected(index, 0, 1, 2)
            assert gate.asked == [0, 1, 2, 3, 4, 0, 1, 2]

    async def test_a_disk_that_fails_sets_back_no_request(self, path: Path, index: Any) -> None:
        async with gated_server(path) as (server, gate):
            gate.failures = [3]
            answers = await asyncio.gather(*await join_a_pass(server, gate, 1))
            assert [answer.text for answer in answers] == expected(index, 0, 1)
            assert [answer.trace.failures for answer in answers] == [1, 1]
            # One request after another goes on with the failed batch of two, or joins it: none starts over.
            assert gate.asked[:4] == [0, 1, 2, 3] and len(gate.asked) <= 4 + 2 + 5
