"""Documents computed behind those that were asked for with them, while the engine has nothing due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.inside import cache_of, tiers_of
from support.small_engine import BLOCK, Make, block_bytes, difference, tokens

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.fused_reference import Taken, fused_logits, prompt_of

from ragorder.kernels.cache import CopyKind, KnowledgeCache, OutOfBlocksError
from ragorder.kernels.engine import Fusion, TieredEngine
from ragorder.kernels.engine.idle import IdleBuilder
from ragorder.kernels.models.batch import Forward

SYSTEM = tokens(21, 100)
A, B, C, D = (tokens(length, seed) for length, seed in ((37, 1), (16, 2), (30, 3), (23, 4)))
QUESTION = tokens(9, 5)
NONE = Fusion(select="none")

Ask = Callable[..., Any]


@pytest.fixture
def building(make: Make) -> Make:
    return lambda **settings: make(**{"reuse": "fused", "build_idle": 100.0} | settings)


def ask(engine: TieredEngine, *documents: Sequence[int], fusion: Any = NONE, **options: Any) -> Any:
    request = prompt_of(SYSTEM, documents, QUESTION, fusion=fusion, **options)
    [completion] = engine.generate([request])
    assert completion.finish_reason == "length", completion.error
    return completion


def idle(engine: TieredEngine) -> int:
    """Step until nothing is left to build; the steps."""
    for steps in range(1000):
        if not engine.has_idle_work:
            return steps
        assert engine.step() == []
    raise AssertionError("it never ends")


def taken(document: Sequence[int], start: int, *behind: Sequence[int]) -> Taken:
    return Taken(start, document, [*SYSTEM, *(token for other in behind for token in other)])


def used_blocks(engine: TieredEngine) -> int:
    engine.clear_cache()
    return cache_of(engine).pool.used_blocks


@pytest.mark.parametrize("max_batch_tokens", [7, 512])
def test_each_is_computed_in_the_sight_of_those_that_were_asked_for_with_it(
    building: Make, plain: Any, max_batch_tokens: int
) -> None:
    engine = building(max_batch_tokens=max_batch_tokens)
    ask(engine, A, B)
    steps = idle(engine)
    stats = engine.stats()
    assert (stats.idle_documents, stats.idle_aborted) == (2, 0)
    # B is behind A in the tree already.
    assert stats.idle_tokens == len(A)
    assert steps >= -(-len(A) // max_batch_tokens)
    # A was computed behind B, which was taken over from behind A; B behind A.
    behind = len(SYSTEM) + len(C)
    request = prompt_of(SYSTEM, [C, B], QUESTION, fusion=NONE)
    found = ask(engine, C, B)
    assert found.fused.total == len(B)
    expected = fused_logits(plain, request.token_ids, [taken(B, behind, A)], [])
    assert float((found.logits - expected).abs().max()) <= 1e-4


def test_of_a_document_alone_is_what_full_attention_has_behind_its_neighbour(building: Make, plain: Any) -> None:
    engine = building()
    for document in (A, B):
        ask(engine, document, fusion="exact")
    before = engine.stats().computed_tokens
    ask(engine, B, A)
    idle(engine)
    assert engine.stats().computed_tokens == before + len(QUESTION)
    request = prompt_of(SYSTEM, [C, A], QUESTION, fusion=NONE)
    found = ask(engine, C, A)
    start = len(SYSTEM) + len(C)
    expected = fused_logits(plain, request.token_ids, [taken(A, start, B)], [])
    assert float((found.logits - expected).abs().max()) <= 1e-4
    alone = fused_logits(plain, request.token_ids, [taken(A, start)], [])
    assert float((found.logits - alone).abs().max()) > 1e-2


def test_exact_requests_stay_exact(building: Make, plain: Any) -> None:
    engine = building()
    ask(engine, A, B, C)
    idle(engine)
    for documents in ([A, B, C], [B, A], [C]):
        request = prompt_of(SYSTEM, documents, QUESTION, fusion="exact")
        [completion] = engine.generate([request])
        assert difference(completion, plain, request) <= 1e-4


def test_nothing_is_built_unless_asked_for(building: Make) -> None:
    engine = building(build_idle=0.0)
    ask(engine, A, B)
    assert not engine.has_idle_work
    engine.step()
    assert engine.stats().idle_documents == 0


def test_nothing_is_built_of_exact_requests_tenants_apart_and_documents_alone(building: Make) -> None:
    engine = building()
    ask(engine, A, B, fusion="exact")
    ask(engine, C)
    ask(engine, D, salt="red")
    idle(engine)
    assert engine.stats().idle_documents == 0


def test_the_budget_is_a_share_of_what_requests_compute(building: Make) -> None:
    engine = building(build_idle=0.5)
    for document in (A, B, C, D):
        ask(engine, document, fusion="exact")
    for documents in ([A, B, C, D], [D, C, B, A], [B, D, A, C]):
        ask(engine, *documents)
        idle(engine)
        stats = engine.stats()
        assert stats.idle_tokens <= 0.5 * stats.computed_tokens
    assert stats.idle_documents > 0


def test_those_asked_for_most_often_come_first(building: Make) -> None:
    engine = building()
    for document in (A, B, C):
        ask(engine, document, fusion="exact")
    for documents in ([A, B], [C, B], [B, C]):
        ask(engine, *documents)
    built: list[bytes] = []
    cache = cache_of(engine)
    adopt = cache.adopt

    def recorded(content: bytes, *others: Any) -> bool:
        built.append(content)
        return adopt(content, *others)

    cache.adopt = recorded  # type: ignore[method-assign]
    idle(engine)
    requests = [engine._idle._documents[content].requests for content in built]  # type: ignore[union-attr]
    assert requests == [3, 2, 1]


class TestDueWork:
    def test_ends_it_at_the_next_step(self, building: Make, plain: Any) -> None:
        engine = building(max_batch_tokens=8)
        for document in (A, B):
            ask(engine, document, fusion="exact")
        ask(engine, B, A)
        engine.step()
        used = engine.stats()
        assert used.idle_tokens == 8
        request = prompt_of(SYSTEM, [D], QUESTION, fusion="exact")
        [completion] = engine.generate([request])
        assert difference(completion, plain, request) <= 1e-4
        stats = engine.stats()
        assert (stats.idle_aborted, stats.idle_tokens, stats.idle_documents) == (1, 8, 0)
        assert stats.cache.leases == 0
        idle(engine)
        assert engine.stats().idle_documents == 2
        assert used_blocks(engine) == 0

    @pytest.mark.parametrize("end", ["clear_cache", "forget_device", "close"])
    def test_so_does_what_empties_the_cache(self, building: Make, end: str) -> None:
        engine = building(max_batch_tokens=8)
        for document in (A, B):
            ask(engine, document, fusion="exact")
        ask(engine, B, A)
        engine.step()
        getattr(engine, end)()
        assert engine.stats().cache.leases == 0

    def test_counts_no_use_of_what_is_built(self, building: Make) -> None:
        engine = building()
        ask(engine, A, B)
        before = engine.stats().cache
        idle(engine)
        after = engine.stats().cache
        assert (after.requests, after.device.hit_tokens) == (before.requests, before.device.hit_tokens)


def test_a_failure_is_counted_and_not_repeated(
    building: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = building()
    ask(engine, A, B)

    def fail(*_: Any) -> Any:
        raise ValueError("Zanzibar")

    with monkeypatch.context() as patched:
        patched.setattr(Forward, "__call__", fail)
        patched.setattr(KnowledgeCache, "adopt", fail)
        idle(engine)
    assert engine.stats().failed_steps == 1
    assert "Zanzibar" not in caplog.text
    ask(engine, B, A)
    assert used_blocks(engine) == 0


def test_what_is_not_numbers_is_not_kept(building: Make) -> None:
    engine = building()
    ask(engine, A, B)
    cache, path = cache_of(engine), engine._validator.admit(0, prompt_of(SYSTEM, [A, B], QUESTION)).path
    node = tiers_of(cache).nodes[path[2].key]
    assert node.device is not None
    cache.pool.kv[node.device.blocks[-1]] = float("nan")
    idle(engine)
    # Neither A, which was computed behind it, nor B itself.
    assert engine.stats().idle_tokens == len(A)
    assert engine.stats().idle_documents == 0
    assert cache.copy_kinds(path)[1:] == [CopyKind.STANDALONE, CopyKind.AFTER_DOCUMENTS]


def test_without_blocks_it_gives_up_and_the_cache_stays(building: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = building()
    ask(engine, A, B)

    def full(*_: Any) -> Any:
        raise OutOfBlocksError("none are free")

    with monkeypatch.context() as patched:
        patched.setattr(KnowledgeCache, "extend", full)
        idle(engine)
    stats = engine.stats()
    assert (stats.failed_steps, stats.idle_documents, stats.cache.leases) == (0, 0, 0)
    assert ask(engine, A, B, fusion="exact").cached.total == len(SYSTEM) + len(A) + len(B)


def test_a_pool_without_room_builds_what_fits(building: Make, plain: Any) -> None:
    engine = building(device_tokens=9 * BLOCK)
    for documents in ([A], [B], [B, A], [C, B], [D, C, A]):
        ask(engine, *documents)
        idle(engine)
    request = prompt_of(SYSTEM, [A], QUESTION, fusion="exact")
    [completion] = engine.generate([request])
    assert difference(completion, plain, request) <= 1e-4
    assert used_blocks(engine) == 0


def test_neighbours_come_from_host_and_disk_and_what_is_built_lasts(
    building: Make, plain: Any, model: Any, tmp_path: Path
) -> None:
    tiers = {
        "device_tokens": 16 * BLOCK,
        "host_bytes": 8 * block_bytes(model),
        "disk_path": tmp_path / "kv",
        "disk_bytes": 1 << 24,
        "policy": "lru",
    }
    engine = building(**tiers)
    for document in (A, B):
        ask(engine, document, fusion="exact")
    ask(engine, B, A)
    for seed in (70, 71):
        ask(engine, tokens(90, seed), fusion="exact")
    idle(engine)
    assert engine.stats().idle_documents == 2
    for seed in range(72, 92):
        ask(engine, tokens(30, seed), fusion="exact")
    engine.close()
    restarted = building(**tiers)
    request = prompt_of(SYSTEM, [C, A], QUESTION, fusion=NONE)
    found = ask(restarted, C, A)
    assert found.fused == (0, 0, len(A))
    expected = fused_logits(plain, request.token_ids, [taken(A, len(SYSTEM) + len(C), B)], [])
    assert float((found.logits - expected).abs().max()) <= 1e-4


def test_what_is_remembered_is_bounded(building: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragorder.kernels.engine.idle._MOST_TOKENS", 80)
    monkeypatch.setattr("ragorder.kernels.engine.idle._MOST_COMPANIONS", 2)
    engine = building()
    ask(engine, A, B, C, D)
    builder = engine._idle
    assert isinstance(builder, IdleBuilder)
    assert [len(each.token_ids) for each in builder._documents.values()] == [len(C), len(D)]
    assert all(len(each.companions) <= 2 for each in builder._documents.values())


def test_so_are_system_prompts_and_the_number_of_documents(building: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragorder.kernels.engine.idle._MOST_TOKENS", 120)
    engine = building()
    for seed in range(3):
        engine.generate([prompt_of(tokens(40, 200 + seed), [A, B], QUESTION, fusion=NONE)])
    builder = engine._idle
    assert isinstance(builder, IdleBuilder)
    assert [(each.segment.tokens, each.documents) for each in builder._prompts.values()] == [(40, 2)]
    assert builder._tokens == 40 + len(A) + len(B)
    monkeypatch.setattr("ragorder.kernels.engine.idle._MOST_DOCUMENTS", 1)
    ask(engine, C, D)
    assert [len(each.token_ids) for each in builder._documents.values()] == [len(D)]
    assert builder._tokens == len(SYSTEM) + len(D)


class TestAShortageOfMemory:
    @pytest.fixture
    def sizes(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Tokens of each forward once the first element is set: to the most that memory suffices for."""
        made: list[int] = []
        forward = Forward.__call__

        def short(self: Forward, token_ids: Any, *others: Any) -> Any:
            if made:
                made.append(len(token_ids))
                if len(token_ids) > made[0]:
                    raise torch.OutOfMemoryError("Zanzibar")
            return forward(self, token_ids, *others)

        monkeypatch.setattr(Forward, "__call__", short)
        return made

    def asked(self, building: Make) -> TieredEngine:
        engine = building(max_batch_tokens=64)
        for document in (A, B, D):
            ask(engine, document, fusion="exact")
        ask(engine, B, A)
        return engine

    def test_keeps_the_cache_and_makes_the_steps_smaller(self, building: Make, sizes: list[int], plain: Any) -> None:
        engine = self.asked(building)
        nodes = engine.stats().cache.device.nodes
        sizes.append(20)
        idle(engine)
        assert sizes[1:] == [16, 37, 32, 16, 16, 5]
        sizes.clear()
        stats = engine.stats()
        assert (stats.failed_steps, stats.idle_documents, stats.idle_aborted) == (2, 2, 0)
        assert (stats.cache.device.nodes, stats.cache.device.evicted) == (nodes + 2, 0)
        request = prompt_of(SYSTEM, [D], QUESTION, fusion="exact")
        [found] = engine.generate([request])
        assert found.cached.total == len(SYSTEM) + len(D)
        assert difference(found, plain, request) <= 1e-4

    def test_that_no_step_is_small_enough_for_ends_each_document(self, building: Make, sizes: list[int]) -> None:
        engine = self.asked(building)
        nodes = engine.stats().cache.device.nodes
        sizes.append(0)
        idle(engine)
        # Both take turns, at 64 tokens a step, then 32, at last 1; without its neighbour the other is not begun.
        assert sizes[1:] == [16, 32, 16, 8, 4, 2, 1]
        sizes.clear()
        stats = engine.stats()
        assert (stats.idle_documents, stats.cache.leases) == (0, 0)
        assert (stats.cache.device.nodes, stats.cache.device.evicted) == (nodes, 0)


def test_a_step_examines_few_documents_whatever_is_remembered(building: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = building()
    builder = engine._idle
    assert isinstance(builder, IdleBuilder)

    def observe(*documents: Sequence[int]) -> None:
        builder.observe(engine._validator.admit(0, prompt_of(SYSTEM, documents, QUESTION)))

    for number in range(2_000):
        observe(tokens(6, number))
    assert len(builder._documents) > 1_900
    # Whatever the budget.
    engine._counters.computed_tokens = 1_000_000
    examined = 0
    kinds = KnowledgeCache.copy_kinds

    def counted(self: KnowledgeCache, path: Any) -> Any:
        nonlocal examined
        examined += len(path) - 1
        return kinds(self, path)

    monkeypatch.setattr(KnowledgeCache, "copy_kinds", counted)
    most = 0
    while engine.has_idle_work:
        before = examined
        engine.step()
        most = max(most, examined - before)
    assert most <= 8
    assert examined == len(builder._documents)
    # None has a neighbour: each waits until it is asked for again.
    observe(tokens(6, 7))
    engine.step()
    assert examined == len(builder._documents) + 1
    assert not engine.has_idle_work


def test_a_smaller_pool_builds_what_fits_into_it(building: Make, model: Any) -> None:
    engine = building(device_tokens=40 * BLOCK, host_bytes=40 * block_bytes(model))
    for document in (A, B):
        ask(engine, document, fusion="exact")
    ask(engine, B, A)
    engine.resize(device_tokens=4 * BLOCK)
    idle(engine)
    stats = engine.stats()
    assert (stats.failed_steps, stats.idle_documents, stats.cache.leases) == (0, 0, 0)
    # Both documents behind the system prompt have KV still, so that in a larger pool they are built.
    engine.resize(device_tokens=40 * BLOCK)
    ask(engine, B, A)
    idle(engine)
    assert engine.stats().idle_documents == 2
