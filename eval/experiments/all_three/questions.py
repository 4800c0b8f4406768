"""Questions over two documents of one corpus, and vectors by which these are found.

A question names what one document links to an alias, which another document defines (`fusion.task`). The first search
finds the link, the first generation spells the alias out, the second search finds the definition as well, and the last
generation answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragorder.document import Document
from ragorder.eval.experiments.fusion.task import ALIAS_OF, ALIASES, ASK, NAMES, Level, draw_corpora
from ragorder.pipelining.workflow import END, START, CompiledGraph, RAGraph

__all__ = ["HOPS", "TwoHopQuestions", "draw_two_hops", "two_hops"]

Vectors = NDArray[np.float32]

HOPS = 2
_DOCUMENTS = 40
_TOPIC_SIZE = 16
_TOPIC_WEIGHT = 0.3
_MOST_LINKS = 4
_FILLER_LENGTH = 0.05
# Of the others from all words: nearer to no question than any document.
_FAR = -1.0


def two_hops(top_k: int) -> CompiledGraph:
    """For a question that is a name."""
    graph = RAGraph("two_hops")
    graph.add_retrieval("link", query="query", topk=top_k, output="near")
    graph.add_generation(
        "alias", prompt=f"{ALIAS_OF} {{query}}", documents="near", output="alias", max_tokens=1, ignore_eos=True
    )
    graph.add_retrieval("definition", query="{query} {alias}", topk=top_k)
    graph.add_generation("answer", prompt=f"{ASK} {{query}}", documents="docs", max_tokens=1, ignore_eos=True)
    graph.add_edge(START, "link").add_edge("link", "alias").add_edge("alias", "definition")
    return graph.add_edge("definition", "answer").add_edge("answer", END).compile()


@dataclass(frozen=True, slots=True)
class TwoHopQuestions:
    """`names` and their `values`, by question. Texts are token numbers."""

    documents: list[Document]
    vectors: Vectors
    words: Vectors
    """Of each name and alias, those of the aliases first."""

    names: list[int]
    values: list[int]

    def embed(self, text: str) -> Vectors:
        """Of names and aliases; other words are left out."""
        numbers = [int(word) - ALIASES.start for word in text.split() if word.isdigit()]
        known = [number for number in numbers if 0 <= number < len(self.words)]
        return _normal(self.words[known].sum(0) if known else self.words.sum(0))

    def index(self, vectors: int, clusters: int, nprobe: int) -> Any:
        """By inner product: the documents, and random vectors behind them, which are never found."""
        import faiss

        draw, size = np.random.default_rng(0), self.vectors.shape[1]
        others = draw.standard_normal((max(0, vectors - len(self.vectors)), size), np.float32)
        others = _FILLER_LENGTH * _normal(others)
        others[:, : len(self.words)] += _FAR
        rows = np.concatenate([self.vectors, others])
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, clusters, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1
        index.train(rows[: 64 * clusters])
        index.add(rows)
        index.nprobe = min(nprobe, clusters)
        return index


def draw_two_hops(count: int, seed: int) -> TwoHopQuestions:
    """Popular names are asked for more often: the chance falls with the rank."""
    generator = torch.Generator().manual_seed(seed)
    corpora = draw_corpora(1, Level(HOPS, 2), generator, documents=_DOCUMENTS)
    chains, draw = corpora.chains, np.random.default_rng(seed)
    tokens = corpora.tokens[0].tolist()
    topics = _normal(draw.standard_normal((_DOCUMENTS, _TOPIC_SIZE), np.float32))
    first, size = ALIASES.start, NAMES.stop - ALIASES.start
    words = np.zeros((size, size + _TOPIC_SIZE), np.float32)
    words[:, :size] = np.eye(size, dtype=np.float32)
    spelled = np.zeros((_DOCUMENTS, size), np.float32)
    for number, document in enumerate(tokens):
        for token in document:
            if token in ALIASES or token in NAMES:
                spelled[number, token - first] = 1.0
                # A word is of the topic of the documents that it stands in.
                words[token - first, size:] += topics[number]
    vectors = _normal(np.concatenate([_normal(spelled), _TOPIC_WEIGHT * topics], 1))
    words[:, size:] = _normal(words[:, size:])
    of_link, of_definition = chains.documents[0, :, 0], chains.documents[0, :, 1]
    # A search for an alias that many documents have need not find the one that defines it.
    rare = (chains.aliases[0][:, None] == chains.aliases[0]).sum(1) <= _MOST_LINKS
    askable = ((of_link != of_definition) & rare).nonzero()[:, 0].tolist()
    chance = 1 / np.arange(1, len(askable) + 1)
    drawn = draw.permutation(askable)[draw.choice(len(askable), count, p=chance / chance.sum())]
    return TwoHopQuestions(
        [Document(f"d{number}", " ".join(map(str, document))) for number, document in enumerate(tokens)],
        vectors,
        _normal(words),
        chains.heads[0, drawn].tolist(),
        chains.values[0, drawn].tolist(),
    )


def _normal(rows: Vectors) -> Vectors:
    normal: Vectors = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-9)
    return normal
