"""Tiers of an orderer's engine."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from ragorder.settings import Settings
from ragorder.trie.residency import KnowsTiers, LRUResidency, Pool, TierLevel
from ragorder.trie.search import SEARCH_BUDGET, Price, PricedPaths
from ragorder.trie.tree import KnowledgeTree

if TYPE_CHECKING:
    from ragorder.trie.profile import PrefillProfile

_HISTORY_NODES = 65_536


class EngineTiers:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._profile: PrefillProfile | None = None
        if settings.profile is not None:
            from ragorder.trie.profile import PrefillProfile

            self._profile = PrefillProfile.from_file(settings.profile)
        self._several = settings.capacity_tokens is not None and bool(settings.host_tokens or settings.disk_tokens)
        if "tier_policy" in settings.model_fields_set:
            from ragorder.trie.policies import policies

            try:
                policies.check(settings.tier_policy)
            except ValueError as error:
                raise ValueError(f"tier_policy: {error}") from None

    @property
    def unpriced(self) -> bool:
        return self._several and self._profile is not None and not self._profile.loads

    def make_pool(self, max_nodes: int) -> Pool:
        settings = self._settings
        held_tokens = settings.held_tokens
        options = held_tokens, settings.block_size, max_nodes, settings.partial_blocks_first
        if not self._several or held_tokens is None:
            return Pool(*options)
        # Not imported for an engine with one tier.
        from ragorder.trie.mirror import MirroredTier, TieredPool, TierMirror
        from ragorder.trie.policies import History, Tier, make_policy
        from ragorder.trie.profile import LINEAR

        sizes = settings.capacity_tokens, settings.host_tokens, settings.disk_tokens
        tiers = [
            MirroredTier(place, tokens, Tier(make_policy(settings.tier_policy), History(_HISTORY_NODES)))
            for place, tokens in zip(TierLevel, sizes, strict=True)
            if tokens
        ]
        write_through = settings.tier_copies == "computed"
        mirror = TierMirror(tiers, write_through=write_through, profile=self._profile or LINEAR)
        return TieredPool(mirror, held_tokens, settings.block_size, max_nodes, settings.partial_blocks_first)

    def residency(self, name: Hashable, tree: KnowledgeTree, pool: Pool) -> LRUResidency:
        if self._several:
            from ragorder.trie.mirror import TieredPool, TieredResidency

            if isinstance(pool, TieredPool):
                return TieredResidency(tree, pool, name)
        return LRUResidency(tree, pool)

    def places(self, residency: LRUResidency) -> KnowsTiers | None:
        several = self._several or self._price is not None
        return residency if several and isinstance(residency, KnowsTiers) else None

    def priced(self, places: KnowsTiers | None) -> PricedPaths | None:
        if places is None or self._price is None or self._settings.search != "best":
            return None
        return PricedPaths(SEARCH_BUDGET, self._price, places.loads)

    @property
    def _price(self) -> Price | None:
        return self._profile.with_loads if self._profile is not None and self._profile.loads else None
