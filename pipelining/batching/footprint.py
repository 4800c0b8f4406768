"""Footprint of a placement: the bytes that lie in each place (RAGDoll Eq. 2 and 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ragorder.pipelining.batching.budgets import Budgets
from ragorder.pipelining.placement import IndexSizes, ModelSizes, Placement, Spread

__all__ = ["Footprint"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by place under any placement of this model and index.

    Beside Eq. 2 and 3: weights outside the layers, the buffers that layers and partitions pass through, and what of the
    index is no partition. Layers count as the largest one, whose buffers they are in. Layers and partitions that are on
    the disk alone take nothing of its budget: they are read from the files of model and index.
    """

    model: ModelSizes
    index: IndexSizes

    def parts(self, placement: Placement) -> Iterator[tuple[str, Spread]]:
        """Each part by name; those without a byte included."""
        model, index, slot = self.model, self.index, self.model.slot
        yield "weights outside the layers", Spread(device=model.outside)
        yield "layers", Spread(placement.weights.device * slot, placement.weights.host * slot)
        yield (
            "layers that pass through",
            Spread(placement.slots * slot, model.staging if placement.streamed else 0),
        )
        yield "KV", placement.kv
        yield "workspace of a step", Spread(device=model.workspace(placement.step_tokens))
        yield "index without partitions", Spread(host=index.fixed)
        yield "partitions", Spread(host=index.resident(placement.partitions))
        yield "partitions that pass through", Spread(host=index.reading(placement.partitions))

    def total(self, placement: Placement) -> Spread:
        spreads = [spread for _, spread in self.parts(placement)]
        return Spread(
            sum(each.device for each in spreads), sum(each.host for each in spreads), sum(each.disk for each in spreads)
        )

    def device(self, placement: Placement) -> int:
        """Eq. 2."""
        return self.total(placement).device

    def host(self, placement: Placement) -> int:
        """Eq. 3."""
        return self.total(placement).host

    def disk(self, placement: Placement) -> int:
        return self.total(placement).disk

    def fits(self, placement: Placement, budgets: Budgets) -> bool:
        used = self.total(placement)
        host = used.host + (used.device if budgets.unified else 0)
        return used.device <= budgets.device_bytes and host <= budgets.host_bytes and used.disk <= budgets.disk_bytes
