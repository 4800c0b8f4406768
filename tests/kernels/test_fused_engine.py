"""Fused requests on the embedded engine: documents reused wherever they stand, and other requests as exact as ever."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.families import ROTATED, WINDOWED, family
from support.inside import cache_of, replace_forward, scorer_of, sequences_of, tiers_of
from support.rings import grid
from support.small_engine import BLOCK, Make, block_bytes, difference, exactly, greedy, small_tiers, tokens

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
from ragorder.kernels.cache import KVLease, content_of
from ragorder.kernels.engine import (
    Completion,
    EngineSettings,
    Fusion,
    RequestRefusedError,
    TieredEngine,
    UnsupportedModelError,
)
from ragorder.kernels.fusion.selection import Needs

NONE, ALL = Fusion(0), Fusion(1)
HEADS, RANDOM = DocumentHeads(), RandomTokens()
NAN = float("nan")


def reused(
    engine: TieredEngine,
    plain: Any,
    documents: Sequence[Sequence[int]],
    *after: Sequence[Sequence[int]] | None,
    fusion: Fusion = NONE,
    recomputed: Sequence[list[int]] = ([],),
    exact_documents: int = 0,
) -> Completion:
    """A completion whose logits are the reference's, with the last list of `recomputed` positions."""
    request = replace(prompt_of(SYSTEM, documents, QUESTION, fusion=fusion), exact_documents=exact_documents)
    [completion] = engine.generate([request])
    expected = fused_logits(plain, request.token_ids, taken_of(documents, *after), recomputed[-1])
    assert off(completion, expected) <= 1e-4
    return completion


@dataclass
class Chooses:
    """A selection that returns or raises this."""

    found: Any
    needs: Needs = "nothing"

    def choose(self, *_: Any) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class TestFullReuse:
    @pytest.mark.parametrize("block_size", [1, 48])
    def test_turns_keys_to_where_the_document_stands_and_computes_the_question_only(
        self, fusing: Make, plain: Any, block_size: int
    ) -> None:
        engine = fusing(block_size=block_size)
        warm(engine, [A], [B], [C])
        computed = engine.stats().computed_tokens
        completion = reused(engine, plain, [C, A, B], None, [], [])
        assert completion.cached == (len(SYSTEM) + len(C), 0, 0)
        assert (completion.fused, completion.recomputed) == ((len(A) + len(B), 0, 0), 0)
        assert engine.stats().computed_tokens == computed + len(QUESTION)
        # It is an approximation, or there was nothing to test.
        assert difference(completion, plain, prompt_of(SYSTEM, [C, A, B], QUESTION)) > 1e-2

    def test_of_documents_that_were_computed_one_after_the_other(self, fusing: Make, plain: Any) -> None:
        engine = fusing()
        warm(engine, [D, A, B], [A], [B], [C])
        reused(engine, plain, [C, A, B], None, [D], [D, A])

    def test_without_a_system_prompt(self, fusing: Make, plain: Any) -> None:
        engine = fusing()
        for document in (A, B):
            engine.generate([prompt_of([], [document], QUESTION)])
        request = prompt_of([], [A, B], QUESTION, fusion=NONE)
        [completion] = engine.generate([request])
        expected = fused_logits(plain, request.token_ids, [Taken(len(A), B, [])], [])
        assert off(completion, expected) <= 1e-4


class TestRecomputation:
    @pytest.mark.parametrize("max_batch_tokens", [1, 64])
    def test_of_everything_is_full_attention(self, fusing: Make, plain: Any, max_batch_tokens: int) -> None:
        engine = fusing(max_batch_tokens=max_batch_tokens)
        warm(engine, [A], [B])
        for fusion in (ALL, Fusion(1.0, RANDOM), Fusion(1.0, "query", rounds=2)):
            request = prompt_of(SYSTEM, [tokens(20, 9), B, A], QUESTION, fusion=fusion, max_tokens=3)
            exactly(engine, plain, request)

    @pytest.mark.parametrize(
        ("max_batch_tokens", "select"), [(1, HEADS), (7, "query"), (64, RANDOM), (512, "deviation")]
    )
    def test_of_some_is_that_of_rows_between_stale_ones(
        self, fusing: Make, plain: Any, chosen: list[list[int]], max_batch_tokens: int, select: Any
    ) -> None:
        engine = fusing(max_batch_tokens=max_batch_tokens)
        warm(engine, [A], [B], [C])
        fusion = Fusion(0.3, select)
        completion = reused(engine, plain, [C, D, B, A], None, None, [], [], fusion=fusion, recomputed=chosen)
        assert len(chosen[-1]) == completion.recomputed == round(0.3 * (len(A) + len(B)))

    @pytest.mark.parametrize(
        ("needs", "documents"),
        # The last block of the last prompt holds more tokens than its reused document has.
        [("nothing", [B, A]), ("question", [B, A]), ("question", [A, tokens(5, 6)])],
        ids=["nothing", "question", "one block"],
    )
    def test_is_of_everything_if_the_selection_fails(
        self,
        fusing: Make,
        plain: Any,
        caplog: pytest.LogCaptureFixture,
        needs: Needs,
        documents: list[list[int]],
    ) -> None:
        engine = fusing(block_size=16)
        warm(engine, *([document] for document in documents))
        fusion = Fusion(select=Chooses(ValueError("Zanzibar"), needs))
        request = prompt_of(SYSTEM, documents, QUESTION, fusion=fusion)
        assert documents == [B, A] or len(request.token_ids) % 16 > len(documents[-1])
        exactly(engine, plain, request)
        assert "selection Chooses failed (ValueError)" in caplog.text
        assert "Zanzibar" not in caplog.text

    def test_does_not_reach_what_a_selection_may_not(self, fusing: Make, plain: Any) -> None:
        """Rows of the exact prefix are shared."""
        engine = fusing()
        warm(engine, [A], [B])
        fusion = Fusion(select=Chooses(torch.arange(0, 60)))
        [completion] = engine.generate([prompt_of(SYSTEM, [B, A], QUESTION, fusion=fusion)])
        assert completion.recomputed == 60 - len(SYSTEM) - len(B)
        [found] = exactly(engine, plain, prompt_of(SYSTEM, [B], QUESTION, fusion="exact"))
        assert found.cached.total == len(SYSTEM) + len(B)


class TestRounds:
    """The second half of the tokens is what the first half attends to."""

    def test_the_second_adds_what_the_tokens_of_the_first_attend_to_most(
        self, fusing: Make, chosen: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = fusing()
        warm(engine, [A], [B])
        scorer = scorer_of(engine)
        attending, seen = scorer.attending, []

        def watched(inputs: Any, rows: Any, most_tokens: int) -> Any:
            attention = yield from attending(inputs, rows, most_tokens)
            seen.append((rows.tolist(), attention.tolist()))
            return attention

        monkeypatch.setattr(scorer, "attending", watched)
        engine.generate([prompt_of(SYSTEM, [B, A], QUESTION, fusion=Fusion(0.5, "query", rounds=2))])
        [(first, attention)] = seen
        begin, budget = len(SYSTEM) + len(B), round(0.5 * len(A))
        others = sorted({*range(begin, begin + len(A))} - {*first}, key=attention.__getitem__, reverse=True)
        assert len(first) == budget // 2
        assert chosen[-1] == sorted([*first, *others[: budget - len(first)]])


class TestSelecting:
    @pytest.mark.parametrize(
        "fusion", [Fusion(0.3, "deviation"), Fusion(0.3, "query", rounds=3)], ids=["deviation", "three rounds"]
    )
    def test_leaves_each_step_to_others_too(self, fusing: Make, plain: Any, fusion: Fusion) -> None:
        engine = fusing(max_batch_tokens=16)
        warm(engine, [A], [B], [C])
        decoding = prompt_of([], [], tokens(5, 93), max_tokens=40)
        engine.add(decoding)
        told = [update.token_ids for update in engine.step()]
        request = engine.add(prompt_of(SYSTEM, [C, B, A], QUESTION, fusion=fusion))
        selecting = 0
        while True:
            updates = engine.step()
            [sequence] = [each for each in sequences_of(engine).values() if each.request_id == request] or [None]
            told += [update.token_ids for update in updates if update.request_id != request]
            if sequence is None:
                break
            selecting += sequence.selecting is not None
            assert len(updates) == 1
        assert selecting > 1
        run_to_end = [update.token_ids for _ in range(60) for update in engine.step()]
        assert [token for each in (*told, *run_to_end) for token in each] == greedy(plain, decoding)

    def test_is_not_begun_before_the_documents_in_place_have_kv(self, fusing: Make, monkeypatch: Any) -> None:
        engine = fusing(max_batch_tokens=8)
        warm(engine, [A], [B])
        seen = []
        scorer = scorer_of(engine)
        attention = scorer.attention
        monkeypatch.setattr(
            scorer, "attention", lambda inputs, **options: seen.append(inputs) or attention(inputs, **options)
        )
        engine.generate([prompt_of(SYSTEM, [A, C, B], QUESTION, fusion=Fusion(0.2, "query"))])
        [inputs] = seen
        assert bool(inputs.held("cpu").all())
        assert inputs.exact_tokens == len(SYSTEM) + len(A) + len(C)

    def test_a_failing_device_has_the_request_start_over(
        self, fusing: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = fusing()
        warm(engine, [A], [B])
        request = prompt_of(SYSTEM, [B, A], QUESTION, fusion=Fusion(0.3, "query", rounds=2))
        [undisturbed] = engine.generate([request])
        failures = [RuntimeError(), torch.OutOfMemoryError()]

        class Fails:
            def __init__(self, forward: Any) -> None:
                self.forward = forward

            def until_ended(self, *arguments: Any) -> None:
                if failures:
                    raise failures.pop()
                self.forward.until_ended(*arguments)

        replace_forward(monkeypatch, scorer_of(engine), Fails)
        [completion] = engine.generate([request])
        assert not failures
        # Shorter steps keep what is cached, another failure loses it: then all is computed.
        assert off(completion, undisturbed.logits) > 1e-2
        assert difference(completion, plain, request) <= 1e-4
        assert (engine.stats().failed_steps, engine.stats().retries) == (2, 1)


class TestTheTree:
    def test_gets_what_is_computed_after_the_exact_prefix_and_nothing_after_copies(
        self, fusing: Make, plain: Any
    ) -> None:
        engine = fusing()
        warm(engine, [A], [B])
        completion = reused(engine, plain, [A, C, B, D], None, None, [], [])
        assert completion.cached.total == len(SYSTEM) + len(A)
        [again] = exactly(engine, plain, prompt_of(SYSTEM, [A, C, B, D], tokens(5, 6), fusion="exact"))
        assert again.cached.total == len(SYSTEM) + len(A) + len(C)

    @pytest.mark.parametrize(("max_batch_tokens", "max_requests"), [(512, 64), (8, 1)])
    def test_gets_a_document_that_is_new_after_copies_by_itself(
        self, fusing: Make, plain: Any, max_batch_tokens: int, max_requests: int
    ) -> None:
        """It would have to be computed again for each request."""
        engine = fusing(max_batch_tokens=max_batch_tokens, max_requests=max_requests)
        warm(engine, [A], [B])
        computed = engine.stats().computed_tokens
        request = prompt_of(SYSTEM, [B, A, C, D], QUESTION, fusion=Fusion(0.25, HEADS), max_tokens=3)
        [completion] = engine.generate([request])
        assert completion.finish_reason == "length"
        # These two were not there before: they count as computed.
        recomputed = 0.25 * (len(A) + len(C) + len(D))
        assert (completion.fused.total, completion.recomputed) == (len(A), round(recomputed / 3))
        assert engine.stats().computed_tokens == computed + len(C) + len(D) + round(recomputed) + len(QUESTION) + 2

        for document in (D, C):
            [found] = exactly(engine, plain, prompt_of(SYSTEM, [document], tokens(5, 6), fusion="exact"))
            assert found.cached.total == len(SYSTEM) + len(document)
        reused(engine, plain, [D, C, A], None, [], [])

    def test_gets_it_once_for_requests_that_come_together(self, fusing: Make, plain: Any) -> None:
        engine = fusing()
        warm(engine, [A], [B])
        computed = engine.stats().computed_tokens
        requests = [prompt_of(SYSTEM, [B, A, C], tokens(4, seed), fusion=NONE) for seed in range(3)]
        for completion, request in zip(engine.generate(requests), requests, strict=True):
            expected = fused_logits(plain, request.token_ids, taken_of([B, A, C], None, [], []), [])
            assert off(completion, expected) <= 1e-4
        assert engine.stats().computed_tokens == computed + len(C) + 3 * 4

    def test_gets_everything_if_everything_is_exact(self, fusing: Make, plain: Any) -> None:
        engine = fusing()
        warm(engine, [A], [B])
        engine.generate([prompt_of(SYSTEM, [B, A], QUESTION, fusion=ALL)])
        [completion] = exactly(engine, plain, prompt_of(SYSTEM, [B, A], tokens(4, 8), fusion="exact"))
        assert completion.cached.total == len(SYSTEM) + len(B) + len(A)

    def test_is_one_of_each_tenant(self, fusing: Make, plain: Any) -> None:
        engine = fusing()
        for salt in ("a", None):
            engine.generate([prompt_of(SYSTEM, [A], QUESTION, salt=salt)])
        for salt, fused in (("b", 0), ("", 0), ("a", len(A)), (None, len(A))):
            request = prompt_of(SYSTEM, [tokens(20, 50), A], QUESTION, fusion=NONE, salt=salt)
            [completion] = engine.generate([request])
            assert completion.fused.total == fused
            if not fused:
                assert difference(completion, plain, request) <= 1e-4


class TestTiers:
    def cold(self, engine: TieredEngine, seeds: Sequence[int]) -> None:
        """Drive documents off the device."""
        for seed in seeds:
            engine.generate([prompt_of(SYSTEM, [tokens(200, seed)], QUESTION, fusion="exact")])

    def test_documents_come_from_host_and_disk_too(
        self, fusing: Make, plain: Any, model: Any, tmp_path: Path, chosen: list[list[int]]
    ) -> None:
        tiers = small_tiers(model, tmp_path, 20) | {"device_tokens": 18 * BLOCK, "policy": "lru"}
        engine = fusing(**tiers)
        warm(engine, [A], [B])
        self.cold(engine, [70])
        found: Counter[str] = Counter()
        for documents in ([C, A], [D, B]):
            completion = reused(engine, plain, documents, None, [], fusion=Fusion(0.2, "query"), recomputed=chosen)
            found.update(completion.fused._asdict())
            self.cold(engine, [71, 72, 73])
        assert reused(engine, plain, [D, A], None, []).fused == (0, 0, len(A))
        assert found["host"] > 0
        engine.close()

        # Nothing but the disk says that there is a copy of it.
        assert reused(fusing(**tiers), plain, [tokens(19, 80), A], None, []).fused == (0, 0, len(A))

    def test_a_document_that_arrives_while_a_step_is_planned_is_reused(
        self, fusing: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = fusing()
        warm(engine, [A], [B])
        late: list[KVLease] = []

        def ready(lease: KVLease) -> bool:
            if lease in late:
                return True
            late.append(lease)
            return False

        monkeypatch.setattr(KVLease, "ready", property(ready))
        assert reused(engine, plain, [B, A], None, []).fused.total == len(A)

    @pytest.mark.parametrize(("blocks", "taken"), [(11, [A, B, D]), (10, [A, D])], ids=["11", "10"])
    def test_a_pool_with_room_for_some_documents_computes_the_others_only(
        self, fusing: Make, plain: Any, blocks: int, taken: list[list[int]]
    ) -> None:
        engine = fusing(device_tokens=blocks * BLOCK)
        warm(engine, [C], [A], [B], [D])
        computed = engine.stats().computed_tokens
        completion = reused(engine, plain, [C, A, B, D], None, *([] if each in taken else None for each in (A, B, D)))
        assert completion.fused.total == sum(map(len, taken))
        others = len(SYSTEM) + sum(map(len, (A, B, C, D))) - completion.cached.total - completion.fused.total
        assert engine.stats().computed_tokens == computed + others + len(QUESTION)
        assert used_blocks(engine) == 0


class TestWhatIsNotNumbers:
    """KV that a fault has left, before any answer showed it."""

    def spoil(self, engine: TieredEngine, document: Sequence[int]) -> None:
        cache = cache_of(engine)
        node = tiers_of(cache).nodes[content_of(SYSTEM, document)]
        assert node.device is not None
        for position in range(node.start, node.end):
            block = node.device.blocks[position // BLOCK - node.start // BLOCK]
            cache.pool.kv[block, :, :, position % BLOCK] = float("nan")

    @pytest.mark.parametrize("tier", ["device", "host"])
    def test_fails_one_request_and_is_computed_again(self, fusing: Make, plain: Any, model: Any, tier: str) -> None:
        engine = fusing(device_tokens=20 * BLOCK, host_bytes=20 * block_bytes(model), policy="lru")
        warm(engine, [A], [B], [C])
        self.spoil(engine, B)
        if tier == "host":
            engine.generate([prompt_of(SYSTEM, [tokens(200, 70)], QUESTION, fusion="exact")])
        request = prompt_of(SYSTEM, [C, A, B], QUESTION, fusion=NONE)
        [failed] = engine.generate([request])
        assert failed.finish_reason == "error" and "NaN or inf" in str(failed.error)
        again = reused(engine, plain, [C, A, B], None, [], [])
        # What was sound has stayed.
        assert (again.cached.total, again.fused.total) == (len(SYSTEM) + len(C), len(A))

    def test_as_an_exact_prefix_it_is_computed_again_too(self, make: Make, plain: Any) -> None:
        engine = make(reuse="fused")
        warm(engine, [B, A])
        self.spoil(engine, B)
        request = prompt_of(SYSTEM, [B, A], QUESTION, fusion="exact")
        assert engine.generate([request])[0].finish_reason == "error"
        [again] = exactly(engine, plain, request)
        assert again.cached.total == len(SYSTEM)


FUSED = [name for name in ROTATED if name not in WINDOWED]


class TestFamilies:
    @pytest.mark.parametrize("name", grid(FUSED, 3))
    def test_reuse_is_between_full_reuse_and_full_attention(self, name: str) -> None:
        model = family(name)
        plain = copy.deepcopy(model)
        plain.set_attn_implementation("sdpa")
        with TieredEngine(model, settings=EngineSettings(device_tokens=2048, host_bytes=0, reuse="fused")) as engine:
            warm(engine, [A], [B])
            distances = []
            for recompute in (0.0, 0.5, 1.0):
                request = prompt_of(SYSTEM, [B, A], QUESTION, fusion=Fusion(recompute))
                [completion] = engine.generate([request])
                assert completion.recomputed == round(recompute * len(A))
                distances.append(difference(completion, plain, request))
        assert distances[2] <= 1e-4 < distances[0]

    @pytest.mark.parametrize("name", [*WINDOWED, "phi3-longrope"])
    def test_others_are_refused_by_name_and_served_exactly(self, name: str) -> None:
        model = family(name)
        kind = type(model).__name__
        with pytest.raises(UnsupportedModelError, match=kind):
            TieredEngine(model, settings=EngineSettings(device_tokens=256, host_bytes=0, reuse="fused"))
        assert model.config._attn_implementation != "ragorder"
        with TieredEngine(model, settings=EngineSettings(device_tokens=256, host_bytes=0)) as engine:
            assert engine.generate([prompt_of(SYSTEM, [A], QUESTION)])[0].error is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "said"),
        [
            *((lambda _, share=share: Fusion(share), "recompute is .*: give a share of") for share in (-0.1, 1.1, NAN)),
            (lambda _: Fusion(rounds=0), "rounds is 0: give a whole number, 1 or more"),
            (lambda _: Fusion(rounds=True), "rounds is True: give a whole number"),
            (lambda _: Fusion(select="best"), "selection must be one of 'deviation', 'query', got 'best'"),
            (lambda make: make(recompute=1.5), "recompute"),
            (lambda make: make(select="best"), "select"),
            (lambda make: make(reuse="both"), "reuse"),
            (lambda make: make(select_rounds=0), "select_rounds"),
            (lambda make: make().add(prompt_of(SYSTEM, [A], QUESTION, fusion=Fusion())), "reuse='fused'"),
        ],
    )
    def test_say_what_is_wrong(self, make: Make, call: Callable[[Make], object], said: str) -> None:
        with pytest.raises((ValueError, RequestRefusedError), match=said):
            call(make)


class TestExactDocuments:
    """The leading documents that a request has computed exactly although they could be reused."""

    def test_are_computed_and_are_an_exact_prefix_from_then_on(self, fusing: Make, plain: Any) -> None:
        engine = fusing()
        warm(engine, [A, B], [C, D])
        found = reused(engine, plain, [D, B, A], None, None, [], exact_documents=2)
        assert (found.cached.total, found.fused.total) == (len(SYSTEM), len(A))
        [again] = engine.generate([prompt_of(SYSTEM, [D, B, C], QUESTION, fusion=NONE)])
        assert (again.cached.total, again.fused.total) == (len(SYSTEM) + len(D) + len(B), len(C))
