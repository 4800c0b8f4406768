"""Scope whose requests may be turns of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeVar

from ragorder._request import OrderRequest
from ragorder._scope import Scope
from ragorder.document import Estimate
from ragorder.ordering import Ordering
from ragorder.trie.histories import Behind, Histories, TurnEnd, find_below, held_tokens
from ragorder.trie.residency import Lease, TokenIds
from ragorder.trie.tail import Waiting
from ragorder.trie.tree import Node

__all__ = ["TurnScope"]

D = TypeVar("D")


class TurnScope(Scope):
    """A scope that also has documents behind histories.

    No other request shares what stands behind a history, so documents stay as ranked there, but for the best one
    and for those that are held in another order. Without a history they are ordered as always. `follows_histories`: the
    engine resumes a prompt anywhere, so that a history is reused as it grows.
    """

    follows_histories = True
    _histories: Histories | None = None

    def order_turn(
        self,
        request: OrderRequest[D],
        waiting: Waiting,
        behind: Behind,
        suffix_tokens: int | None,
    ) -> Ordering[D]:
        """`order` of a request in a conversation."""
        follows = self._follows
        if not follows and not behind.segments:
            return self.order(request, waiting, suffix_tokens)
        self.residency.refresh(None if behind.segments else request)
        if not behind.segments and request.fixed is None:
            self.tail.observe(request)
        permutation, guard_cost_tokens = self._arrange_turn(request, waiting, behind)
        suffix_tokens = self._suffix_tokens if suffix_tokens is None else suffix_tokens
        tokens, lengths = self._tokens(request), self._lengths_of(request, behind)
        if follows:
            path, turn = self.histories.insert(behind, lengths, request.keys, tokens, permutation)
            end = path[turn.documents].end
            # It has the question's tokens, which have a node.
            asked = 0 if behind.question is None else path[-1].end - path[-2].end
            suffix_tokens = max(0, suffix_tokens - asked)
        else:
            # Nothing of it is found again.
            path, turn = [self.tree.root], None
            end = path[0].end + sum(lengths[: len(behind.segments)]) + sum(tokens)
            suffix_tokens += end - path[0].end
        # The tokens of a history are not known one by one: what stands behind it is followed by the mirror.
        token_ids = [request.token_ids[rank] for rank in permutation] if request.token_ids and path[1:] else ()
        lease = self._lease_turn(path, turn, suffix_tokens, () if behind.segments else token_ids)
        if not behind.segments:
            self._measure(request, tokens, lease)
        held = max(0, min(lease.cached_documents, turn.documents) - turn.history) if turn is not None else 0
        documents = [request.documents[rank] for rank in permutation]
        ordering = Ordering(
            documents,
            permutation,
            held,
            self._reusable(lease.cached_tokens, path, behind),
            guard_cost_tokens,
            self.finish,
            lease,
            end,
            None if behind.segments else self.tail,
            () if behind.segments else request.keys,
        )
        self._place(path, lease, ordering)
        return ordering

    def _lease_turn(
        self,
        path: Sequence[Node],
        turn: TurnEnd | None,
        suffix_tokens: int,
        token_ids: Sequence[TokenIds],
    ) -> Lease:
        lease = self.residency.lease(path, suffix_tokens, token_ids)
        lease.turn = turn
        return lease

    def preview_turn(self, request: OrderRequest[D], waiting: Waiting, behind: Behind) -> list[int]:
        self.residency.refresh(None if behind.segments else request)
        with nullcontext() if behind.segments else self.tail.observing(request):
            return self._arrange_turn(request, waiting, behind)[0]

    def predict_turn(self, request: OrderRequest[D], behind: Behind) -> tuple[int, int]:
        """`predict_cached_tokens` of a request in a conversation: (cached tokens, tokens up to the end of the question,
        or without one of the documents)."""
        permutation = self.preview_turn(request, (), behind)
        path = [self.tree.root]
        if self._follows:
            path = self.histories.known_path(behind, [request.keys[rank] for rank in permutation])
        end = self.tree.root.end + sum(self._tokens(request)) + sum(self._lengths_of(request, behind))
        return self._reusable(held_tokens(self.tree, path), path, behind), end

    def has_lost(self, behind: Behind) -> bool:
        """`Orderer.has_lost`."""
        self.residency.refresh()
        return self._follows and self.histories.has_lost(behind)

    @property
    def histories(self) -> Histories:
        if self._histories is None:
            self._histories = Histories(self.tree, self._owner.segments)
        return self._histories

    @property
    def _follows(self) -> bool:
        # What is taken over is no exact prefix, and what stands behind it neither.
        return self.follows_histories and self.fused is None

    def _arrange_turn(self, request: OrderRequest[D], waiting: Waiting, behind: Behind) -> tuple[list[int], int]:
        if not behind.segments or request.fixed is not None:
            return self._arrange(request, waiting)
        guards = self._guards.for_request(len(request.keys), request.groups) if self._guards is not None else None
        prefix: list[int] = []
        if self._follows and (end := self.histories.end(behind)) is not None:
            permits = None if guards is None else guards.permits
            prefix = find_below(self.tree, end, request.ranks, self._search_budget, permits)
        placed = set(prefix)
        first, rest, last = self.best.split(prefix, [rank for rank in range(len(request.keys)) if rank not in placed])
        arranged = prefix + first + rest + last
        return arranged if guards is None else guards.complete(prefix, arranged), 0

    def _reusable(self, held_tokens: int, path: Sequence[Node], behind: Behind) -> int:
        """Engines compute the last token of a prompt, with the block that it is in."""
        if behind.question is None:
            return held_tokens
        size = self.tree.block_size
        return min(held_tokens, max(0, path[-1].end - 1) // size * size)

    def _lengths_of(self, request: OrderRequest[D], behind: Behind) -> Sequence[int]:
        """Of the segments of a history, of a question, and of those that follow it."""
        asked = [] if behind.question is None else [behind.question]
        lengths = [segment.tokens for segment in (*behind.segments, *asked, *behind.following)]
        return self._lengths.scale(lengths) if request.estimated or Estimate in map(type, lengths) else lengths
