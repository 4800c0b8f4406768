"""Measurements by which transformations are applied."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ragorder.pipelining.load import EngineLoad
from ragorder.pipelining.running_mean import RunningMean
from ragorder.pipelining.speculation import SpeculationGain
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

if TYPE_CHECKING:
    from ragorder.pipelining.search.tiers import TierGains

__all__ = ["Facts"]

_MAX_EDGES = 1024


class Facts:
    """Learnt from all requests; a mean is None before the first value.

    - `load` of the engine; `wavefront`: its counts
    - seconds of a whole `search_s`, `embed_s`, `generation_s`
    - `settled`, `settled_near`: share of a search after which its result did not change, without and with earlier
      searches of its request
    - `cached_share` of the prompt tokens of generations that show documents
    - `search`: as given to the server; `embedding_ahead`: queries that are embedded ahead of need
    """

    def __init__(self, load: EngineLoad, wavefront: Wavefront, search: Any) -> None:
        self.load = load
        self.wavefront = wavefront
        self.search = search
        self.embedding_ahead = 0
        self.search_s = RunningMean(arithmetic_start=True)
        self.embed_s = RunningMean(arithmetic_start=True)
        self.generation_s = RunningMean(arithmetic_start=True)
        self.settled = RunningMean(arithmetic_start=True)
        self.settled_near = RunningMean(arithmetic_start=True)
        self.cached_share = RunningMean(arithmetic_start=True)
        self._odds: OrderedDict[Hashable, SpeculationGain] = OrderedDict()

    @property
    def cuts(self) -> bool:
        """Whether searches advance in pieces that others share."""
        return hasattr(self.search, "submit")

    @property
    def tier_gains(self) -> TierGains | None:
        """Of a search by the index's fast tier (None: it has none)."""
        gains: TierGains | None = getattr(self.search, "tier_gains", None)
        return gains

    @property
    def prefill_s(self) -> float | None:
        return self.load.prefill_s

    def odds(self, source: Piece) -> SpeculationGain:
        """Of speculations on what a node has so far, due or ahead of need."""
        origin = None if source.after is None else source.after.run.id
        edge = (source.request.graph.name, source.run.id, origin)
        odds = self._odds.get(edge)
        if odds is None:
            odds = self._odds[edge] = SpeculationGain()
            if len(self._odds) > _MAX_EDGES:
                self._odds.popitem(last=False)
        else:
            self._odds.move_to_end(edge)
        return odds

    @property
    def hint(self) -> float:
        """Share of a search that its request's earlier ones save it, as far as known."""
        if self.settled.value is None or self.settled_near.value is None:
            return 0.1
        return self.settled.value - self.settled_near.value
