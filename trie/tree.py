"""Knowledge tree: a trie of served document sequences (RAGCache++ section 3.2)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

Key = Hashable
TokenIds = Sequence[int]


class RequestedDocuments(Protocol):
    """A request's documents in rank order. `token_ids` may be empty."""

    @property
    def keys(self) -> Sequence[Key]: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def token_ids(self) -> Sequence[TokenIds]: ...


class Node:
    """One document after a sequence of documents.

    `end` is in tokens from the prompt's start. A KV block belongs to the node of its last token. The engine lacks the
    last `missing` of the `blocks`; `provisional` ones are held only for requests in flight. `stamp` is the last use,
    `leases` the requests in flight.
    """

    __slots__ = ("blocks", "children", "end", "key", "leases", "missing", "parent", "provisional", "stamp")

    def __init__(self, key: Key, parent: Node | None, end: int, blocks: int) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[Key, Node] | None = None
        self.end = end
        self.blocks = blocks
        self.missing = blocks
        self.provisional = 0
        self.stamp = 0
        self.leases = 0

    def copy(self, parent: Node | None) -> Node:
        copy = Node(self.key, parent, self.end, self.blocks)
        copy.missing, copy.provisional, copy.stamp, copy.leases = (
            self.missing,
            self.provisional,
            self.stamp,
            self.leases,
        )
        return copy


def children_among(node: Node, ranks: Mapping[Key, int]) -> Iterator[Node]:
    """Yield the children that are documents of a request."""
    below = node.children
    if not below:
        return iter(())
    if len(below) <= len(ranks):
        return (child for key, child in below.items() if key in ranks)
    return filter(None, map(below.get, ranks))


class KnowledgeTree:
    """A trie over document keys. The root is the system prompt.

        tree = KnowledgeTree(block_size=16)
        path = tree.insert(["a", "b"], [48, 32], order=[1, 0])

    With `indexed`, `nodes_of` lists the nodes of each document.
    """

    def __init__(self, block_size: int, prefix_tokens: int = 0, *, indexed: bool = False) -> None:
        self.block_size = block_size
        self.root = Node(None, None, prefix_tokens, prefix_tokens // block_size)
        self.size = 0
        self.nodes_of: dict[Key, list[Node]] | None = {} if indexed else None

    def insert(self, keys: Sequence[Key], tokens: Sequence[int], order: Iterable[int]) -> list[Node]:
        """Insert documents `keys[i]` of `tokens[i]` tokens for i in `order`; return their path from the root."""
        block_size = self.block_size
        node = self.root
        path = [node]
        for i in order:
            key = keys[i]
            children = node.children
            if children is None:
                children = node.children = {}
                child = None
            else:
                child = children.get(key)
            if child is None:
                start = node.end
                end = start + tokens[i]
                child = children[key] = Node(key, node, end, end // block_size - start // block_size)
                self.size += 1
                if self.nodes_of is not None:
                    self.nodes_of.setdefault(key, []).append(child)
            path.append(child)
            node = child
        return path

    def remove(self, node: Node) -> None:
        parent = node.parent
        if parent is not None:
            siblings = parent.children
            if siblings is None or len(siblings) == 1:
                parent.children = None
            else:
                del siblings[node.key]
            self.size -= 1
            if self.nodes_of is not None:
                same = self.nodes_of[node.key]
                same.remove(node)
                if not same:
                    del self.nodes_of[node.key]
            # Several entries of a log may lead to it.
            node.stamp = 0

    def cached_tokens(self, node: Node) -> int:
        return (node.end // self.block_size - node.missing) * self.block_size

    def copy(self) -> tuple[KnowledgeTree, dict[Node, Node]]:
        tree = KnowledgeTree(self.block_size)
        tree.size = self.size
        copies: dict[Node, Node] = {}
        for node in self.walk():
            parent = None if node.parent is None else copies[node.parent]
            copies[node] = copy = node.copy(parent)
            if parent is None:
                tree.root = copy
        # Searches depend on the order of children.
        for node, copy in copies.items():
            if node.children is not None:
                copy.children = {key: copies[child] for key, child in node.children.items()}
        if self.nodes_of is not None:
            tree.nodes_of = {key: [copies[node] for node in nodes] for key, nodes in self.nodes_of.items()}
        return tree, copies

    def walk(self, top: Node | None = None) -> Iterator[Node]:
        stack = [top or self.root]
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack.extend(node.children.values())
