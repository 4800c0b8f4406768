"""How much of a real corpus' documents fused requests reuse, on the real engine, in the order of retrieval."""

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

CORPORA = Path(__file__).parents[2].parent / "shared" / "data"
SYSTEM = tokens(21, 100)
TOP_K = 10


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
    engine = make(reuse="fused", recompute=0.15, select="head", device_tokens=65_536)
    seen: set[int] = set()
    shares = []
    for number, ranking in enumerate(rankings(corpus)[: length(3000, 15)]):
        documents = [document(chunk) for chunk in ranking]
        [completion] = engine.generate([prompt_of(SYSTEM, documents, tokens(2, number))])
        reused = completion.cached.total - len(SYSTEM) * bool(number) + completion.fused.total
        assert reused == sum(len(document(chunk)) for chunk in ranking if chunk in seen)
        seen.update(ranking)
        shares.append(reused / sum(map(len, documents)))
    if len(shares) > 200:
        assert sum(shares[100:]) / len(shares[100:]) >= 0.85


def document(chunk: int) -> Any:
    random = Random(chunk)
    return [random.randrange(VOCABULARY) for _ in range(random.randint(3, 6))]
