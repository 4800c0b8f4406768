"""Orders of `Orderer(reuse="fused")` on the embedded engine: what is predicted to be taken over is."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support.small_engine import Make, tokens

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.fused_reference import prompt_of

from ragorder import Document, Orderer

SYSTEM = tokens(21, 100)
TEXTS = [tokens(20 + 3 * number, number) for number in range(10)]
DOCUMENTS = [Document(str(number), str(number), tokens=len(text)) for number, text in enumerate(TEXTS)]


def test_each_document_is_reused_as_predicted(make: Make) -> None:
    engine = make(reuse="fused", select="none", device_tokens=8192)
    orderer = Orderer(reuse="fused", capacity_tokens=8192, prefix_tokens=len(SYSTEM), strict=True)
    random, kinds, invested = Random(0), set(), 0
    for number in range(60):
        ordering = orderer.order(random.sample(DOCUMENTS, 5))
        texts = [TEXTS[int(document.id)] for document in ordering.documents]
        request = prompt_of(SYSTEM, texts, tokens(5, 1000 + number))
        [done] = engine.generate([replace(request, exact_documents=ordering.exact_documents)])
        assert done.error is None
        invested += ordering.exact_documents > 0
        expected = dict.fromkeys(("exact", "fused", "computed"), 0)
        for text, kind in zip(texts, ordering.reuse, strict=True):
            expected[kind] += len(text)
        assert done.cached.total == expected["exact"] + (len(SYSTEM) if number else 0)
        assert done.fused.total == expected["fused"]
        kinds.update(ordering.reuse)
        ordering.confirm(done.cached.total, done.prompt_tokens + 1, prompt_tokens=done.prompt_tokens)
    assert kinds == {"exact", "fused", "computed"}
    assert invested


def test_without_the_order_less_is_exact(make: Make) -> None:
    exact = {}
    for ordered in (False, True):
        engine = make(reuse="fused", select="none", device_tokens=8192)
        orderer = Orderer(reuse="fused", capacity_tokens=8192, prefix_tokens=len(SYSTEM), strict=True)
        random, exact[ordered] = Random(1), 0
        for number in range(16):
            given = random.sample(DOCUMENTS, 5)
            ordering = orderer.order(given)
            texts = [TEXTS[int(document.id)] for document in (ordering.documents if ordered else given)]
            request = prompt_of(SYSTEM, texts, tokens(5, 1000 + number))
            [done] = engine.generate([replace(request, exact_documents=ordering.exact_documents if ordered else 0)])
            exact[ordered] += done.cached.total
    assert exact[True] > 1.2 * exact[False]
