"""Residency in a cache that resumes a prefix only at marks, or at intervals, and forgets it after a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from ragorder.trie.mark_choice import MarkChoice
from ragorder.trie.marked_tree import MarkedTree
from ragorder.trie.residency.base import Lease, RequestedDocuments, TokenIds
from ragorder.trie.residency.feedback import FeedbackResidency
from ragorder.trie.residency.lengths import ScopeLengths
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.residency.pool import Pool, UseEntry
from ragorder.trie.tree import Node

__all__ = ["CacheReport", "MarkPlan", "MarkedFeedback", "MarksResidency", "RequestTokens"]

_ESTIMATES_EXCEED = 4 / 3
# Providers wrap each part of a prompt in tokens of their own.
_TOLERANCE_TOKENS = 64
_TOLERANCE = 0.02


class CacheReport(NamedTuple):
    """What a provider reports of a request; None: not reported."""

    cached_tokens: float | None = None
    written_tokens: float | None = None
    prompt_tokens: float | None = None


class RequestTokens(NamedTuple):
    """Of `prompt` tokens, those read from the cache and those written into it."""

    prompt: float
    cached: float
    written: float


class MarkPlan:
    """The marks of a request in flight.

    `breakpoints`: documents in front of each mark to set. `depths`: all that live afterwards. Predicted are
    `cached_tokens`, `written_tokens` behind them, and `prompt_tokens`, of which the answer's expected tokens are none.
    """

    __slots__ = (
        "breakpoints",
        "cached_tokens",
        "depths",
        "prompt_tokens",
        "readable",
        "report",
        "started_s",
        "written_tokens",
    )

    def __init__(
        self,
        breakpoints: tuple[int, ...],
        depths: Sequence[int],
        cached_tokens: int,
        written_tokens: int,
        prompt_tokens: int,
        started_s: float,
    ) -> None:
        self.breakpoints = breakpoints
        self.depths = depths
        self.cached_tokens = cached_tokens
        self.written_tokens = written_tokens
        self.prompt_tokens = prompt_tokens
        self.started_s = started_s
        self.readable = False
        self.report = CacheReport()

    @property
    def tokens(self) -> RequestTokens:
        """As reported, else as predicted."""
        cached, written, prompt = self.report
        prompt = float(self.prompt_tokens) if prompt is None else prompt
        if cached is None:
            cached = min(float(self.cached_tokens), prompt)
        if written is None:
            # It writes up to the same mark, wherever it resumed.
            written = float(self.cached_tokens + self.written_tokens) - cached if self.breakpoints else 0.0
        return RequestTokens(prompt, cached, max(0.0, min(written, prompt - cached)))

    @property
    def predicted(self) -> RequestTokens:
        return RequestTokens(self.prompt_tokens, self.cached_tokens, self.written_tokens)


class MarksResidency(LRUResidency):
    """The nodes of one scope's tree that lead to an entry of the provider's cache.

        residency = MarksResidency(MarkedTree(600, rules), Pool(None, 1), choice, clock=time.monotonic)

    A request's marks live from its first token (`publish`) on, for a time that begins with the request and that later
    requests on them renew. Nodes leave the tree with the last mark below them. `choice` says which marks a request
    sets; `clock()` is in seconds.
    """

    def __init__(self, tree: MarkedTree, pool: Pool, choice: MarkChoice, clock: Callable[[], float]) -> None:
        super().__init__(tree, pool)
        self.marked = tree
        self.rules = tree.rules
        self.choice = choice
        self.plans: dict[Lease, MarkPlan] = {}
        self._clock = clock
        self._remove = self._evict = self._leave

    def copy(self) -> MarksResidency:
        """An independent residency at the time of the last `refresh`."""
        tree, copies = self.marked.copy()
        now = tree.now
        mirror = MarksResidency(tree, self.pool, self.choice.copy(), lambda: now)
        mirror.used_blocks = self.used_blocks
        mirror.pool = self.pool.copy(self, mirror, copies)
        return mirror

    def close(self) -> None:
        super().close()
        self.choice.close(self.marked.now)
        self.plans.clear()

    def refresh(self, requested: RequestedDocuments | None = None) -> None:
        tree = self.marked
        now = tree.now = self._clock()
        marks = tree.marks
        while marks:
            node, until = next(iter(marks.items()))
            if until > now:
                break
            del marks[node]
            self._prune(node)
        self.pool.count(self)

    def lease(
        self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = (), answer_tokens: int = 0
    ) -> Lease:
        tree, rules = self.marked, self.rules
        depth, cached_tokens = -1, 0
        live = []
        for place, node in enumerate(path):
            if found := tree.resumable(node):
                depth, cached_tokens = place, found
                live.append(place)
        prompt_tokens = path[-1].end + max(0, suffix_tokens - answer_tokens)
        breakpoints: tuple[int, ...] = ()
        written_tokens = 0
        if rules.resume == "interval":
            depths: Sequence[int] = range(len(path))
        else:
            keys, ends = [node.key for node in path[1:]], [node.end for node in path]
            depths = breakpoints = self.choice.choose(keys, ends, depth, live, prompt_tokens, tree.now)
            written_tokens = max(0, ends[breakpoints[-1]] - cached_tokens) if breakpoints else 0
        plan = MarkPlan(breakpoints, depths, cached_tokens, written_tokens, prompt_tokens, tree.now)
        self.choice.budget.add(prompt_tokens, rules.cost(*plan.predicted))
        lease = super().lease(path, suffix_tokens, token_ids, answer_tokens)
        lease.cached_documents, lease.cached_tokens = max(0, depth), cached_tokens
        if lease.open:
            self.plans[lease] = plan
            for place in depths:
                tree.pending[path[place]] = tree.pending.get(path[place], 0) + 1
            if rules.readable == "start":
                self.publish(lease)
        return lease

    def forgo(self, lease: Lease) -> None:
        """The request sets no marks, and so finds none."""
        plan = self.plans.pop(lease, None)
        if plan is not None:
            self._pend_no_more(lease, plan)
            self.choice.budget.correct(-self._surcharge(plan.predicted))
            lease.cached_documents = lease.cached_tokens = 0

    def publish(self, lease: Lease) -> None:
        """The request's first token is there: what it writes can be read."""
        plan = self.plans.get(lease)
        if plan is None or not lease.open:
            return
        self._pend_no_more(lease, plan)
        plan.readable = True
        tree, until = self.marked, plan.started_s + self.rules.ttl_s
        written_end = self._written_end(plan)
        for place in plan.depths:
            node = lease.path[place]
            known = tree.marks.get(node, 0.0)
            if node.end > written_end:
                # It was thought to be written, and was not.
                if known == until:
                    del tree.marks[node]
            elif until > known:
                tree.marks[node] = until
                tree.marks.move_to_end(node)

    def find(self, lease: Lease, cached_tokens: float, *, estimated: bool) -> None:
        """The provider has found so many tokens of a request's prompt: entries that it should have found are gone."""
        likely = cached_tokens * (_ESTIMATES_EXCEED if estimated else 1)
        if likely >= lease.cached_tokens * (1 - _TOLERANCE) - _TOLERANCE_TOKENS:
            return
        marks = self.marked.marks
        for node in lease.path[: lease.cached_documents + 1]:
            if node.end * (1 - _TOLERANCE) - _TOLERANCE_TOKENS > likely or not cached_tokens:
                marks.pop(node, None)

    def release(
        self,
        lease: Lease,
        cached_tokens: float | None = None,
        total_tokens: float | None = None,
        prompt_tokens: float | None = None,
    ) -> None:
        if not lease.open:
            return
        plan, path = self.plans.get(lease), lease.path
        if plan is not None:
            excess = self._surcharge(plan.tokens) - self._surcharge(plan.predicted)
            self.choice.budget.correct(excess)
            self.publish(lease)
            del self.plans[lease]
        super().release(lease)
        self._prune(path[-1])
        self.pool.count(self)

    def cancel(self, lease: Lease) -> None:
        """A request that fails behind its first token has written all the same."""
        if not lease.open:
            return
        plan = self.plans.get(lease)
        if plan is not None and plan.readable:
            self.release(lease)
            return
        if plan is not None:
            self._pend_no_more(lease, plan)
            del self.plans[lease]
            self.choice.budget.correct(-self._surcharge(plan.predicted))
        lease.open = False
        stamp = next(self.pool.clock)
        self.used_blocks -= lease.suffix_blocks + lease.partial_blocks
        path = lease.path
        for node in path:
            node.leases -= 1
            node.stamp = stamp
        self._prune(path[-1])
        self.pool.append(UseEntry(self, path[-1], stamp, 0))
        self.pool.count(self)
        lease.path = ()

    def holds(self, node: Node) -> bool:
        """True also for a node too short to be kept, and for one that a request in flight will mark."""
        tree = self.marked
        return node.end < max(1, self.rules.minimum_tokens) or node in tree.pending or bool(tree.resumable(node))

    def _surcharge(self, tokens: RequestTokens) -> float:
        return self.rules.cost(*tokens) - tokens.prompt

    def _written_end(self, plan: MarkPlan) -> float:
        """The end of what is cached once the request is served; nothing is known without a report."""
        cached, written, _ = plan.report
        if cached is None or written is None or self.rules.resume == "interval":
            return inf
        return _ESTIMATES_EXCEED * (cached + written) + _TOLERANCE_TOKENS if cached + written else 0.0

    def _pend_no_more(self, lease: Lease, plan: MarkPlan) -> None:
        if plan.readable:
            return
        pending = self.marked.pending
        for place in plan.depths:
            node = lease.path[place]
            if pending.get(node, 0) > 1:
                pending[node] -= 1
            else:
                pending.pop(node, None)

    def _prune(self, node: Node) -> None:
        """Nodes that lead to no mark leave the tree."""
        marks = self.marked.marks
        while node.parent is not None and node.stamp and not (node.children or node.leases or node in marks):
            parent = node.parent
            self._mark_missing(node, node.blocks - node.missing)
            node = parent

    def _leave(self, node: Node) -> None:
        self.marked.marks.pop(node, None)
        self.tree.remove(node)
        node.stamp = 0


class MarkedFeedback(FeedbackResidency):
    """`MarksResidency` corrected by reported tokens: an entry that is not found says nothing about others but those
    behind it."""

    mirror: MarksResidency

    def __init__(self, mirror: MarksResidency, lengths: ScopeLengths | None = None) -> None:
        super().__init__(mirror, lengths)

    def _learn(self, lease: Lease, cached_tokens: float) -> None:
        self.mirror.find(lease, cached_tokens, estimated=self.lengths.estimated)
