"""Start of fused requests: documents computed elsewhere are copied, and critical tokens selected (FusionRAG 3.2)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from ragorder.kernels.cache import Borrowed, KnowledgeCache
from ragorder.kernels.engine.kept_questions import KeptQuestions
from ragorder.kernels.engine.recovery import fault_of
from ragorder.kernels.engine.request import Request
from ragorder.kernels.engine.scoring import Scene, Scorer
from ragorder.kernels.engine.sequence import Positions, Sequence
from ragorder.kernels.engine.support import UnsupportedModelError, text_config
from ragorder.kernels.fusion.assemble import Assembler, Rows
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.fusion.selection import Selection, make_selection

__all__ = ["CriticalTokens", "Fuser", "check_fusion"]

_logger = logging.getLogger("ragorder.kernels.engine")

_Spans = tuple[tuple[int, int], ...]


def check_fusion(model: Any) -> None:
    """Raises UnsupportedModelError for a model whose layers do not see all documents."""
    config = text_config(model)
    types = getattr(config, "layer_types", None)
    if "sliding_attention" in types if types else getattr(config, "sliding_window", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) cannot be fused: it has layers with a sliding window; "
            "reuse='exact' serves it"
        )


class Fuser:
    """Fills the blocks of requests whose leases have borrowed documents, before their first step."""

    def __init__(self, cache: KnowledgeCache, rotation: Rotation, critical: CriticalTokens) -> None:
        self._cache = cache
        self._assembler = Assembler(cache.pool, rotation)
        self._critical = critical

    def helpers(self, sequence: Sequence) -> list[Sequence]:
        """Sequences that compute the missing documents behind the first borrowed one, each behind the system prompt
        alone: among approximate KV they would be computed for this request only."""
        lease, path = sequence.lease, sequence.path
        assert lease is not None
        if not lease.borrowed:
            return []
        borrowed = {each.start for each in lease.borrowed}
        front = path[:1] if not path[0].content else ()
        prefix = sequence.tokens[: sum(segment.tokens for segment in front)]
        helpers, start = [], 0
        for segment in path:
            end = start + segment.tokens
            if start > min(borrowed) and start not in borrowed:
                request = Request([*prefix, *sequence.tokens[start:end]])
                alone = (*front, segment._replace(key=segment.content))
                helpers.append(Sequence(-1, request, alone, None, frozenset(), owner=sequence))
            start = end
        return helpers

    def begin(self, sequence: Sequence) -> None:
        lease = sequence.lease
        assert lease is not None
        if not lease.borrowed:
            return
        borrowed, own = lease.borrowed, sequence.standalone or frozenset()
        self._assembler.copy(list(map(_rows, borrowed)), lease.block_table)
        by_tier = self._cache.give_back(lease, own)
        anew = self._critical.choose(sequence, tuple(map(_span, borrowed)))
        found = [_span(each) for each in borrowed if each.copy.node.key not in own]
        recomputed = sum(np.searchsorted(anew, end) - np.searchsorted(anew, begin) for begin, end in found)
        sequence.fuse(map(_span, borrowed), anew, by_tier, int(recomputed))


class CriticalTokens:
    """The tokens taken over that a fused request computes anew, by its selection."""

    def __init__(self, scorer: Scorer, block_size: int, questions: KeptQuestions) -> None:
        self._scorer = scorer
        self._block_size = block_size
        self._questions = questions
        self._selections: dict[str, Selection] = {}

    def choose(self, sequence: Sequence, spans: _Spans) -> Positions:
        """Positions within the spans, ascending; all of them if the selection fails."""
        assert sequence.fusion is not None
        reused = np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in spans])
        name = sequence.fusion.select
        try:
            chosen = self._choose(self._selection(name), sequence, spans, torch.from_numpy(reused))
        except Exception as error:
            if fault_of(error) != "other":
                raise
            kind = type(error).__name__
            _logger.error("selection %s has failed (%s): the request is computed in full", name, kind)
            return reused
        # Whatever a policy returns: rows outside are others', or computed anyway.
        return np.intersect1d(reused, chosen.cpu().numpy())

    def _choose(self, selection: Selection, sequence: Sequence, spans: _Spans, reused: torch.Tensor) -> torch.Tensor:
        assert sequence.fusion is not None
        budget = round(sequence.fusion.recompute * len(reused))
        if selection.needs != "nothing" and not 0 < budget < len(reused):
            # There is nothing to measure.
            return reused[:budget]
        scene = Scene(
            sequence.tokens,
            sequence.table(self._block_size),
            sequence.request.prefix_tokens,
            sequence.computed,
            spans,
            (sequence.path_tokens, sequence.prompt_tokens),
            asked=self._questions.find(sequence) if selection.needs == "question" else None,
        )
        return selection.choose(self._scorer.measure(selection.needs, scene), budget)

    def _selection(self, name: str) -> Selection:
        if name not in self._selections:
            self._selections[name] = make_selection(name)
        return self._selections[name]


def _span(borrowed: Borrowed) -> tuple[int, int]:
    return borrowed.start, borrowed.start + borrowed.tokens


def _rows(borrowed: Borrowed) -> Rows:
    node = borrowed.copy.node
    return Rows(borrowed.copy.blocks, node.start, node.tokens, borrowed.start)
