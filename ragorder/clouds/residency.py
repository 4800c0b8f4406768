"""Residency in a cache that resumes at breakpoints or intervals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

from ragorder.clouds.marks import MarkChoice
from ragorder.clouds.tree import MarkedTree
from ragorder.trie.histories import TurnEnd
from ragorder.trie.residency.base import Lease, Reported
from ragorder.trie.residency.feedback import FeedbackResidency
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.residency.pool import Pool
from ragorder.trie.tree import Node, RequestedDocuments, TokenIds


class CacheReport(NamedTuple):
    """A provider's report; None: not reported."""

    cached_tokens: float | None = None
    written_tokens: float | None = None
    prompt_tokens: float | None = None


class RequestTokens(NamedTuple):
    prompt: float
    cached: float
    written: float


@dataclass(slots=True, eq=False, repr=False)
class MarkPlan:
    """The breakpoints of a request in flight.

    `breakpoints`: nodes of its path, or documents of a plain request, before each. The request resumes at the last of
    `live` with a breakpoint there or less than `lookback_parts` after it. `depths`: entries made or renewed. `states`:
    places, in tokens, of a hybrid model's state.
    """

    breakpoints: Sequence[int]
    live: Sequence[int]
    ends: Sequence[int]
    lookback_parts: int
    prompt_tokens: int
    started_s: float
    readable: bool = False
    report: CacheReport = field(default_factory=CacheReport)
    states: Sequence[int] = ()
    resumed: int = -1
    cached_tokens: int = 0
    written_tokens: int = 0
    depths: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.set(self.breakpoints)

    def set(self, breakpoints: Sequence[int]) -> None:
        self.breakpoints = tuple(breakpoints)
        within = self.lookback_parts
        found = (place for place in self.live if any(place <= mark < place + within for mark in self.breakpoints))
        self.resumed = max(found, default=-1)
        self.cached_tokens = self.ends[self.resumed] if self.resumed >= 0 else 0
        self.depths = sorted({*self.breakpoints, self.resumed} - {-1})
        self.written_tokens = 0
        if self.breakpoints:
            self.written_tokens = max(0, self.ends[self.breakpoints[-1]] - self.cached_tokens)

    def keep(self, breakpoints: Collection[int]) -> None:
        self.set([mark for mark in self.breakpoints if mark in breakpoints])

    @property
    def tokens(self) -> RequestTokens:
        cached, written, prompt = self.report
        prompt = float(self.prompt_tokens) if prompt is None else prompt
        if cached is None:
            cached = min(float(self.cached_tokens), prompt)
        # A reported prompt shorter than its cached tokens was counted without them.
        prompt = max(prompt, cached)
        if written is None:
            # It writes up to the same breakpoint, independent of where it resumed.
            written = float(self.cached_tokens + self.written_tokens) - cached if self.breakpoints else 0.0
        return RequestTokens(prompt, cached, max(0.0, min(written, prompt - cached)))

    @property
    def predicted(self) -> RequestTokens:
        return RequestTokens(self.prompt_tokens, self.cached_tokens, self.written_tokens)


# Lengths may be estimates.
_ESTIMATES_EXCEED = 4 / 3
# Providers add tokens around each part of a prompt.
_TOLERANCE_TOKENS = 64
_TOLERANCE = 0.02
_LIKE = 0.3


class MarksResidency(LRUResidency):
    """Nodes of one scope's tree that lead to an entry of the cache.

    Entries can be read from their request's first token (`publish`) on. Nodes leave the tree with the last entry below
    them. Backward steps of the clock count as no time.
    """

    def __init__(self, tree: MarkedTree, pool: Pool, choice: MarkChoice, clock: Callable[[], float]) -> None:
        super().__init__(tree, pool)
        self.marked = tree
        self.rules = tree.rules
        self.choice = choice
        self.plans: dict[Lease, MarkPlan] = {}
        self._clock = clock
        self._offset_s = 0.0

    def copy(self) -> MarksResidency:
        tree, copies = self.marked.copy()
        now = tree.now
        mirror = type(self)(tree, self.pool, self.choice.copy(), lambda: now)
        mirror.used_blocks = self.used_blocks
        mirror.pool = self.pool.copy(self, mirror, copies)
        return mirror

    def close(self) -> None:
        super().close()
        self.choice.close(self.marked.now)
        self.plans.clear()

    def refresh(self, requested: RequestedDocuments | None = None) -> None:
        tree = self.marked
        now = tree.now = self._read_clock()
        marks = tree.marks
        while marks:
            node, until = next(iter(marks.items()))
            if until > now:
                break
            del marks[node]
            self._prune(node)
        self.pool.count(self)

    def lease(
        self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = (), turn: TurnEnd | None = None
    ) -> Lease:
        prompt_tokens = path[-1].end + suffix_tokens
        plan = self._plan(path, prompt_tokens, turn)
        self.choice.budget.add(prompt_tokens, self.rules.cost(*plan.predicted))
        lease = super().lease(path, suffix_tokens)
        lease.cached_documents, lease.cached_tokens, lease.turn = max(0, plan.resumed), plan.cached_tokens, turn
        if lease.open:
            self.plans[lease] = plan
            self._pend(lease, plan, 1)
            if self.rules.readable == "start":
                self.publish(lease)
        return lease

    def keep_marks(self, lease: Lease, breakpoints: Collection[int]) -> None:
        plan = self.plans.get(lease)
        if plan is None or plan.readable or self.rules.resume != "marks":
            return
        self._pend(lease, plan, -1)
        excess = -self._surcharge(plan.predicted)
        plan.keep(breakpoints)
        self.choice.budget.correct(excess + self._surcharge(plan.predicted))
        self._pend(lease, plan, 1)
        lease.cached_documents, lease.cached_tokens = max(0, plan.resumed), plan.cached_tokens

    def publish(self, lease: Lease) -> None:
        plan = self.plans.get(lease)
        if plan is None or not lease.open:
            return
        if not plan.readable:
            self._pend(lease, plan, -1)
        plan.readable = True
        tree, until = self.marked, plan.started_s + self.rules.ttl_s
        written_end = self._written_end(plan)
        for place in plan.depths:
            node = lease.path[place]
            known = tree.marks.get(node, 0.0)
            if node.end > written_end:
                # The entry was predicted, but not written.
                if known == until:
                    del tree.marks[node]
            elif until > known:
                tree.marks[node] = until
                tree.marks.move_to_end(node)

    def find(self, lease: Lease, cached_tokens: float, *, estimated: bool) -> None:
        likely = cached_tokens * (_ESTIMATES_EXCEED if estimated else 1)
        if likely >= lease.cached_tokens * (1 - _TOLERANCE) - _TOLERANCE_TOKENS:
            return
        marks = self.marked.marks
        for node in lease.path[: lease.cached_documents + 1]:
            if node.end * (1 - _TOLERANCE) - _TOLERANCE_TOKENS > likely or not cached_tokens:
                marks.pop(node, None)

    def release(self, lease: Lease, *reported: Reported, **named: Reported) -> None:
        if not lease.open:
            return
        plan, path = self.plans.get(lease), lease.path
        if plan is not None:
            excess = self._surcharge(plan.tokens) - self._surcharge(plan.predicted)
            self.choice.budget.correct(excess)
            self.publish(lease)
            del self.plans[lease]
        if lease.turn is not None:
            # No entry contains an answer before a later request has a breakpoint after it.
            lease.turn.answer = ""
        super().release(lease)
        self._prune(path[-1])
        self.pool.count(self)

    def cancel(self, lease: Lease) -> None:
        """End a failed request. If it failed after its first token, its entries are written."""
        if not lease.open:
            return
        plan = self.plans.get(lease)
        if plan is not None and plan.readable:
            self.release(lease)
            return
        if plan is not None:
            self._pend(lease, plan, -1)
            del self.plans[lease]
            self.choice.budget.correct(-self._surcharge(plan.predicted))
        super().cancel(lease)

    def _withdraw(self, path: Sequence[Node]) -> Node:
        self._prune(path[-1])
        return path[-1]

    def holds(self, node: Node) -> bool:
        tree = self.marked
        return node.end < max(1, self.rules.minimum_tokens) or node in tree.pending or bool(tree.resumable(node))

    def _plan(self, path: Sequence[Node], prompt_tokens: int, turn: TurnEnd | None) -> MarkPlan:
        tree, rules, now = self.marked, self.rules, self.marked.now
        found = [(place, tokens) for place, node in enumerate(path) if (tokens := tree.resumable(node))]
        held, cached_tokens = found[-1] if found else (-1, 0)
        if rules.resume != "marks":
            # Without breakpoints a request leaves entries at all nodes.
            plan = MarkPlan((), (), (), 1, prompt_tokens, now)
            plan.cached_tokens, plan.resumed, plan.depths = cached_tokens, held, range(len(path))
            return plan
        keys, ends, live = [node.key for node in path[1:]], [node.end for node in path], [place for place, _ in found]
        if turn is None:
            marks = self.choice.choose(keys, ends, held, live, prompt_tokens, now)
            return MarkPlan(marks, live, ends, rules.lookback_parts, prompt_tokens, now)
        place = turn.history_nodes, turn.documents
        marks = self.choice.choose_turn(keys, ends, *place, held, live, prompt_tokens, now)
        return MarkPlan(marks, live, ends, 1, prompt_tokens, now)

    def _read_clock(self) -> float:
        now, last = self._clock() + self._offset_s, self.marked.now
        if not isfinite(now):
            return last
        if now < last:
            self._offset_s += last - now
        return max(now, last)

    def _surcharge(self, tokens: RequestTokens) -> float:
        return self.rules.cost(*tokens) - tokens.prompt

    def _written_end(self, plan: MarkPlan) -> float:
        cached, written, _ = plan.report
        if cached is None or written is None or self.rules.resume != "marks":
            return inf
        return _ESTIMATES_EXCEED * (cached + written) + _TOLERANCE_TOKENS if cached + written else 0.0

    def _pend(self, lease: Lease, plan: MarkPlan, change: int) -> None:
        pending = self.marked.pending
        for place in plan.depths:
            node = lease.path[place]
            if number := max(0, pending.get(node, 0) + change):
                pending[node] = number
            else:
                pending.pop(node, None)

    def _prune(self, node: Node) -> None:
        marks = self.marked.marks
        while node.parent is not None and node.stamp and not (node.children or node.leases or node in marks):
            parent = node.parent
            self._mark_missing(node, node.blocks - node.missing)
            node = parent

    def _remove(self, node: Node) -> None:
        self.marked.marks.pop(node, None)
        self.tree.remove(node)


class MarkedFeedback(FeedbackResidency):
    mirror: MarksResidency

    def _learn(self, lease: Lease, cached_tokens: float) -> None:
        predicted, history = lease.cached_tokens, lease.turn.history_nodes if lease.turn is not None else 0
        # A very different count means that another entry was found.
        if not history and abs(cached_tokens - predicted) < _LIKE * predicted:
            start = self.tree.root.end
            held = lease.path[lease.cached_documents].end - start
            self.lengths.learn_hit(start, held, cached_tokens, self.tree.block_size)
        self.mirror.find(lease, cached_tokens, estimated=self.lengths.estimated)


class JunctionsResidency(MarksResidency):
    """Nodes of prompts that a hybrid model has computed, and places where it kept its state.

    Such an engine (vLLM's "align") keeps the KV of whole prompts, but the state only at the last multiple of
    `interval_tokens` in a prompt, and in its prefix shared with earlier prompts. So the third request is the first to
    find a shared prefix.
    """

    def _plan(self, path: Sequence[Node], prompt_tokens: int, turn: TurnEnd | None) -> MarkPlan:
        plan = super()._plan(path, prompt_tokens, turn)
        tree, size = self.marked, self.rules.interval_tokens
        shared = 0
        for node in path:
            if not tree.has_entry(node) or node.missing:
                break
            shared = node.end
        # Engines always compute the last token of a prompt.
        ends = min(shared, prompt_tokens - 1) // size * size, (prompt_tokens - 1) // size * size
        plan.states = tuple(end for end in ends if end >= max(1, plan.cached_tokens))
        return plan

    def publish(self, lease: Lease) -> None:
        plan = self.plans.get(lease)
        super().publish(lease)
        if plan is None or not lease.open:
            return
        states = self.marked.states
        for end in plan.states:
            node = next((each for each in lease.path if each.end >= end), None)
            if node is not None:
                states[node] = max(end, states.get(node, 0))

    def find(self, lease: Lease, cached_tokens: float, *, estimated: bool) -> None:
        if cached_tokens >= lease.cached_tokens * (1 - _TOLERANCE):
            return
        states = self.marked.states
        for node in lease.path[: lease.cached_documents + 1]:
            if states.get(node, 0) > cached_tokens:
                states.pop(node, None)

    def _remove(self, node: Node) -> None:
        self.marked.states.pop(node, None)
        super()._remove(node)
