"""Searches of a real index in stages, as they are or stretched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from ragorder.common.extras import needs
from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.suites.pipelining.server import Asked
from ragorder.pipelining import Provisional, Retrieval, StagedHNSW, StagedIVF, StagedSearch, staged_retrieval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

__all__ = ["SearchPlan", "paced", "plan_search", "real_retrieval"]

_CLUSTERS = 128
_LINKS = 32
_EF_FULL = 512
_EF_FACTOR = 4


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """`shares` are each stage's part of the unstaged search; their sum exceeds 1 if stages repeat work."""

    search: StagedSearch
    unstaged: StagedSearch
    shares: tuple[float, ...]


def plan_search(
    kind: Literal["ivf", "hnsw"], vectors: Vectors, *, ratio: float, stages: int, growth: str, top_k: int, seed: int = 0
) -> SearchPlan:
    """A search by inner product. "ivf": `ratio` of at most 128 clusters, in stages of `growth` "equal" or "geometric".
    "hnsw": `ratio` is efSearch / 512; each stage has four times the last one's, and starts over. Raises ImportError."""
    faiss = _faiss()
    if kind == "hnsw":
        target = max(top_k, round(ratio * _EF_FULL))
        schedule = sorted({max(top_k, target // _EF_FACTOR**left) for left in range(stages)})
        index = faiss.IndexHNSWFlat(vectors.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
        index.add(vectors)
        shares = tuple(each / target for each in schedule)
        return SearchPlan(StagedHNSW(index, schedule=schedule), StagedHNSW(index, target, stages=1), shares)
    clusters = min(_CLUSTERS, len(vectors))
    quantizer = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(quantizer, vectors.shape[1], clusters, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid, index.cp.seed = 1, seed + 1
    index.train(vectors)
    index.add(vectors)
    probes = max(1, round(ratio * clusters))
    counts = _counts(probes, stages, growth)
    plain = StagedIVF(index, growth=[probes])
    return SearchPlan(StagedIVF(index, growth=counts), plain, tuple(count / probes for count in counts))


def _counts(probes: int, stages: int, growth: str) -> list[int]:
    if growth == "geometric":
        ends = sorted({max(1, probes >> left) for left in range(stages)})
    else:
        ends = sorted({max(1, probes * number // stages) for number in range(1, stages + 1)})
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def real_retrieval(search: StagedSearch, corpus: Corpus, queries: Vectors, top_k: int) -> Retrieval[Asked, Document]:
    """Documents of a corpus for its questions, embedded in advance as `queries`."""
    return staged_retrieval(
        search,
        lambda question: queries[question.number : question.number + 1],
        corpus.documents.__getitem__,
        top_k=top_k,
    )


def paced(
    retrieval: Retrieval[Asked, Document], shares: Sequence[float], search_s: float
) -> Retrieval[Asked, Document]:
    """The search stretched to `search_s` seconds, each stage to its share. It waits, as for a database on another
    machine."""
    ends_s = [search_s * share for share in accumulate(shares)]

    async def search(question: Asked) -> AsyncGenerator[Provisional[Document], None]:
        now = asyncio.get_running_loop().time
        start_s, number = now(), 0
        async with aclosing(retrieval(question)) as stages:
            async for stage in stages:
                end_s = ends_s[-1] if stage.final else ends_s[number]
                await asyncio.sleep(max(0.0, start_s + end_s - now()))
                yield stage
                number += 1

    return search


def _faiss() -> Any:
    with needs("retrieval", "a real index"):
        import faiss
    return faiss
