"""Fused requests beside others: they share documents and steps, and change no answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
from support.rings import length
from support.small_engine import BLOCK, Make, difference, exactly, greedy, run, small_tiers, tokens

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.fused_reference import (
    QUESTION,
    SYSTEM,
    A,
    B,
    C,
    D,
    Taken,
    fused_logits,
    off,
    prompt_of,
    taken_of,
    used_blocks,
    warm,
)

from ragorder.benchmarks.fusion.selections import DocumentHeads, RandomTokens
from ragorder.kernels.engine import Completion, Fusion, TieredEngine
from ragorder.kernels.fusion.selection import Measurements

NONE, ALL = Fusion(0), Fusion(1)
HEADS, RANDOM = DocumentHeads(), RandomTokens()
LARGEST = 10


class TestSharing:
    """Documents are read where they were computed, by all requests at once."""

    SHORT = tokens(16, 40)

    def crowd(
        self, make: Make, pool: int, fusion: Fusion | Literal["exact"], shuffled: bool = True, requests: int = 24
    ) -> tuple[TieredEngine, int, list[Completion]]:
        """The most requests that run at once, of those that wait for ten documents of 96 tokens."""
        engine = make(reuse="fused", device_tokens=pool)
        documents = [tokens(96, 200 + number) for number in range(10)]
        shown = [documents] if fusion == "exact" else [[document] for document in documents]
        for each in shown:
            engine.generate([prompt_of(self.SHORT, each, tokens(3, 77), fusion="exact")])
        random = Random(2)
        for number in range(requests):
            order = random.sample(documents, 10) if shuffled else documents
            engine.add(prompt_of(self.SHORT, order, tokens(16, number), fusion=fusion, max_tokens=16))
        most, completions = 0, []
        while engine.has_unfinished:
            completions += [update.completion for update in engine.step() if update.completion is not None]
            most = max(most, engine.stats().running)
        assert {completion.finish_reason for completion in completions} == {"length"}
        assert len(completions) == requests
        return engine, most, completions

    def test_lets_as_many_requests_run_at_once_as_a_common_prefix(self, make: Make) -> None:
        _, exact, _ = self.crowd(make, 4096, "exact", shuffled=False)
        engine, fused, completions = self.crowd(make, 4096, Fusion(0.05, HEADS))
        assert fused == exact == 24
        assert all(completion.fused.total == 9 * 96 for completion in completions)
        assert engine.stats().preemptions == 0

    @pytest.mark.parametrize("recompute", [0.0, 0.15, 0.5])
    def test_takes_blocks_for_recomputed_tokens_question_and_answer_alone(self, make: Make, recompute: float) -> None:
        shared = 16 + 10 * 96
        own = round(recompute * 9 * 96) + 16 + 16
        pool = shared + 5 * -(-own // BLOCK) * BLOCK
        _, most, _ = self.crowd(make, pool, Fusion(recompute, HEADS), requests=8)
        assert most >= 5

    @pytest.mark.parametrize("block_size", [1, 16, 48])
    def test_of_random_requests_changes_no_answer(self, fusing: Make, plain: Any, block_size: int) -> None:
        engine = fusing(block_size=block_size, max_batch_tokens=60)
        random = Random(block_size)
        documents = [tokens(random.randint(1, 60), 300 + number) for number in range(6)]
        warm(engine, *([document] for document in documents))
        for _ in range(length(12, 3)):
            requests, expected = [], []
            for _ in range(random.randint(2, 6)):
                chosen = [documents[place] for place in random.choices(range(6), k=random.randint(2, 5))]
                question = tokens(random.randint(1, 20), random.randint(0, 999))
                fusion = Fusion(random.choice([0.0, 0.1, 0.5]), HEADS)
                request = prompt_of(SYSTEM, chosen, question, fusion=fusion, max_tokens=random.randint(1, 4))
                taken = taken_of(chosen, None, *([] for _ in chosen[1:]))
                heads = HEADS.choose(measured(taken), round(fusion.recompute * reused_tokens(taken)))
                requests.append(request)
                expected.append((taken, heads.tolist()))
            for completion, request, (taken, heads) in zip(engine.generate(requests), requests, expected, strict=True):
                prompt = list(request.token_ids)
                assert off(completion, fused_logits(plain, prompt, taken, heads)) <= 1e-5 * LARGEST
                for token in completion.token_ids:
                    assert token == int(fused_logits(plain, prompt, taken, heads).argmax())
                    prompt.append(token)
        assert used_blocks(engine) == 0

    def test_outlives_a_cache_that_is_emptied_and_resized(self, fusing: Make, plain: Any) -> None:
        engine = fusing(device_tokens=60 * BLOCK)
        # The others lie in blocks that a smaller pool has not.
        warm(engine, [tokens(400, 56)], [A], [B], [C])
        request = prompt_of(SYSTEM, [C, B, A], QUESTION, fusion=NONE, max_tokens=12)
        [expected] = engine.generate([request])
        engine.add(request)
        for _ in range(4):
            engine.step()
        engine.clear_cache()
        engine.resize(device_tokens=24 * BLOCK)
        exact = prompt_of(SYSTEM, [tokens(150, 55)], QUESTION, fusion="exact", max_tokens=3)
        engine.add(exact)
        first, second = run(engine).values()
        assert {first.token_ids, second.token_ids} == {expected.token_ids, tuple(greedy(plain, exact))}
        assert used_blocks(engine) == 0


def reused_tokens(taken: Sequence[Taken]) -> int:
    return sum(len(each.tokens) for each in taken)


def measured(taken: Sequence[Taken]) -> Measurements:
    spans = [each.span for each in taken]
    return Measurements(torch.cat([torch.arange(*span) for span in spans]), spans)


class TestWithOthers:
    def test_exact_requests_of_the_same_steps_are_exact(
        self, fusing: Make, plain: Any, chosen: list[list[int]]
    ) -> None:
        engine = fusing(max_batch_tokens=48)
        warm(engine, [A], [B])
        fused = prompt_of(SYSTEM, [tokens(18, 90), B, A], QUESTION, fusion=Fusion(0.25, RANDOM), max_tokens=5)
        exact = [
            prompt_of(SYSTEM, [A, B], tokens(6, 91), fusion="exact", max_tokens=8),
            prompt_of(SYSTEM, [B, C, A], tokens(8, 92), fusion="exact", max_tokens=3),
            prompt_of([], [], tokens(40, 93), max_tokens=12),
        ]
        *others, completion = engine.generate([*exact, fused])
        for found, request in zip(others, exact, strict=True):
            assert difference(found, plain, request) <= 1e-4
            assert list(found.token_ids) == greedy(plain, request)
            assert found.fused.total == 0
        taken = taken_of([[0] * 18, B, A], None, [], [])
        assert off(completion, fused_logits(plain, fused.token_ids, taken, chosen[0])) <= 1e-4

    def test_of_a_document_that_is_computed_in_this_step_waits_for_it(self, fusing: Make, plain: Any) -> None:
        engine = fusing(schedule="fcfs")
        warm(engine, [B])
        requests = [
            prompt_of(SYSTEM, [A], QUESTION, fusion="exact", max_tokens=3),
            prompt_of(SYSTEM, [B, A], QUESTION, fusion=NONE),
        ]
        first, second = engine.generate(requests)
        assert list(first.token_ids) == greedy(plain, requests[0])
        assert second.fused.total == len(A)
        expected = fused_logits(plain, requests[1].token_ids, taken_of([B, A], None, []), [])
        assert off(second, expected) <= 1e-4

    def test_random_traffic_over_small_tiers_keeps_exact_requests_exact(
        self, fusing: Make, plain: Any, model: Any, tmp_path: Path
    ) -> None:
        tiers = small_tiers(model, tmp_path, 20) | {"device_tokens": 24 * BLOCK}
        engine = fusing(**tiers, max_batch_tokens=100, max_requests=3)
        random = Random(3)
        documents = [tokens(random.randint(10, 50), seed) for seed in range(8)]
        fusions: list[Any] = ["exact", "exact", Fusion(0.3, RANDOM), Fusion(0.15, "query"), NONE, ALL]
        fusions += [Fusion(0.2, "deviation"), Fusion(0.4, "query", rounds=2)]
        seen: Counter[str] = Counter()
        for _ in range(length(60, 8)):
            requests = [
                prompt_of(
                    SYSTEM,
                    [documents[place] for place in random.sample(range(8), random.randint(1, 3))],
                    tokens(random.randint(1, 9), random.randint(0, 99)),
                    fusion=random.choice(fusions),
                    max_tokens=random.randint(1, 6),
                )
                for _ in range(random.randint(1, 5))
            ]
            ids = [engine.add(request) for request in requests]
            done = {}
            if random.random() < 0.3:
                done = {update.request_id: update.completion for update in engine.step() if update.completion}
                engine.abort(random.choice(ids))
            done |= run(engine)
            for request_id, request in zip(ids, requests, strict=True):
                completion = done[request_id]
                if completion.finish_reason == "abort":
                    continue
                assert completion.finish_reason == "length", completion.error
                seen.update(completion.fused._asdict())
                if request.fusion in ("exact", ALL):
                    assert difference(completion, plain, request) <= 1e-4
                    assert list(completion.token_ids) == greedy(plain, request)
        assert sum(seen.values()) > 100
        assert used_blocks(engine) == 0

    def test_preempted_it_starts_over(self, fusing: Make, plain: Any) -> None:
        engine = fusing(device_tokens=12 * BLOCK)
        warm(engine, [B], [D])
        requests = [
            prompt_of(SYSTEM, [B], tokens(5, 1), fusion="exact", max_tokens=70),
            prompt_of(SYSTEM, [D, B], tokens(5, 2), fusion=Fusion(0.3, HEADS), max_tokens=60),
        ]
        first, second = engine.generate(requests)
        assert engine.stats().preemptions > 0
        assert list(first.token_ids) == greedy(plain, requests[0])
        assert (second.finish_reason, len(second.token_ids)) == ("length", 60)
        assert used_blocks(engine) == 0

    @pytest.mark.parametrize(
        ("fusion", "documents", "steps"),
        [
            *((Fusion(0.5, RANDOM), [B, A, C, D], steps) for steps in (0, 1, 4, 7, 9)),
            *((Fusion(0.5, "query", rounds=2), [B, A], steps) for steps in (1, 3, 5)),
        ],
        ids=lambda value: None if isinstance(value, list) else str(value),
    )
    def test_aborted_it_gives_everything_back(
        self, fusing: Make, plain: Any, fusion: Fusion, documents: list[list[int]], steps: int
    ) -> None:
        engine = fusing(max_batch_tokens=8)
        warm(engine, [A], [B])
        request_id = engine.add(prompt_of(SYSTEM, documents, QUESTION, fusion=fusion, max_tokens=9))
        for _ in range(steps):
            engine.step()
        assert engine.stats().running + engine.stats().waiting == 1
        assert engine.abort(request_id)
        assert engine.stats().running == engine.stats().waiting == 0
        for each in ([C], [B, A]):
            exactly(engine, plain, prompt_of(SYSTEM, each, tokens(4, 8), fusion="exact"))
        assert used_blocks(engine) == 0
