"""Retrievers, which rank a corpus' documents for its questions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from ragorder.common.extras import needs
from ragorder.kernels.preprocessing.encoder import HUB_MODEL, TextEncoder, default_model, packaged_model

# What the extra `bm25` brings; the others take the large one, `retrieval`.
_LEXICAL = ("bm25s", "numpy")


class Retriever(Protocol):
    @property
    def name(self) -> str:
        """Distinct in reports and caches."""

    def search(self, documents: Sequence[str], queries: Sequence[str], top_k: int) -> list[list[int]]:
        """At most `top_k` distinct positions in `documents` for each query, best first."""


class BM25Retriever:
    """BM25 (Lucene's variant, k1=1.5, b=0.75); ties go to the earlier document. Documents without a word of the query
    are not retrieved."""

    name = "bm25"

    def search(self, documents: Sequence[str], queries: Sequence[str], top_k: int) -> list[list[int]]:
        """Raises ValueError for `top_k` < 1, ImportError without bm25s."""
        _check(top_k)
        bm25s = _require("bm25s")
        np = _require("numpy")
        corpus = bm25s.tokenize(list(documents), show_progress=False)
        if not corpus.vocab:
            return [[] for _ in queries]
        index = bm25s.BM25(backend="numpy")
        index.index(corpus, show_progress=False)
        rankings: list[list[int]] = []
        for words in bm25s.tokenize(list(queries), return_ids=False, show_progress=False):
            known = index.get_tokens_ids(words)
            if not known:
                rankings.append([])
                continue
            scores = index.get_scores_from_ids(known)
            matching = np.flatnonzero(scores > 0)
            best = np.argsort(-scores[matching], kind="stable")[:top_k]
            rankings.append([int(position) for position in matching[best]])
        return rankings


class DenseRetriever:
    """Exact ranking by cosine similarity of sentence-transformers embeddings. Text beyond the model's window is
    ignored."""

    def __init__(self, model: str = HUB_MODEL) -> None:
        self.model = model
        self.name = "dense" if model in (HUB_MODEL, packaged_model()) else f"dense:{model}"
        self._encoder = TextEncoder(model)

    def search(self, documents: Sequence[str], queries: Sequence[str], top_k: int) -> list[list[int]]:
        """Raises ValueError for `top_k` < 1, ImportError without sentence-transformers and faiss, OSError for the
        model."""
        _check(top_k)
        if not documents or not queries:
            return [[] for _ in queries]
        faiss = _require("faiss")
        vectors = self.embed(documents)
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        _, positions = index.search(self.embed(queries), min(top_k, len(documents)))
        return [[int(position) for position in row] for row in positions]

    def embed(self, texts: Sequence[str]) -> Any:
        """Unit vectors of texts, shape (texts, dimensions). Raises as `search`."""
        return self._encoder.encode(texts)


def make_retriever(name: str, model: str | None = None) -> Retriever:
    """`name`: "bm25", or "dense" with its `model`. Raises ValueError for other names, or a model for "bm25"."""
    if name == "bm25":
        if model is not None:
            raise ValueError(f"the retriever 'bm25' has no model, got {model!r}: leave it out or choose 'dense'")
        return BM25Retriever()
    if name == "dense":
        return DenseRetriever(default_model() if model is None else model)
    raise ValueError(f"unknown retriever {name!r}: choose 'bm25' or 'dense'")


def _check(top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")


def _require(module: str) -> Any:
    with needs("eval" if module in _LEXICAL else "retrieval", "retrieval"):
        return import_module(module)
