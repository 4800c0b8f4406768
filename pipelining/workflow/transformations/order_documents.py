"""Documents in the order of the engine's cache (not in HedraRAG)."""

from __future__ import annotations

import math

from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.nodes import Generation
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

__all__ = ["OrderDocuments"]

_COST_S = 2e-4
# What is not ordered is not found, and the first requests find nothing: a low share says little.
_LEAST_SHARE = 0.1


class OrderDocuments:
    """Asks the request builder to order documents for the engine's prefix cache. Without it they stay in the order of
    their rank."""

    name = "order_documents"

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None:
        for piece in wavefront.starting:
            if piece.worker == "engine" and self.gain_s(piece, facts) > 0:
                piece.ordered = True
                piece.trace.applied.append(self.name)

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        """The share of its prompt that an ordered generation finds cached lately, as part of a prefill."""
        if not isinstance(piece.node, Generation) or not piece.node.documents:
            return 0.0
        share, prefill_s = facts.cached_share.value, facts.prefill_s
        if share is None or prefill_s is None:
            return math.inf
        return max(share, _LEAST_SHARE) * prefill_s - _COST_S
