"""The virtual clock: its loop, its servers, its engine and its searches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from ragorder.benchmarks.common.vectors import build_index, clustered
from ragorder.benchmarks.common.virtual.costs import EngineCosts, SearchCosts
from ragorder.benchmarks.common.virtual.engine import VirtualEngine
from ragorder.benchmarks.common.virtual.loop import DeadlockError, run_virtual
from ragorder.benchmarks.common.virtual.search import VirtualIVF, WholeSearches
from ragorder.pipelining.search import History

COSTS = EngineCosts(step_s=0.01, prefill_token_s=0.001, context_token_s=0.0, capacity_tokens=640)


def now() -> float:
    return asyncio.get_running_loop().time()


class TestTheLoop:
    def test_passes_time_only_while_all_tasks_wait(self) -> None:
        async def main() -> list[tuple[str, float]]:
            seen: list[tuple[str, float]] = []

            async def note(name: str, *waits_s: float) -> None:
                for wait_s in waits_s:
                    await asyncio.sleep(wait_s)
                    seen.append((name, now()))

            await asyncio.gather(note("a", 3600, 3600), note("b", 5000))
            return seen

        assert run_virtual(main()) == [("a", 3600), ("b", 5000), ("a", 7200)]

    def test_runs_what_a_thread_would_at_once(self) -> None:
        async def main() -> tuple[int, float]:
            return await asyncio.to_thread(sum, (1, 2)), now()

        assert run_virtual(main()) == (3, 0)
        with pytest.raises(ZeroDivisionError):
            run_virtual(asyncio.to_thread(divmod, 1, 0))

    def test_says_that_no_timer_is_left(self) -> None:
        async def main() -> None:
            await asyncio.Event().wait()

        with pytest.raises(DeadlockError, match="no timer is set"):
            run_virtual(main())

    @given(st.lists(st.floats(0, 1e5), min_size=1, max_size=20))
    def test_has_no_event_in_the_past(self, waits_s: list[float]) -> None:
        seen: list[float] = []

        async def wait(seconds: float) -> None:
            due_s = now() + seconds
            await asyncio.sleep(seconds)
            assert now() == pytest.approx(due_s, abs=1e-6)
            seen.append(now())
            await asyncio.sleep(seconds / 2)
            seen.append(now())

        async def main() -> None:
            await asyncio.gather(*map(wait, waits_s))

        run_virtual(main())
        assert seen == sorted(seen)

    @pytest.mark.parametrize("load", [0.5, pytest.param(0.8, marks=pytest.mark.slow)])
    def test_lets_jobs_of_one_server_wait_as_queueing_theory_says(self, load: float) -> None:
        """M/D/1: load / 2 (1 - load) service times, within 3 %."""
        draw = random.Random(1)
        waits_s: list[float] = []

        async def main() -> None:
            server = asyncio.Semaphore()

            async def job() -> None:
                start_s = now()
                async with server:
                    waits_s.append(now() - start_s)
                    await asyncio.sleep(1.0)

            async with asyncio.TaskGroup() as group:
                for _ in range(40_000):
                    await asyncio.sleep(draw.expovariate(load))
                    group.create_task(job())

        run_virtual(main())
        assert sum(waits_s) / len(waits_s) == pytest.approx(load / (2 * (1 - load)), rel=0.03)


@dataclass(frozen=True)
class Request:
    token_ids: Sequence[int]
    words: int


def words(request: Request) -> list[str]:
    return [f"w{number}" for number in range(request.words)]


async def text_of(engine: VirtualEngine[Request], request: Request, at_s: float = 0.0) -> tuple[str, Any, float]:
    await asyncio.sleep(at_s)
    text, usage = "", None
    async with aclosing(engine.stream(request)) as chunks:
        async for chunk in chunks:
            text, usage = text + chunk.text, chunk.usage
    return text, usage, now()


def served(*requests: tuple[Request, float]) -> list[tuple[str, Any, float]]:
    """What becomes of requests that come at these times."""

    async def main() -> Any:
        engine = VirtualEngine(COSTS, words)
        return await asyncio.gather(*(text_of(engine, *each) for each in requests))

    found: list[tuple[str, Any, float]] = run_virtual(main())
    return found


class TestTheEngine:
    def test_takes_the_time_of_its_steps(self) -> None:
        ((text, usage, end_s),) = served((Request(range(40), 5), 0))
        assert text.split() == words(Request((), 5))
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (40, 0, 5)
        assert end_s == pytest.approx(0.01 + 40 * 0.001 + 4 * 0.01)

    def test_reuses_a_prefix_in_whole_blocks(self) -> None:
        _, (_, usage, _) = served((Request(range(40), 1), 0), (Request([*range(36), 99, 98], 1), 1))
        assert usage.cached_tokens == 32

    def test_batches_what_decodes_and_lets_requests_join_between_steps(self) -> None:
        late = Request(range(100, 110), 2)
        (_, _, first_s), (_, _, late_s) = served((Request(range(40), 10), 0), (late, 0.055))
        # One step for the prompt and nine for the answer; the second prompt makes one of these 10 ms longer.
        assert first_s == pytest.approx(0.05 + 9 * 0.01 + 0.01)
        assert late_s == pytest.approx(0.06 + 0.02 + 0.01)

    def test_reports_progress_in_chunks(self) -> None:
        async def main() -> list[tuple[int, int]]:
            engine = VirtualEngine(COSTS, words, report_every=16)
            return [(len(each.text.split()), each.tokens) async for each in engine.stream(Request(range(8), 40))]

        assert run_virtual(main()) == [(1, 1), (15, 15), (16, 16), (8, 8)]

    def test_lets_a_request_without_room_wait(self) -> None:
        found = served((Request(range(400), 10), 0), (Request(range(1000, 1400), 10), 0))
        assert [end_s for _, _, end_s in found] == pytest.approx([0.5, 1.0])

    def test_keeps_of_an_aborted_prompt_what_was_computed(self) -> None:
        """Two steps of 64 tokens are over when it is aborted, in the third."""
        costs = replace(COSTS, token_budget=64)

        async def main() -> tuple[int, int, int]:
            engine = VirtualEngine(costs, words)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(text_of(engine, Request(range(320), 4)), 0.16)
            await asyncio.sleep(1)
            assert (engine.prompt_tokens, engine.computed_tokens) == (192, 192)
            _, usage, _ = await text_of(engine, Request(range(320), 4))
            return usage.cached_tokens, engine.prompt_tokens, engine.computed_tokens

        assert run_virtual(main()) == (192, 512, 320)

    def test_computes_what_an_aborted_prompt_was_to_share(self) -> None:
        costs = replace(COSTS, token_budget=64)

        async def main() -> Any:
            engine = VirtualEngine(costs, words)
            first = asyncio.create_task(text_of(engine, Request(range(160), 4)))
            await asyncio.sleep(0.001)
            others = [asyncio.create_task(text_of(engine, Request([*range(160), extra], 4))) for extra in (7, 8)]
            await asyncio.sleep(0.1)
            first.cancel()
            found = await asyncio.gather(*others)
            # Shared are whole blocks, all of the first prompt's.
            assert engine.computed_tokens == 160 + 2
            assert engine.cache.free_blocks == 40
            return [usage.cached_tokens for _, usage, _ in found]

        # Two steps of the first one were over: the second computes the rest, which the third shares.
        assert run_virtual(main()) == [128, 160]

    @settings(max_examples=50)
    @given(
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(1, 80), st.integers(1, 40), st.none() | st.integers(0, 60)),
            min_size=1,
            max_size=12,
        )
    )
    def test_answers_each_request_once_or_until_it_is_closed(self, requests: list[Any]) -> None:
        async def main() -> None:
            engine = VirtualEngine(COSTS, words)

            async def ask(at_s: int, prompt: int, answer: int, patience_s: int | None) -> None:
                request = Request(range(prompt), answer)
                call = text_of(engine, request, at_s / 100)
                if patience_s is None:
                    text, usage, _ = await call
                    assert text.split() == words(request)
                    assert usage.cached_tokens < prompt
                else:
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(call, patience_s / 100)
                        raise TimeoutError

            await asyncio.gather(*(ask(*each) for each in requests))
            await asyncio.sleep(10)
            assert engine.requests == 0
            assert engine.cache.free_blocks == 40
            assert engine.computed_tokens <= engine.prompt_tokens
            assert engine.busy_s == pytest.approx(
                engine.steps * COSTS.step_s + engine.computed_tokens * COSTS.prefill_token_s
            )

        run_virtual(main())


K = 3
LARGE = SearchCosts(code_s=1e-6, vectors=1_000_000, clusters=40_000, busy_cores=8, piece_s=1e-5)


@pytest.fixture(scope="module")
def index() -> Any:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield build_index(clustered(1000, 16, clusters=40, seed=0), 0.2)
    faiss.omp_set_num_threads(before)


@pytest.fixture(scope="module")
def queries() -> Any:
    return clustered(30, 16, clusters=40, seed=1)


def core_s(index: Any, query: Any) -> float:
    clusters = index.quantizer.search(query[None], index.nprobe)[1][0]
    return LARGE.code_s * LARGE.vectors_of(index) * sum(index.get_list_size(int(cluster)) for cluster in clusters)


class TestSearchesInPieces:
    @settings(max_examples=20)
    @given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.booleans())
    def test_find_what_faiss_finds(self, index: Any, queries: Any, at_ms: list[int], remember: bool) -> None:
        async def main() -> list[Any]:
            search = VirtualIVF(index, LARGE)
            history = History() if remember else None

            async def find(number: int, at_s: float) -> Any:
                await asyncio.sleep(at_s)
                stages = [stage async for stage in search.submit(queries[number], K, history=history).stages_async()]
                assert stages[-1].final
                return stages[-1].ids[0].tolist()

            found = await asyncio.gather(*(find(number, each / 1e3) for number, each in enumerate(at_ms)))
            assert search.in_flight == 0
            return found

        assert run_virtual(main()) == index.search(queries[: len(at_ms)], K)[1].tolist()

    def test_have_all_cores_and_the_overhead_of_their_pieces(self, index: Any, queries: Any) -> None:
        async def main() -> tuple[float, int, float]:
            search = VirtualIVF(index, LARGE)
            async for _ in search.submit(queries[0], K).stages_async():
                pass
            return now(), search.pieces, search.busy_s

        seconds, pieces, busy_s = run_virtual(main())
        assert pieces > 1
        assert seconds == pytest.approx(core_s(index, queries[0]) / 8 + pieces * LARGE.piece_s)
        assert seconds == pytest.approx(busy_s)

    def test_publish_a_stage_when_its_piece_ends(self, index: Any, queries: Any) -> None:
        async def main() -> list[float]:
            handle = VirtualIVF(index, LARGE).submit(queries[0], K)
            assert handle.stage is None
            return [now() async for _ in handle.stages_async()]

        times_s = run_virtual(main())
        assert times_s[0] > 0 and len(set(times_s)) == len(times_s)

    def test_end_when_cancelled(self, index: Any, queries: Any) -> None:
        async def main() -> tuple[int, float]:
            search = VirtualIVF(index, LARGE)
            handle = search.submit(queries[0], K)
            await asyncio.sleep(1e-4)
            handle.cancel()
            await asyncio.sleep(10)
            return search.in_flight, search.busy_s

        in_flight, busy_s = run_virtual(main())
        assert in_flight == 0 and busy_s < core_s(index, queries[0]) / 8


class TestWholeSearches:
    def find(
        self, index: Any, queries: Any, at_s: Sequence[float], *, batched: bool, dealt: bool = False
    ) -> list[tuple[list[int], float]]:
        async def main() -> Any:
            search = WholeSearches(index, LARGE, batched=batched, dealt=dealt)

            async def find(number: int) -> tuple[list[int], float]:
                await asyncio.sleep(at_s[number])
                return (await search.search(queries[number : number + 1], K)).tolist(), now()

            return await asyncio.gather(*map(find, range(len(at_s))))

        found: list[tuple[list[int], float]] = run_virtual(main())
        assert [ids for ids, _ in found] == index.search(queries[: len(at_s)], K)[1].tolist()
        return found

    def test_have_a_core_each(self, index: Any, queries: Any) -> None:
        found = self.find(index, queries, [0.0, 0.05], batched=False)
        assert found[0][1] == pytest.approx(core_s(index, queries[0]))
        assert found[1][1] == pytest.approx(0.05 + core_s(index, queries[1]))

    def test_in_batches_wait_for_the_batch_before(self, index: Any, queries: Any) -> None:
        found = self.find(index, queries, [0.0, 0.01, 0.02], batched=True)
        first_s = core_s(index, queries[0])
        assert found[0][1] == pytest.approx(first_s)
        both_s = first_s + max(core_s(index, queries[1]), core_s(index, queries[2]))
        assert [end_s for _, end_s in found[1:]] == pytest.approx([both_s] * 2)

    def test_of_a_batch_may_share_all_cores(self, index: Any, queries: Any) -> None:
        found = self.find(index, queries, [0.0], batched=True, dealt=True)
        assert found[0][1] == pytest.approx(core_s(index, queries[0]) / LARGE.busy_cores)
