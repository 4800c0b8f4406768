"""Fused requests of many documents: what `Orderer(reuse="fused")` predicts to be reused is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.rings import length
from support.small_engine import VOCABULARY, Make, tokens

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.fused_reference import prompt_of

from ragorder import Document, Orderer
from ragorder.benchmarks.fusion.selections import DocumentHeads
from ragorder.kernels.engine import Fusion

CORPORA = Path(__file__).parents[2].parent / "shared" / "data"
SYSTEM = tokens(21, 100)
TOP_K = 10
TEXTS = [tokens(20 + 3 * number, number) for number in range(10)]
DOCUMENTS = [Document(str(number), str(number), tokens=len(text)) for number, text in enumerate(TEXTS)]


def test_each_document_is_reused_as_predicted(make: Make) -> None:
    engine = make(reuse="fused", recompute=0, device_tokens=8192)
    orderer = Orderer(reuse="fused", capacity_tokens=8192, prefix_tokens=len(SYSTEM), strict=True)
    random, kinds = Random(0), set()
    for number in range(25):
        ordering = orderer.order(random.sample(DOCUMENTS, 5))
        texts = [TEXTS[int(document.id)] for document in ordering.documents]
        [done] = engine.generate([prompt_of(SYSTEM, texts, tokens(5, 1000 + number))])
        assert done.error is None
        expected = dict.fromkeys(("exact", "fused", "computed"), 0)
        for text, kind in zip(texts, ordering.reuse, strict=True):
            expected[kind] += len(text)
        assert done.cached.total == expected["exact"] + (len(SYSTEM) if number else 0)
        assert done.fused.total == expected["fused"]
        kinds.update(ordering.reuse)
        ordering.confirm(done.cached.total, done.prompt_tokens + 1, prompt_tokens=done.prompt_tokens)
    assert kinds == {"exact", "fused", "computed"}


def rankings(corpus: str) -> list[list[int]]:
    runs = CORPORA / corpus / "run_top20.jsonl.gz"
    if not runs.exists():
        pytest.skip(f"{runs} is absent")
    with gzip.open(runs) as lines:
        return [json.loads(line)["chunks"][:TOP_K] for line in lines]


@pytest.mark.parametrize("corpus", ["covidqa", "nqopen", "bing_covid_cord"])
def test_is_of_every_document_that_an_earlier_request_had(make: Make, corpus: str) -> None:
    """Wherever it stands. In `make test-all` all requests of the corpus: 85 % of the tokens and more, from the 101st
    request on. Documents of 3 to 6 tokens stand for the corpus' own."""
    engine = make(reuse="fused", device_tokens=65_536)
    fusion, seen = Fusion(0.15, DocumentHeads()), set[int]()
    shares = []
    for number, ranking in enumerate(rankings(corpus)[: length(3000, 15)]):
        documents = [document(chunk) for chunk in ranking]
        [completion] = engine.generate([prompt_of(SYSTEM, documents, tokens(2, number), fusion=fusion)])
        reused = completion.cached.total - len(SYSTEM) * bool(number) + completion.fused.total
        assert reused == sum(len(document(chunk)) for chunk in ranking if chunk in seen)
        seen.update(ranking)
        shares.append(reused / sum(map(len, documents)))
    if len(shares) > 200:
        assert sum(shares[100:]) / len(shares[100:]) >= 0.85


def document(chunk: int) -> Any:
    random = Random(chunk)
    return [random.randrange(VOCABULARY) for _ in range(random.randint(3, 6))]
