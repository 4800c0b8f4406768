"""Suite fusion-storage: KV that a knowledge base and its users' uploads take."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")

from ragorder.benchmarks.fusion.fused_storage import POLICIES, StorageCell, draw, measure

CELL = StorageCell(documents=5, document_tokens=20, known=100, uploads=50)


def test_documents_are_known_uploaded_or_asked_for_once() -> None:
    drawn = list(draw(CELL, 2_000, 0))
    assert all(len(set(documents)) == 5 for documents in drawn)
    every = [document for documents in drawn for document in documents]
    unique = [document for document in every if document >= 150]
    assert len(unique) == len(set(unique))
    shares = [sum(low <= each < high for each in every) / 10_000 for low, high in ((0, 100), (100, 150), (150, 10**9))]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.02)


def measured(policy: str, **cell: Any) -> dict[str, list[float]]:
    return measure(CELL.model_copy(update=cell), policy, 200, 1, lambda: None)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_document_is_found_or_computed(policy: str) -> None:
    rows = measured(policy)
    assert all(
        found + computed == documents == 5 and 0 <= again <= computed
        for documents, found, computed, again in zip(*(rows[n] for n in list(rows)[:4]), strict=True)
    )
    distinct = {document for documents in draw(CELL, 200, 1) for document in documents}
    assert rows["held"][-1] >= 20 * len(distinct | set(range(100)))


def test_on_alternative_paths_each_document_is_held_and_computed_once() -> None:
    prefix = measured("prefix cache")
    for policy in POLICIES[1:]:
        rows = measured(policy)
        assert sum(rows["again"]) == 0 < sum(prefix["again"])
        distinct = {document for documents in draw(CELL, 200, 1) for document in documents} | set(range(100))
        assert rows["held"][-1] == 20 * len(distinct) < prefix["held"][-1]


def test_what_is_evicted_is_computed_again() -> None:
    rows = measured("alternative path", device_tokens=1_000)
    assert sum(rows["again"]) > 0
    assert max(rows["held"]) <= 1_000
