"""The embedded engine's fused requests without a model: what it holds, takes over and computes, in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from ragorder.trie.policies import History, Tier, make_policy
from ragorder.trie.profile import LINEAR

__all__ = ["FusedPrefill", "SimulatedFusion"]

_HISTORY_NODES = 65_536

Path = tuple[int, ...]
"""A document behind others."""


@dataclass(frozen=True, slots=True)
class FusedPrefill:
    """Tokens of documents in an exact prefix, and taken over; tokens computed, the question's among them."""

    exact: int
    fused: int
    computed: float


class SimulatedFusion:
    """One tier with room for `device_tokens` (None: unlimited), whose leaves PGDSF evicts.

    As on the engine: behind the longest cached path come documents that are computed in place, exactly, and stay; from
    the first one on that is taken over, all are copied. A document without KV among these is computed by itself, which
    stays, too. Of what is copied the share `recompute` is recomputed. With `copied` all documents have a copy that
    takes no room; else those that stand on a path. One that does not fuse computes all behind the longest cached path.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        device_tokens: int | None,
        *,
        recompute: float,
        copied: bool,
        fuses: bool = True,
        policy: str = "pgdsf",
    ) -> None:
        self._tokens = tokens
        self._room = device_tokens
        self._recompute = recompute
        self._copied = copied
        self._fuses = fuses
        self._tier = Tier(make_policy(policy), History(_HISTORY_NODES))
        # The paths that end with a document, oldest first.
        self._ending: dict[int, dict[Path, None]] = {}

    @property
    def held_tokens(self) -> int:
        """Of KV, each copy of a document."""
        return self._tier.used

    def serve(self, documents: Sequence[int], exact_documents: int, question_tokens: int) -> FusedPrefill:
        """`exact_documents`: leading ones that are not taken over."""
        tokens = self._tokens
        paths = [tuple(documents[:end]) for end in range(1, len(documents) + 1)]
        cached = next((place for place, path in enumerate(paths) if path not in self._tier), len(paths))
        taken = [
            place
            for place in range(max(cached, exact_documents), len(documents))
            if self._fuses and (self._copied or self._ending.get(documents[place]))
        ]
        first = taken[0] if taken else len(documents)
        sources = [] if self._copied else [next(iter(self._ending[documents[place]])) for place in taken]
        alone = [(documents[place],) for place in range(first, len(documents)) if place not in taken]
        in_use = {*paths[:cached], *sources}
        # Documents computed by themselves come first, and are copied like the others.
        self._insert(alone, in_use)
        in_use.update(alone)
        new = sum(tokens[document] for document in documents[cached:first])
        copied = sum(tokens[document] for document in documents[first:])
        by_themselves = sum(tokens[document] for (document,) in alone)
        self._make_room(new + copied + question_tokens, in_use)
        self._insert(paths[cached:first], in_use)
        prompt = sum(tokens[document] for document in documents)
        computed = new + by_themselves + self._recompute * copied + question_tokens
        self._tier.use(paths[:first], cost=LINEAR.cost(prompt - new, new), computed=frozenset(paths[cached:first]))
        self._tier.use([*sources, *alone], cost=LINEAR.cost(0, prompt), computed=frozenset(alone))
        return FusedPrefill(prompt - new - copied, copied - by_themselves, computed)

    def _insert(self, paths: Iterable[Path], in_use: set[Path]) -> None:
        """As far as there is room."""
        for path in paths:
            size = self._tokens[path[-1]]
            behind = path[:-1] or None
            if path in self._tier or (behind is not None and behind not in self._tier):
                continue
            if self._make_room(size, in_use | {path[:-1]}):
                self._tier.insert(path, size, behind)
                self._ending.setdefault(path[-1], {})[path] = None

    def _make_room(self, tokens: int, in_use: set[Path]) -> bool:
        """Whether so many are free then."""
        if self._room is None:
            return True
        missing = self._tier.used + tokens - self._room
        evicted = self._tier.evict(missing, in_use) if missing > 0 else []
        for path in cast("list[Path]", evicted or []):
            ending = self._ending[path[-1]]
            del ending[path]
            if not ending:
                del self._ending[path[-1]]
        return evicted is not None
