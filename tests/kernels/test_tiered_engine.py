"""The embedded engine: caching, scheduling, sampling, and failures."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.inside import cache_of, host_of, preempt, runner_of, scheduler_of
from support.small_engine import (
    BLOCK,
    VOCABULARY,
    Make,
    ask,
    block_bytes,
    crowd,
    difference,
    exactly,
    greedy,
    run,
    small_tiers,
    tokens,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine import (
    Request,
    RequestRefusedError,
    Sampling,
    TieredEngine,
)
from ragorder.kernels.paging import BlockPool, ThreadTransfers


def used_blocks(engine: TieredEngine) -> int:
    """Blocks that are taken although nothing is cached: 0, or something was not given back."""
    engine.clear_cache()
    return cache_of(engine).pool.used_blocks


@contextmanager
def spoiled(engine: TieredEngine, spoil: Callable[[Any], Any]) -> Iterator[None]:
    """The model's logits are what `spoil` makes of them."""
    forward = runner_of(engine).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_of(engine), "forward", lambda *arguments: spoil(forward(*arguments).clone()))
        yield


def hold_loads(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until the event is set, nothing arrives on the device from the host."""
    gate, loads, start = threading.Event(), ThreadTransfers(), ThreadTransfers.start

    def start_apart(transfers: ThreadTransfers, source: BlockPool, *blocks: Any) -> Any:
        return start(transfers if source is cache_of(engine).pool else loads, source, *blocks)

    monkeypatch.setattr(ThreadTransfers, "start", start_apart)
    monkeypatch.setattr(host_of(cache_of(engine)).pool, "settle", lambda: gate.wait(60))
    return gate


class TestExactness:
    def test_without_documents_a_prompt_is_cached_in_chunks(self, make: Make, plain: Any) -> None:
        engine = make(chunk_tokens=32)
        prompt = tokens(100, 1)
        engine.generate([Request(prompt)])
        request = Request(prompt[:70] + tokens(20, 2), keep_logits=True)
        [completion] = exactly(engine, plain, request)
        assert completion.cached.device == 64

    @pytest.mark.parametrize(("block_size", "max_batch_tokens"), [(16, 100), (1, 7), (48, 16)])
    def test_random_traffic_over_small_tiers_is_exact(
        self, make: Make, plain: Any, tmp_path: Path, model: Any, block_size: int, max_batch_tokens: int
    ) -> None:
        """Documents come, go to host and disk, and come back, while others are computed. Prompts are computed in
        chunks, boundaries lie anywhere in a block, and requests of one step part within one."""
        sizes = {"block_size": block_size, "max_batch_tokens": max_batch_tokens, "max_requests": 3}
        engine = make(**small_tiers(model, tmp_path, 20), **sizes)
        random = Random(5)
        documents = [tokens(random.randint(10, 60), seed) for seed in range(9)]
        seen: Counter[str] = Counter()
        for _ in range(12):
            requests = [
                ask(
                    random.sample(documents, random.randint(1, 3)),
                    tokens(random.randint(1, 9), random.randint(0, 99)),
                    max_tokens=random.randint(1, 6),
                )
                for _ in range(random.randint(1, 5))
            ]
            for completion, request in zip(exactly(engine, plain, *requests), requests, strict=True):
                # Of one token, too, which `exactly` leaves out.
                assert list(completion.token_ids) == greedy(plain, request)
                seen.update(completion.cached._asdict())
        assert min(seen[tier] for tier in ("device", "host", "disk")) > 0
        assert used_blocks(engine) == 0


class TestTiers:
    @pytest.mark.parametrize(("backlog", "kept"), [("1KiB", False), ("1MiB", True)])
    def test_the_backlog_is_bounded(self, make: Make, plain: Any, tmp_path: Path, backlog: str, kept: bool) -> None:
        tiers = {"device_tokens": 8 * BLOCK, "disk_path": tmp_path / "kv", "disk_bytes": "16MiB"}
        engine = make(**tiers, disk_backlog_bytes=backlog)
        request = ask([tokens(90, 1)], tokens(9, 3))
        engine.generate([request])
        crowd(engine)
        [completion] = exactly(engine, plain, request)
        assert (completion.cached.disk > 0) == kept
        assert ((engine.stats().cache.disk.refused or {}).get("backlog", 0) > 0) != kept

    def test_a_prefix_being_loaded_delays_no_other_request(
        self, make: Make, plain: Any, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make(device_tokens=16 * BLOCK, host_bytes=64 * block_bytes(model))
        slow = ask([tokens(90, 1)], tokens(9, 3))
        engine.generate([slow])
        crowd(engine)
        gate = hold_loads(engine, monkeypatch)
        loading = engine.add(slow)
        quick = engine.add(ask([], tokens(20, 4)))
        ended = [update.request_id for _ in range(5) for update in engine.step() if update.completion]
        assert ended == [quick]
        assert engine.stats().waiting == 1
        gate.set()
        done = run(engine)
        assert list(done) == [loading]
        assert done[loading].cached == (0, 90, 0)
        assert difference(done[loading], plain, slow) <= 1e-4

    def test_of_many_documents_only_the_first_are_kept(self, make: Make, plain: Any) -> None:
        engine = make(max_cached_documents=2)
        documents = [tokens(30, seed) for seed in range(5)]
        request = ask(documents, tokens(9, 7), max_tokens=3)
        for cached in (0, 60):
            [completion] = exactly(engine, plain, request)
            assert completion.cached.total == cached
        assert engine.stats().cache.device.nodes == 2
        [fewer] = engine.generate([ask(documents[:1], tokens(9, 8))])
        assert fewer.cached.total == 30


class TestScheduling:
    def test_requests_of_different_age_share_steps(self, make: Make, plain: Any) -> None:
        engine = make()
        early = ask([], tokens(20, 1), max_tokens=8)
        late = ask([], tokens(30, 2), max_tokens=3)
        first = engine.add(early)
        assert [update.request_id for update in engine.step()] == [first]
        second = engine.add(late)
        assert [update.request_id for update in engine.step()] == [first, second]
        assert engine.stats().computed_tokens == 20 + 1 + 30
        done = run(engine)
        assert list(done[first].token_ids) == greedy(plain, early)
        assert list(done[second].token_ids) == greedy(plain, late)

    def test_a_step_computes_no_more_than_max_batch_tokens_in_the_order_of_arrival(self, make: Make) -> None:
        engine = make(max_batch_tokens=32)
        ids = [engine.add(ask([], tokens(20, seed), max_tokens=2)) for seed in range(3)]
        computed, firsts = [], []
        while engine.has_unfinished:
            before = engine.stats().computed_tokens
            firsts += [update.request_id for update in engine.step() if update.request_id not in firsts]
            computed.append(engine.stats().computed_tokens - before)
        assert max(computed) <= 32
        assert computed[0] == 32
        assert firsts == ids

    def test_when_blocks_run_out_the_youngest_waits_and_nothing_is_lost(self, make: Make, plain: Any) -> None:
        """Nor does its seed draw other tokens."""
        sampled = [{"temperature": 1.0, "seed": seed} for seed in range(2)]
        requests = [
            ask([tokens(20, seed)], tokens(10, seed + 9), max_tokens=60, **sampling)
            for seed, sampling in enumerate([{}, *sampled])
        ]
        expected = [list(completion.token_ids) for completion in make().generate(requests)]
        assert expected[0] == greedy(plain, requests[0])
        engine = make(device_tokens=10 * BLOCK)
        ids = [engine.add(request) for request in requests]
        ended = []
        texts: dict[int, list[int]] = {request_id: [] for request_id in ids}
        while engine.has_unfinished:
            for update in engine.step():
                texts[update.request_id] += update.token_ids
                if update.completion is not None:
                    ended.append(update.request_id)
        assert ended == ids
        assert engine.stats().preemptions > 0
        assert [texts[request_id] for request_id in ids] == expected
        assert used_blocks(engine) == 0

    def test_a_request_may_fill_the_whole_pool(self, make: Make, plain: Any) -> None:
        """Even where the nodes that it shares would need blocks of their own beside it."""
        engine = make(device_tokens=6 * BLOCK)
        system = tokens(5, 1)
        for seed in range(4):
            documents = [system, tokens(20, 20 + seed), tokens(21, 30 + seed)]
            request = ask(documents, tokens(6 * BLOCK - 46 - 9, seed), max_tokens=10)
            exactly(engine, plain, request)
        full = ask([system, tokens(40, 50)], tokens(51 - 4, 7), max_tokens=5)
        parted = ask([system, tokens(40, 51)], tokens(51 - 4, 7), max_tokens=5)
        exactly(engine, plain, full, parted, full)

    def test_counts(self, make: Make) -> None:
        engine = make()
        document = tokens(40, 1)
        engine.generate([ask([document], tokens(5, 2), max_tokens=3)])
        [completion] = engine.generate([ask([document], tokens(7, 3))])
        stats = engine.stats()
        assert stats.finished == {"length": 2}
        assert (stats.prompt_tokens, stats.generated_tokens, stats.computed_tokens) == (45 + 47, 4, 45 + 2 + 7)
        assert stats.cached == (40, 0, 0)
        assert (stats.running, stats.waiting, stats.refused, stats.failed_steps) == (0, 0, 0, 0)
        assert stats.ttft_count == 2
        assert completion.ttft_s is not None
        assert 0 < completion.ttft_s <= completion.total_s
        assert stats.ttft_s_sum >= completion.ttft_s
        assert completion.prompt_tokens == 47


class TestAbort:
    def test_in_every_state_all_is_given_back(self, make: Make, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make(device_tokens=16 * BLOCK, host_bytes=64 * block_bytes(model), max_batch_tokens=24, max_requests=3)
        cached = ask([tokens(90, 1)], tokens(9, 3))
        engine.generate([cached])
        crowd(engine)
        gate = hold_loads(engine, monkeypatch)
        decoding = engine.add(ask([], tokens(4, 5), max_tokens=50))
        engine.step()
        loading = engine.add(cached)
        prefilling = engine.add(ask([tokens(30, 6)], tokens(20, 7), max_tokens=50))
        waiting = engine.add(ask([tokens(30, 8)], tokens(9, 9)))
        engine.step()
        assert (engine.stats().running, engine.stats().waiting) == (2, 2)
        for request_id in (loading, decoding, waiting, prefilling):
            assert engine.abort(request_id)
            assert not engine.abort(request_id)
        assert not engine.abort(12345)
        gate.set()
        ended = {update.request_id: update.completion for update in engine.step()}
        assert {completion.finish_reason for completion in ended.values() if completion} == {"abort"}
        assert len(ended) == 4
        assert len(ended[decoding].token_ids) >= 1
        assert not engine.has_unfinished
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        assert used_blocks(engine) == 0
        assert engine.generate([cached])[0].finish_reason == "length"

    def test_what_an_aborted_request_had_computed_stays_cached(self, make: Make, plain: Any) -> None:
        engine = make(max_batch_tokens=32)
        document = tokens(40, 1)
        request_id = engine.add(ask([document], tokens(60, 2)))
        engine.step()
        engine.step()
        engine.abort(request_id)
        request = ask([document], tokens(8, 3))
        [completion] = exactly(engine, plain, request)
        assert completion.cached.device == 40

    def test_if_one_of_several_cannot_be_added_none_is_left(self, make: Make) -> None:
        engine = make()

        def requests() -> Iterator[Request]:
            yield ask([], tokens(20, 1))
            raise OSError("the file has ended")

        with pytest.raises(OSError, match="has ended"):
            engine.generate(requests())
        assert not engine.has_unfinished
        assert engine.stats().finished == {"abort": 1}

    def test_leaving_a_stream_aborts_it(self, make: Make) -> None:
        engine = make()
        for update in engine.stream(ask([], tokens(20, 1), max_tokens=100)):
            assert len(update.token_ids) == 1
            break
        assert not engine.has_unfinished
        assert engine.stats().finished == {"abort": 1}
        assert used_blocks(engine) == 0


class TestFailures:
    def test_an_error_that_would_come_again_fails_only_its_requests(
        self, make: Make, plain: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make(max_requests=2)
        shared = tokens(40, 1)
        failing = [engine.add(ask([shared], tokens(9, seed), max_tokens=3)) for seed in range(2)]
        waiting = engine.add(ask([shared], tokens(9, 5), max_tokens=3))

        def broken(_: Any) -> Any:
            raise ValueError("SECRET OF A PROMPT")

        with spoiled(engine, broken), caplog.at_level(logging.DEBUG, "ragorder"):
            updates = engine.step()
        assert [update.request_id for update in updates] == failing
        for update in updates:
            assert update.completion is not None
            assert update.completion.finish_reason == "error"
            assert "ValueError in test_tiered_engine.py" in (update.completion.error or "")
            assert "SECRET" not in (update.completion.error or "")
        assert "SECRET" not in caplog.text
        done = run(engine)
        # What the failed step was to compute is not in the cache.
        assert done[waiting].cached.total == 0
        request = ask([shared], tokens(9, 5), max_tokens=3)
        assert list(done[waiting].token_ids) == greedy(plain, request)
        assert engine.stats().failed_steps == 1
        assert engine.stats().finished == {"error": 2, "length": 1}
        assert used_blocks(engine) == 0

    def test_a_failed_plan_fails_present_requests_and_the_engine_goes_on(
        self, make: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make()
        running = engine.add(ask([tokens(40, 1)], tokens(9, 2), max_tokens=9))
        engine.step()
        new = engine.add(ask([tokens(40, 1)], tokens(9, 3)))

        def no_memory(*_: Any) -> None:
            raise MemoryError("SECRET")

        with monkeypatch.context() as patched:
            patched.setattr(cache_of(engine), "extend", no_memory)
            done = run(engine)
        assert {request_id: each.finish_reason for request_id, each in done.items()} == {running: "error", new: "error"}
        assert all("could not be planned (MemoryError" in (each.error or "") for each in done.values())
        request = ask([tokens(40, 1)], tokens(9, 2), max_tokens=3)
        exactly(engine, plain, request)
        assert used_blocks(engine) == 0

    def test_an_interrupt_leaves_an_engine_that_works(self, make: Make, plain: Any) -> None:
        engine = make()
        request = ask([tokens(40, 1)], tokens(9, 2), max_tokens=3)

        def interrupted(_: Any) -> Any:
            raise KeyboardInterrupt

        with spoiled(engine, interrupted), pytest.raises(KeyboardInterrupt):
            engine.generate([request])
        assert not engine.has_unfinished
        [completion] = exactly(engine, plain, request)
        assert completion.cached.total == 0

    def test_logits_that_are_no_numbers_end_the_request_and_poison_nothing(self, make: Make, plain: Any) -> None:
        engine = make()
        bad, good = ask([tokens(40, 1)], tokens(9, 2)), ask([tokens(41, 3)], tokens(9, 4))
        with spoiled(engine, lambda logits: logits.index_fill(0, torch.tensor([0]), math.nan)):
            failed, served = engine.generate([bad, good])
        assert failed.finish_reason == "error"
        assert "NaN or inf" in (failed.error or "")
        assert difference(served, plain, good) <= 1e-4
        [again] = exactly(engine, plain, bad)
        assert again.cached.total == 0

    def test_logits_that_are_no_numbers_leave_nothing_of_earlier_steps(self, make: Make, plain: Any) -> None:
        """What another request had computed stays, and what others computed after its documents goes."""
        engine = make(max_batch_tokens=64)
        known, first, second, other = (tokens(length, seed) for length, seed in ((40, 1), (30, 2), (100, 3), (10, 4)))
        engine.generate([ask([known], [1, 2])])
        answered = False

        def poisoned(logits: Any) -> Any:
            nonlocal answered
            if len(logits) and not answered:
                answered = True
                logits[0] = math.nan
            return logits

        bad, after = ask([known, first, second], tokens(9, 5)), ask([known, first, other], tokens(9, 6))
        with spoiled(engine, poisoned):
            numbers = [engine.add(bad)]
            engine.step()
            numbers.append(engine.add(after))
            done = run(engine)
        failed, served = (done[number] for number in numbers)
        assert "NaN or inf" in (failed.error or "")
        # In the step of the bad logits it was computed after a document of theirs.
        assert served.cached.total == len(known) + len(first)
        assert engine.stats().cache.device.nodes == 1
        for request in (bad, after):
            [again] = exactly(engine, plain, request)
            assert again.cached.total >= len(known)
        assert engine.stats().cache.device.nodes == 4

    def test_logits_that_are_no_numbers_leave_nothing_from_before_a_preemption(self, make: Make) -> None:
        engine = make(max_batch_tokens=16)
        request = ask([tokens(30, 1), tokens(30, 2)], tokens(9, 3))
        engine.add(request)
        for _ in range(3):
            engine.step()
        scheduler = scheduler_of(engine)
        preempt(scheduler, scheduler.running[0])
        assert engine.stats().cache.device.nodes == 1
        with spoiled(engine, lambda logits: torch.full_like(logits, math.nan)):
            [failed] = run(engine).values()
        assert failed.cached.total == 0 and "NaN or inf" in (failed.error or "")
        assert engine.stats().cache.device.nodes == 0

    @pytest.mark.parametrize(
        ("request_", "named"),
        [
            (Request([]), "empty"),
            (Request([1, VOCABULARY]), f"vocabulary of {VOCABULARY}"),
            (Request([1, -1]), f"vocabulary of {VOCABULARY}"),
            (Request([1, "a"]), "not all integers"),  # type: ignore[list-item]
            (Request([1, 2.5]), "not all integers"),  # type: ignore[list-item]
            (Request([1] * 1024), "1040, more than the model's context of 1024"),
            (Request([1] * 90, sampling=Sampling(max_tokens=600)), "pool holds 512"),
            (Request([1], sampling=Sampling(stop=["x"])), "tokenizer"),
            (Request([1], deadline_s=0), "deadline_s"),
            (Request([1], deadline_s=math.nan), "deadline_s"),
        ],
    )
    def test_a_request_that_can_never_be_served_is_refused_alone(
        self, make: Make, plain: Any, request_: Request, named: str
    ) -> None:
        engine = make(device_tokens=512)
        with pytest.raises(RequestRefusedError, match=named):
            engine.add(request_)
        good = ask([tokens(40, 1)], tokens(9, 2))
        refused, completion = engine.generate([request_, good])
        assert refused.finish_reason == "error"
        assert named in (refused.error or "")
        assert difference(completion, plain, good) <= 1e-4
        assert engine.stats().refused == 2

    def test_after_close_nothing_is_served(self, make: Make, model: Any) -> None:
        engine = make()
        engine.add(ask([], tokens(9, 1), max_tokens=9))
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            engine.add(ask([], tokens(9, 1)))
        assert [update.completion.finish_reason for update in engine.step() if update.completion] == ["abort"]
