"""Knowledge tree of a cache that resumes at marks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from ragorder.clouds.rules import CacheRules
from ragorder.trie.search import Permits, PrefixSearch, ranks_on_path
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["MarkedPathSearch", "MarkedTree"]


class MarkedTree(KnowledgeTree):
    """A tree in whose nodes a request can resume, or not.

    `marks`: until when (by the residency's clock, of which `now` is the last reading) an entry lives that ends with the
    node, the soonest first. `pending`: nodes that requests in flight will mark, with their number. `states`: of a cache
    that resumes at junctions, the last place within a node, in tokens of the prompt, that it has kept the state of.
    """

    def __init__(self, prefix_tokens: int, rules: CacheRules) -> None:
        super().__init__(1, prefix_tokens)
        self.rules = rules
        self.marks: OrderedDict[Node, float] = OrderedDict()
        self.pending: dict[Node, int] = {}
        self.states: dict[Node, int] = {}
        self.now = 0.0

    def lives(self, node: Node) -> bool:
        """Whether an entry ends with the node."""
        return self.marks.get(node, self.now) > self.now

    def resumable(self, node: Node) -> int:
        """Tokens at which a request resumes by the node's own entry; 0 without one."""
        if not self.lives(node):
            return 0
        rules, end = self.rules, node.end - node.missing
        if rules.resume == "junctions":
            state = self.states.get(node, 0)
            end = state if state <= end else 0
        elif rules.resume == "interval":
            end -= end % rules.interval_tokens
        elif node.missing:
            return 0
        return end if end >= rules.minimum_tokens else 0

    def joins(self, node: Node) -> bool:
        """Whether it helps later requests if this one shares the node, even if it reads nothing there."""
        return node in self.pending or (self.rules.resume == "junctions" and self.lives(node))

    def cached_tokens(self, node: Node) -> int:
        """By the deepest entry at the node or above it."""
        at: Node | None = node
        while at is not None:
            if found := self.resumable(at):
                return found
            at = at.parent
        return 0

    def copy(self) -> tuple[MarkedTree, dict[Node, Node]]:
        plain, copies = super().copy()
        tree = MarkedTree(0, self.rules)
        tree.root, tree.size, tree.now = plain.root, plain.size, self.now
        tree.marks = OrderedDict((copies[node], until) for node, until in self.marks.items())
        tree.pending = {copies[node]: number for node, number in self.pending.items()}
        tree.states = {copies[node]: state for node, state in self.states.items()}
        return tree, copies


class MarkedPathSearch(PrefixSearch):
    """Depth-first search of all paths within the request's documents, over at most `budget` nodes of a `MarkedTree`.

    The path that resumes latest wins, and ends at its mark: unmarked nodes are only walked through. Among equals comes
    the one that later requests gain most by, as requests in flight mark it or a junction will be there, then the most
    recently used.
    """

    def __init__(self, budget: int = 1024) -> None:
        self.budget = budget

    def find(self, tree: KnowledgeTree, ranks: Mapping[Key, int], permits: Permits | None = None) -> Node:
        assert isinstance(tree, MarkedTree)
        best = tree.root
        resumable = tree.resumable
        held = resumable(best)
        merit = (held, 0, 0)
        stack = [(child, held) for child in _children(best, ranks)]
        stack.reverse()
        budget = self.budget
        while stack and budget:
            budget -= 1
            node, held = stack.pop()
            if permits is not None and not permits(ranks_on_path(node, ranks)):
                continue
            own = resumable(node)
            held = max(held, own)
            if own or tree.joins(node):
                found = (held, node.end, node.stamp)
                if found > merit:
                    best, merit = node, found
            stack += [(child, held) for child in _children(node, ranks)]
        return best


def _children(node: Node, ranks: Mapping[Key, int]) -> Iterator[Node]:
    below = node.children
    if not below:
        return iter(())
    if len(below) <= len(ranks):
        return (child for key, child in below.items() if key in ranks)
    return filter(None, map(below.get, ranks))
