"""Residency in a cache that resumes where earlier prompts have ended or parted."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.trie.histories import TurnEnd
from ragorder.trie.residency.base import Lease
from ragorder.trie.residency.mark_plan import MarkPlan
from ragorder.trie.residency.marks import MarksResidency
from ragorder.trie.tree import Node

__all__ = ["JunctionsResidency"]

# Lengths may be estimates.
_TOLERANCE = 0.02


class JunctionsResidency(MarksResidency):
    """The nodes of prompts that a hybrid model has computed, and the places in them of which it has kept its state.

    Such an engine (vLLM's "align") keeps the KV of whole prompts, and the state of its other layers at the last
    multiple of `interval_tokens` in a prompt, and at the last one within what a request has in common with earlier
    prompts, if it did not resume there: so it is found from the third request on.
    """

    def _plan(self, path: Sequence[Node], prompt_tokens: int, turn: TurnEnd | None) -> MarkPlan:
        plan = super()._plan(path, prompt_tokens, turn)
        tree, size = self.marked, self.rules.interval_tokens
        shared = 0
        for node in path:
            if not tree.lives(node) or node.missing:
                break
            shared = node.end
        # Engines compute the last token of a prompt.
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
        """The engine has found so many tokens of a request's prompt: states that it should have found are gone."""
        if cached_tokens >= lease.cached_tokens * (1 - _TOLERANCE):
            return
        states = self.marked.states
        for node in lease.path[: lease.cached_documents + 1]:
            if states.get(node, 0) > cached_tokens:
                states.pop(node, None)

    def _leave(self, node: Node) -> None:
        self.marked.states.pop(node, None)
        super()._leave(node)
