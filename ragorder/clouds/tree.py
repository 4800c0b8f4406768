"""Knowledge tree of a cache that resumes at breakpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from ragorder.clouds.rules import CacheRules
from ragorder.trie.search import Permits, PrefixSearch, ranks_on_path
from ragorder.trie.tree import Key, KnowledgeTree, Node, children_among


class MarkedTree(KnowledgeTree):
    """Tree that knows where a request can resume.

    `marks`: expiry of the entry that ends with each node, soonest first. `pending`: requests in flight that will write
    an entry there. `states`: the last place within a node, in tokens of the prompt, with a hybrid model's state.
    """

    def __init__(self, prefix_tokens: int, rules: CacheRules) -> None:
        super().__init__(1, prefix_tokens)
        self.rules = rules
        self.marks: OrderedDict[Node, float] = OrderedDict()
        self.pending: dict[Node, int] = {}
        self.states: dict[Node, int] = {}
        self.now = 0.0

    def has_entry(self, node: Node) -> bool:
        return self.marks.get(node, self.now) > self.now

    def resumable(self, node: Node) -> int:
        """Return the tokens at which a request resumes by the node's own entry, or 0 without one."""
        if not self.has_entry(node):
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
        """Return whether later requests gain if this one shares the node without reading there."""
        return node in self.pending or (self.rules.resume == "junctions" and self.has_entry(node))

    def cached_tokens(self, node: Node) -> int:
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
    """Depth-first search of a `MarkedTree`, over at most `budget` nodes.

    Most resumable tokens win, then a deeper node that requests in flight will write, then the last used.
    """

    def find(self, tree: KnowledgeTree, ranks: Mapping[Key, int], permits: Permits | None = None) -> Node:
        assert isinstance(tree, MarkedTree)
        best = tree.root
        resumable = tree.resumable
        held = resumable(best)
        merit = (held, 0, 0)
        stack = [(child, held) for child in children_among(best, ranks)]
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
            stack += [(child, held) for child in children_among(node, ranks)]
        return best
