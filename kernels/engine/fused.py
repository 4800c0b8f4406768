"""Start of fused requests: copies of documents, selection of critical tokens."""

from __future__ import annotations

from typing import Any

from ragorder.kernels.cache import Borrowed, KnowledgeCache
from ragorder.kernels.engine.request import Request
from ragorder.kernels.engine.scoring import Scorer
from ragorder.kernels.engine.selecting import KeptQuestions, TokenSelecting
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.fusion.assemble import Assembler, Rows
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.models.support import UnsupportedModelError, text_config

__all__ = ["Fuser", "check_fusion"]


def check_fusion(model: Any) -> None:
    """Raises UnsupportedModelError for a model with a sliding window."""
    config = text_config(model)
    types = getattr(config, "layer_types", None)
    if "sliding_attention" in types if types else getattr(config, "sliding_window", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) cannot be fused: it has layers with a sliding window; "
            "reuse='exact' serves it"
        )


class Fuser:
    def __init__(self, cache: KnowledgeCache, rotation: Rotation, scorer: Scorer, questions: KeptQuestions) -> None:
        self._cache = cache
        self._assembler = Assembler(cache.pool, rotation)
        self._scorer = scorer
        self._questions = questions

    def helpers(self, sequence: Sequence) -> list[Sequence]:
        """Return sequences that compute documents without KV after the first borrowed one, each after the system prompt
        alone. Computed among approximate KV they would serve this request only."""
        lease, path = sequence.lease, sequence.path
        assert lease is not None
        if not lease.borrowed:
            return []
        first = min(each.start for each in lease.borrowed)
        front = path[:1] if not path[0].content else ()
        prefix = sequence.tokens[: sum(segment.tokens for segment in front)]
        helpers, start = [], 0
        # A document with KV but no room for its copy is computed in place.
        for segment, kind in zip(path, self._cache.copy_kinds(path), strict=True):
            end = start + segment.tokens
            if start > first and kind is None:
                request = Request([*prefix, *sequence.tokens[start:end]])
                alone = (*front, segment._replace(key=segment.content))
                helpers.append(Sequence(-1, request, alone, None, frozenset(), owner=sequence))
            start = end
        return helpers

    def begin(self, sequence: Sequence, most_tokens: int) -> None:
        """Copy the borrowed documents and begin to select, in forwards of at most `most_tokens` tokens."""
        lease, fusion = sequence.lease, sequence.fusion
        assert lease is not None
        if fusion is None or not lease.borrowed:
            return
        own = sequence.standalone or frozenset()
        borrowed = lease.borrowed
        self._assembler.copy(list(map(_rows, borrowed)), lease.block_table)
        found = [_span(each) for each in borrowed if each.copy.node.key not in own]
        spans = list(map(_span, borrowed))
        sequence.reuse(spans, found, self._cache.give_back(lease, own))
        sequence.selecting = TokenSelecting(
            sequence, fusion, spans, self._scorer, self._cache, self._questions, most_tokens
        )
        self.advance(sequence)

    def advance(self, sequence: Sequence) -> None:
        if sequence.selecting is not None and not sequence.selecting.pending:
            sequence.choose(sequence.selecting.chosen, in_full=sequence.selecting.in_full)
            sequence.selecting = None


def _span(borrowed: Borrowed) -> tuple[int, int]:
    return borrowed.start, borrowed.start + borrowed.tokens


def _rows(borrowed: Borrowed) -> Rows:
    node = borrowed.copy.node
    return Rows(borrowed.copy.blocks, node.start, node.tokens, borrowed.start)
