"""Suite fusion-orders: what fused requests compute, counted on an engine without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("scipy")

from ragorder import Orderer
from ragorder.benchmarks.fusion.fused_orders import (
    FusedOrdersCell,
    FusedPrefill,
    SimulatedFusion,
    measure,
)
from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream, stream_of_trace
from ragorder.benchmarks.ragcache.replacement.tiers import QUESTION_TOKENS
from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import make_workload

TOKENS = [10 * number for number in range(1, 9)]


def engine(device_tokens: int | None = None, *, copied: bool = False) -> SimulatedFusion:
    return SimulatedFusion(TOKENS, device_tokens, recompute=0.5, copied=copied)


class TestTheSimulatedEngine:
    def test_reuses_what_it_has_and_computes_what_stands_before_it_exactly(self) -> None:
        sim = engine()
        assert sim.serve([0, 1], 0, 4) == FusedPrefill(0, 0, 30 + 4)
        # 2 is computed in place, after 0; 1 is reused.
        assert sim.serve([0, 2, 1], 0, 4) == FusedPrefill(10, 20, 30 + 10 + 4)
        assert sim.serve([0, 2, 1], 0, 4) == FusedPrefill(40, 20, 10 + 4)

    def test_computes_documents_among_copies_by_themselves(self) -> None:
        sim = engine()
        sim.serve([0], 0, 0)
        sim.serve([1], 0, 0)
        # 3 is computed alone, and copied: half of it is computed once more.
        assert sim.serve([0, 1, 3], 0, 0) == FusedPrefill(10, 20, 40 + 30)
        assert sim.serve([3, 0], 0, 0) == FusedPrefill(40, 10, 5)

    def test_that_does_not_fuse_is_a_prefix_cache(self) -> None:
        sim = SimulatedFusion(TOKENS, None, recompute=0.5, copied=False, fuses=False)
        assert sim.serve([0, 1], 0, 4) == FusedPrefill(0, 0, 30 + 4)
        assert sim.serve([0, 2, 1], 0, 4) == FusedPrefill(10, 0, 50 + 4)
        assert sim.serve([0, 2, 1], 0, 4) == FusedPrefill(60, 0, 4)

    def test_computes_leading_documents_exactly_if_asked(self) -> None:
        sim = engine(copied=True)
        assert sim.serve([0, 1, 2], 0, 0) == FusedPrefill(0, 60, 30)
        assert sim.serve([0, 1, 2], 2, 0) == FusedPrefill(0, 30, 30 + 15)
        assert sim.serve([0, 1, 3], 0, 0) == FusedPrefill(30, 40, 20)

    @pytest.mark.parametrize("copied", [False, True])
    def test_never_holds_more_than_it_has_room_for(self, copied: bool) -> None:
        sim, random = engine(150, copied=copied), Random(0)
        for _ in range(300):
            documents = random.sample(range(8), 3)
            found = sim.serve(documents, random.randrange(4), 5)
            length = sum(TOKENS[document] for document in documents)
            assert 5 <= found.computed <= length + 5 + 0.5 * length
            assert sim.held_tokens <= 150

    @pytest.mark.merge
    def test_computes_what_the_embedded_engine_computes(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        from support.fused_reference import prompt_of
        from support.small_engine import small_model, tokens

        from ragorder.benchmarks.fusion.selections import DocumentHeads
        from ragorder.kernels.engine import EngineSettings, Fusion, TieredEngine

        texts = [tokens(length, 10 + length) for length in TOKENS]
        system, random = tokens(16, 1), Random(1)
        settings = EngineSettings(reuse="fused", device_tokens=16_384, verify=False)
        sim, exact, reused, fusion = engine(), 0, 0, Fusion(0.5, DocumentHeads())
        with TieredEngine(small_model(), None, settings) as real:
            for number in range(40):
                documents = random.sample(range(8), 4)
                invested = random.choice((0, 0, 1, 3))
                found = sim.serve(documents, invested, 7)
                before = real.stats().computed_tokens
                request = prompt_of(system, [texts[each] for each in documents], tokens(7, 100 + number))
                [done] = real.generate([replace(request, exact_documents=invested, fusion=fusion)])
                assert done.cached.total == found.exact + (len(system) if number else 0)
                assert done.fused.total == found.fused
                # Shares of single documents are rounded, and the first request computes the system prompt.
                computed = real.stats().computed_tokens - before - (0 if number else len(system))
                assert computed == pytest.approx(found.computed, abs=1)
                exact, reused = exact + found.exact, reused + found.fused
        assert exact and reused


@pytest.fixture(scope="module")
def stream() -> DocumentStream:
    workload = make_workload("zipf10", 0, requests=1_200)
    return stream_of_trace(trace_of_workload(workload, 1_200))


class TestOrders:
    def total(self, stream: DocumentStream, policy: str, **cell: Any) -> dict[str, float]:
        rows = measure(stream, FusedOrdersCell(**cell), policy, lambda: None)
        assert {len(column) for column in rows.values()} == {len(stream.requests)}
        return {name: sum(column) for name, column in rows.items()}

    def test_of_copies_alone_all_but_the_question_is_the_share(self, stream: DocumentStream) -> None:
        for policy in ("retrieval", "ordered"):
            found = self.total(stream, policy)
            assert found["fused_tokens"] == found["document_tokens"]
            expected = 0.15 * found["document_tokens"] + QUESTION_TOKENS * len(stream.requests)
            assert found["computed_tokens"] == pytest.approx(expected)

    @pytest.mark.parametrize("device_tokens", [None, 50_000, 5_000])
    def test_exact_documents_pay(self, stream: DocumentStream, device_tokens: int | None) -> None:
        cell = {"copies": "all", "device_tokens": device_tokens}
        ordered, invested = (self.total(stream, policy, **cell) for policy in ("ordered", "invested"))
        assert invested["exact_tokens"] > ordered["exact_tokens"]
        assert invested["computed_tokens"] < ordered["computed_tokens"]
        assert invested["seconds"] < ordered["seconds"]

    def test_beside_documents_without_copies_nothing_changes(self, stream: DocumentStream) -> None:
        ordered, invested = (self.total(stream, policy, copies="served") for policy in ("ordered", "invested"))
        assert ordered == invested
        assert ordered["exact_tokens"] > self.total(stream, "retrieval", copies="served")["exact_tokens"]

    def test_a_prefix_cache_reuses_less_and_nothing_approximately(self, stream: DocumentStream) -> None:
        ranked, ordered = (self.total(stream, policy) for policy in ("prefix cache", "prefix cache, ordered"))
        fused = self.total(stream, "retrieval", copies="served")
        assert ranked["fused_tokens"] == ordered["fused_tokens"] == 0
        assert 0 < ranked["exact_tokens"] < ordered["exact_tokens"] < fused["exact_tokens"] + fused["fused_tokens"]
        for found in (ranked, ordered):
            new = found["document_tokens"] - found["exact_tokens"]
            assert found["computed_tokens"] == new + QUESTION_TOKENS * len(stream.requests)

    def test_the_engine_finds_what_the_orderer_predicts(self, stream: DocumentStream) -> None:
        options: dict[str, Any] = {"capacity_tokens": None, "block_size": 1, "reuse": "fused", "copies": "all"}
        orderer = Orderer(key=lambda document: document, tokens=stream.tokens.__getitem__, strict=True, **options)
        sim = SimulatedFusion(stream.tokens, None, recompute=0.15, copied=True)
        for request in stream.requests:
            ordering = orderer.order(request)
            found = sim.serve(list(ordering.documents), ordering.exact_documents, QUESTION_TOKENS)
            assert found.exact == ordering.cached_tokens
            fused = sum(stream.tokens[ordering.documents[place]] for place in ordering.fused)
            assert found.fused == fused
            ordering.confirm(found.exact)
