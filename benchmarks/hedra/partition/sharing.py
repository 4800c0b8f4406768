"""HedraRAG section 4.2 as it reads: every search that has begun takes part in each piece."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search.running import RunningSearch

__all__ = ["EqualShares", "share_equally"]


def share_equally(
    searches: Sequence[RunningSearch], seconds: float, *, cores: int, code_s: float
) -> list[tuple[RunningSearch, int]]:
    """Of each search as many clusters as fit into its share of the piece, at least one."""
    codes = seconds * cores / code_s / max(1, len(searches))
    return [(search, search.end_of_piece(codes, whole=False)) for search in searches]


class EqualShares(ContinuousIVF):
    """With pieces of one length, however many wait."""

    def _next_piece(self) -> list[tuple[RunningSearch, int]]:
        search_s = self.costs.seconds(self._search_codes.value or 0.0)
        seconds = self.budget.limit(search_s, 0, self._cores).seconds
        return share_equally(self._running, seconds, cores=self._cores, code_s=self.costs.code_s)
