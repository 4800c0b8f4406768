"""The embedded engine on a device that fails: answers are a cold engine's, or errors that say so (RAGCache 6)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.inside import cache_of, disk_of, host_of, runner_of, sequences_of, set_bounds, tiers_of
from support.rings import length
from support.small_engine import BLOCK, Make, ask, block_bytes, difference, exactly, greedy, run, small_tiers, tokens

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.benchmarks.fusion.selections import RandomTokens
from ragorder.kernels.engine import DeviceLostError, Fusion, Request, TieredEngine
from ragorder.kernels.engine.request import fault_of

WORD = "Zanzibar"


class Faults:
    """Failures of an engine's device: `next` has those of the next steps, None for a step that succeeds."""

    def __init__(self, engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next: list[str | None] = []
        self.count = 0
        self.batches: list[int] = []
        self._engine = engine
        self._forward = runner_of(engine).forward
        self._compute = runner_of(engine).compute
        monkeypatch.setattr(runner_of(engine), "forward", self.forward)
        monkeypatch.setattr(runner_of(engine), "compute", self.compute)
        self.kind: str | None = None

    def compute(self, chunks: Any) -> Any:
        self.kind = self.next.pop(0) if self.next else None
        self.count += self.kind is not None
        self.batches.append(sum(chunk.tokens for chunk in chunks))
        answer = self._compute(chunks)
        if self.kind == "after sampling":
            raise RuntimeError(WORD)
        return answer

    def forward(self, *arguments: Any) -> Any:
        if self.kind == "memory":
            raise torch.OutOfMemoryError(WORD)
        if self.kind == "before":
            raise RuntimeError(WORD)
        logits = self._forward(*arguments)
        if self.kind == "after":
            # Nothing on the device is what it was.
            cache_of(self._engine).pool.kv.fill_(float("nan"))
            raise RuntimeError(WORD)
        return logits


Break = Callable[[TieredEngine], Faults]
KINDS = ["before", "after", "after sampling", "memory"]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Break:
    return lambda engine: Faults(engine, monkeypatch)


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ragorder.kernels.engine.sequence.perf_counter", lambda: clock.now)
    return clock


class TestAFailedStep:
    def test_keeps_what_host_and_disk_hold(
        self, make: Make, plain: Any, model: Any, tmp_path: Path, faults: Break
    ) -> None:
        engine = make(**small_tiers(model, tmp_path, 8), replicate_nodes=0)
        documents = [tokens(90, seed) for seed in range(4)]
        for document in documents:
            engine.generate([ask([document], tokens(9, 3))])
        faults(engine).next = ["after"]
        request = ask([tokens(20, 77)], tokens(9, 3))
        assert difference(engine.generate([request])[0], plain, request) <= 1e-4
        found = set()
        for document in reversed(documents[:3]):
            [completion] = exactly(engine, plain, ask([document], tokens(9, 4)))
            found.add(completion.cached)
        assert {cached.total for cached in found} == {90}
        assert {bool(cached.host) for cached in found} == {True, False}

    def test_leaves_nothing_of_the_device_but_replicas(self, make: Make, plain: Any, model: Any, faults: Break) -> None:
        engine = make(host_bytes=64 * block_bytes(model), replicate_nodes=1)
        often, once = ask([tokens(40, 1)], tokens(9, 3)), ask([tokens(40, 2)], tokens(9, 3))
        engine.generate([often])
        engine.generate([often])
        engine.generate([once])
        # A replica that is still being made is lost as well.
        tiers_of(cache_of(engine)).drain()
        faults(engine).next = ["after"]
        engine.generate([ask([], tokens(9, 5))])
        cached = [exactly(engine, plain, request)[0].cached for request in (often, once)]
        assert cached == [(0, 40, 0), (0, 0, 0)]

    def test_reports_as_cached_what_was_of_use(self, make: Make, faults: Break) -> None:
        """What the failure took away was not."""
        engine = make()
        request = ask([tokens(40, 1)], tokens(9, 3), max_tokens=3)
        engine.generate([request])
        broken = faults(engine)
        broken.next = ["before"]
        assert engine.generate([request])[0].cached.total == 0
        broken.next = [None, "before"]
        assert engine.generate([request])[0].cached.total == 40


class TestRetries:
    @pytest.mark.parametrize("retries", [0, 1, 3])
    def test_are_bounded(
        self, make: Make, plain: Any, faults: Break, retries: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "ragorder")
        engine = make(max_retries=retries)
        request = ask([tokens(40, 1)], tokens(9, 2), max_tokens=3)
        broken = faults(engine)
        broken.next = ["before"] * (retries + 1)
        [failed] = engine.generate([request])
        assert failed.finish_reason == "error"
        assert "the model's forward failed (RuntimeError in test_engine_faults.py" in (failed.error or "")
        assert WORD not in caplog.text + (failed.error or "")
        assert (f"its retries ({retries} of them: max_retries)" in (failed.error or "")) == (retries > 0)
        broken.next = ["before"] * retries
        exactly(engine, plain, request)
        stats = engine.stats()
        assert (stats.failed_steps, stats.retries) == (2 * retries + 1, 2 * retries)
        assert stats.finished == {"error": 1, "length": 1}

    def test_of_one_bad_request_spare_the_others(self, make: Make, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """From its second failure on a request is computed by itself, until that has succeeded."""
        engine = make()
        requests = [ask([tokens(30, seed)], tokens(9, seed), max_tokens=4) for seed in range(8)]
        ids = [engine.add(request) for request in requests]
        compute = runner_of(engine).compute

        def fails_with_the_fifth(chunks: Any) -> Any:
            if any(chunk.sequence.request_id == ids[4] for chunk in chunks):
                raise RuntimeError(WORD)
            return compute(chunks)

        monkeypatch.setattr(runner_of(engine), "compute", fails_with_the_fifth)
        done = run(engine)
        assert [done[each].finish_reason for each in ids] == ["length"] * 4 + ["error"] + ["length"] * 3
        for request_id, request in zip(ids, requests, strict=True):
            if request_id != ids[4]:
                assert list(done[request_id].token_ids) == greedy(plain, request)

    @pytest.mark.parametrize("error", [ValueError, TypeError, NotImplementedError, RecursionError])
    def test_are_not_for_errors_that_would_come_again(self, error: type[Exception]) -> None:
        assert fault_of(error(WORD)) == "other"

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("x"),
            MemoryError(),
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        ],
    )
    def test_know_a_shortage_of_memory(self, error: Exception) -> None:
        assert fault_of(error) == "memory"


class TestAShortageOfMemory:
    def test_halves_the_step_until_it_suffices(self, make: Make, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make(max_batch_tokens=512)
        batches = []
        compute = runner_of(engine).compute

        def needs_room(chunks: Any) -> Any:
            batches.append(sum(chunk.tokens for chunk in chunks))
            if batches[-1] > 20:
                raise torch.OutOfMemoryError(WORD)
            return compute(chunks)

        monkeypatch.setattr(runner_of(engine), "compute", needs_room)
        requests = [ask([tokens(60, seed)], tokens(9, seed), max_tokens=2) for seed in range(4)]
        exactly(engine, plain, *requests)
        assert batches[:5] == [276, 138, 69, 34, 17]
        assert max(batches[4:]) == 17
        stats = engine.stats()
        assert (stats.failed_steps, stats.retries, stats.finished) == (4, 0, {"length": 4})

    def test_keeps_what_earlier_steps_have_cached(self, make: Make, faults: Break) -> None:
        engine = make()
        engine.generate([ask([tokens(40, 1)], tokens(9, 2))])
        faults(engine).next = ["memory"]
        [completion] = engine.generate([ask([tokens(40, 1)], tokens(9, 3))])
        assert completion.cached.device == 40

    def test_is_over_after_a_while(self, make: Make, faults: Break, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, steps_to_grow=3)
        engine = make(max_batch_tokens=64)
        broken = faults(engine)
        broken.next = ["memory"]
        engine.generate([ask([], tokens(400, 1))])
        assert broken.batches == [64, 32, 32, 32, 64, 64, 64, 64, 48]

    def test_for_one_token_is_a_failure(self, make: Make, faults: Break) -> None:
        engine = make(max_retries=2)
        faults(engine).next = ["memory"] * 9
        [completion] = engine.generate([ask([], tokens(9, 1))])
        assert completion.finish_reason == "error"
        assert "OutOfMemoryError" in (completion.error or "")
        # 9, 4, 2 tokens, and one token three times.
        assert engine.stats().failed_steps == 6


def gone(*_: Any) -> Any:
    raise RuntimeError(WORD)


class TestALostDevice:
    @pytest.fixture
    def lost(self, make: Make, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TieredEngine:
        """The context of the device is gone: whatever is asked of it fails."""
        engine = make(device_tokens=8 * BLOCK, disk_path=tmp_path / "kv", disk_bytes=1 << 24)
        for seed in range(3):
            engine.generate([ask([tokens(90, seed)], tokens(9, 3))])
        tiers_of(cache_of(engine)).drain()
        disk_of(cache_of(engine)).wait()
        for name in ("compute", "recover"):
            monkeypatch.setattr(runner_of(engine), name, gone)
        return engine

    def test_ends_all_and_says_so(self, lost: TieredEngine, caplog: pytest.LogCaptureFixture) -> None:
        request = ask([tokens(40, 1)], tokens(9, 2))
        with pytest.raises(DeviceLostError, match="start another process"):
            lost.generate([request])
        for call in (lambda: lost.add(request), lost.step, lambda: lost.generate([request])):
            with pytest.raises(DeviceLostError, match="start another process"):
                call()
        assert not lost.has_unfinished
        assert WORD not in caplog.text

    def test_leaves_the_disk_to_the_next_engine(
        self, lost: TieredEngine, make: Make, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(DeviceLostError):
            lost.generate([ask([tokens(40, 1)], tokens(9, 2))])
        monkeypatch.setattr(tiers_of(cache_of(lost)), "drain", gone)
        with pytest.raises(RuntimeError):
            lost.close()
        engine = make(device_tokens=8 * BLOCK, disk_path=tmp_path / "kv", disk_bytes=1 << 24)
        request = ask([tokens(90, 0)], tokens(9, 2))
        [completion] = exactly(engine, plain, request)
        assert completion.cached == (0, 0, 90)


class TestADeadline:
    def test_ends_a_request_and_frees_its_blocks(self, make: Make, plain: Any, clock: Clock) -> None:
        engine = make()
        hurried = Request(tokens(20, 1), deadline_s=2.0, sampling=ask([], [1], max_tokens=50).sampling)
        patient = ask([], tokens(20, 2), max_tokens=5)
        ids = [engine.add(hurried), engine.add(patient)]
        for _ in range(3):
            engine.step()
            clock.now += 1.0
        done = run(engine)
        assert done[ids[0]].finish_reason == "timeout"
        assert done[ids[0]].error == ("its deadline of 2 s has passed after 3 tokens: allow more, or fewer tokens")
        expected = greedy(plain, Request(hurried.token_ids, sampling=hurried.sampling))
        assert list(done[ids[0]].token_ids) == expected[:3]
        assert list(done[ids[1]].token_ids) == greedy(plain, patient)
        assert engine.stats().finished == {"timeout": 1, "length": 1}
        engine.clear_cache()
        assert cache_of(engine).pool.used_blocks == 0


@pytest.mark.parametrize("reuse", ["exact", "fused"])
def test_every_request_is_answered_as_by_a_cold_engine_or_says_why_not(
    reuse: str,
    make: Make,
    model: Any,
    tmp_path: Path,
    faults: Break,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 failures in `make test-all`: answers are those of an engine without a failure and with nothing cached, in
    time, or errors that name the retries or the deadline. Where documents' KV is approximate, they are only answers."""
    # Memory is short far more often here than steps could grow again.
    set_bounds(monkeypatch, steps_to_grow=2)
    random = Random(11)
    failures = length(1000, 30)
    documents = [tokens(random.randint(10, 60), 100 + number) for number in range(9)]
    kinds = [
        ask(
            random.sample(documents, random.randint(1, 3)),
            tokens(random.randint(1, 9), 200 + number),
            random.choice((None, "a tenant")),
            max_tokens=random.randint(1, 8),
            temperature=random.choice((0.0, 1.0)),
            seed=number,
        )
        for number in range(40)
    ]
    cold = make(host_bytes=0)
    expected = []
    for request in kinds:
        cold.clear_cache()
        expected += [completion.token_ids for completion in cold.generate([request])]
    engine = make(**small_tiers(model, tmp_path, 24), max_batch_tokens=90, max_requests=4, reuse=reuse)
    approximate = [Fusion(0.3, RandomTokens()), Fusion(0.4, "query", rounds=2)]
    fusions = ["exact", Fusion(1), *approximate] if reuse == "fused" else [None]
    broken = faults(engine)
    asked: dict[int, tuple[int, float, float, bool]] = {}
    told: dict[int, list[int]] = {}
    ends: list[str] = []
    while broken.count < failures or engine.has_unfinished:
        if broken.count < failures and len(sequences_of(engine)) < 8:
            for _ in range(random.choice((0, 0, 1, 3))):
                kind, deadline_s = random.randrange(len(kinds)), random.choice((8.0, 60.0, 1e6, 1e6))
                request = kinds[kind]
                given = replace(request, keep_logits=False, deadline_s=deadline_s, fusion=random.choice(fusions))
                asked[engine.add(given)] = (kind, deadline_s, clock.now, given.fusion not in approximate)
        broken.next = [random.choice(KINDS) if broken.count < failures and random.random() < 0.15 else None]
        for update in engine.step():
            told.setdefault(update.request_id, []).extend(update.token_ids)
            completion = update.completion
            if completion is None:
                continue
            kind, deadline_s, since, exact = asked[update.request_id]
            ends.append(completion.finish_reason)
            assert told[update.request_id] == list(completion.token_ids)
            if completion.finish_reason == "error":
                assert "so did its retries (3 of them: max_retries)" in (completion.error or "")
            elif completion.finish_reason == "timeout":
                assert deadline_s < clock.now - since <= deadline_s + 1
                assert "its deadline of" in (completion.error or "")
            else:
                assert completion.token_ids == expected[kind] or not exact
                assert clock.now - since <= deadline_s
            if completion.finish_reason in ("error", "timeout") and exact:
                assert completion.token_ids == expected[kind][: len(completion.token_ids)]
        clock.now += 1.0
    assert broken.count == failures
    assert len(ends) == len(asked)
    assert ends.count("length") > 0.5 * len(ends)
    assert ends.count("timeout") > 0
    assert engine.stats().cached.host > 0
    assert (engine.stats().fused.total > 0) == (reuse == "fused")
    engine.clear_cache()
    assert cache_of(engine).pool.used_blocks == host_of(cache_of(engine)).pool.used_blocks == 0
