"""Histories of conversations in the knowledge tree: documents behind a fixed path, and answers that later requests
continue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ragorder.trie.search.base import Permits
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["Behind", "Histories", "Segment", "TurnEnd", "find_below", "held_tokens"]

_KEPT_ENDS = 1024


@dataclass(frozen=True, slots=True)
class Segment:
    """An opaque part of a prompt, such as a message of a conversation.

        Segment(hashlib.sha256(text.encode()).hexdigest(), tokens=312)

    `key` identifies its content, `tokens` is its length in the prompt, template text included. Raises TypeError for a
    key that is no string or a length that is no integer, ValueError for a negative one.
    """

    key: str
    tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise TypeError(f"Segment.key must be a string, got {type(self.key).__name__}: give a digest of its text")
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int):
            raise TypeError(f"Segment.tokens must be an integer, got {type(self.tokens).__name__}")
        if self.tokens < 0:
            raise ValueError(f"Segment.tokens must not be negative, got {self.tokens}")


class Behind:
    """Where a request's documents stand: behind the segments of a history, in front of a `question`.

    `chains` has, for each segment, a digest of it and of all before it. Raises TypeError for other objects.
    """

    __slots__ = ("chains", "question", "segments")

    def __init__(self, segments: Iterable[Segment] = (), question: Segment | None = None) -> None:
        self.segments = list(segments)
        self.question = question
        for given in self.segments if question is None else (*self.segments, question):
            if not isinstance(given, Segment):
                raise TypeError(f"a history consists of ragorder.Segment objects, got {type(given).__name__}")
        self.chains: list[bytes] = []
        chain = b""
        for segment in self.segments:
            chain = _link(chain, segment.key)
            self.chains.append(chain)

    @property
    def chain(self) -> bytes:
        """Digest of the whole history."""
        return self.chains[-1] if self.chains else b""


class TurnEnd:
    """The turn of a request behind a history: in a lease's path `history` nodes stand in front of its documents, of
    which the last is number `documents`. `message` and `answer` are the keys by which later histories name the turn,
    with `closing_tokens` of template text behind the answer."""

    __slots__ = ("_behind", "_histories", "answer", "closing_tokens", "documents", "history", "message")

    def __init__(self, histories: Histories, behind: Behind, history: int, documents: int) -> None:
        self._histories = histories
        self._behind = behind
        self.history = history
        self.documents = documents
        self.message = self.answer = ""
        self.closing_tokens = 0

    @property
    def answer_key(self) -> Key | None:
        """None: later requests do not continue this answer."""
        return _link(_link(b"answer", self.message), self.answer) if self.message and self.answer else None

    def keep(self, last: Node, answer: Node | None) -> None:
        """The request is served: its `last` node and that of its answer are found by the turn's names."""
        if not self.message:
            return
        chain = _link(self._behind.chain, self.message)
        if self._behind.question is not None:
            self._histories.add(chain, last)
        if answer is not None:
            self._histories.add(_link(chain, self.answer), answer)


class Histories:
    """Nodes of a tree at which known histories end."""

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._ends: dict[bytes, Node] = {}
        self._limit = _KEPT_ENDS

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, chain: bytes, node: Node) -> None:
        # In the order of use: the older half goes if all are alive.
        self._ends.pop(chain, None)
        self._ends[chain] = node
        if len(self._ends) > self._limit:
            self._ends = {chain: node for chain, node in self._ends.items() if _in_tree(node)}
            self._limit = 2 * len(self._ends) + _KEPT_ENDS

    def find(self, behind: Behind) -> tuple[int, Node]:
        """How many leading segments are known, and where they end in the tree."""
        ends = self._ends
        for known in range(len(behind.chains), 0, -1):
            chain = behind.chains[known - 1]
            node = ends.get(chain)
            if node is not None:
                if _in_tree(node):
                    return known, node
                del ends[chain]
        return 0, self._tree.root

    def insert(
        self, behind: Behind, lengths: Sequence[int], keys: Sequence[Key], tokens: Sequence[int], order: Sequence[int]
    ) -> tuple[list[Node], TurnEnd]:
        """The path of a request: its history of segments of `lengths`, its documents in their order (as in
        `KnowledgeTree.insert`), and its question, whose length is the last."""
        known, end = self.find(behind)
        path = _keys_to(end)
        places = [0] * len(path) + list(lengths[known : len(behind.chains)])
        path += behind.chains[known:]
        history = len(path)
        path += [keys[rank] for rank in order]
        places += [tokens[rank] for rank in order]
        if behind.question is not None:
            path.append(_link(b"question", behind.question.key))
            places.append(lengths[-1])
        nodes = self._tree.insert(path, places, range(len(path)))
        for chain, node in zip(behind.chains[known:], nodes[history + 1 - len(behind.chains) + known :], strict=False):
            self.add(chain, node)
        return nodes, TurnEnd(self, behind, history, history + len(order))

    def known_path(self, behind: Behind, keys: Sequence[Key]) -> list[Node]:
        """The nodes of a request's path that are in the tree, from the root: of its history, of the documents `keys`
        if the history is known as a whole, and of its question."""
        known, end = self.find(behind)
        path = [end]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        path.reverse()
        if known < len(behind.chains):
            return path
        further = [*keys] if behind.question is None else [*keys, _link(b"question", behind.question.key)]
        for key in further:
            node = (path[-1].children or {}).get(key)
            if node is None:
                break
            path.append(node)
        return path

    def end(self, behind: Behind) -> Node | None:
        """The node at which the whole history ends; None if the tree does not have it."""
        known, end = self.find(behind)
        return end if known == len(behind.chains) else None


def find_below(
    tree: KnowledgeTree, top: Node, ranks: Mapping[Key, int], budget: int, permits: Permits | None = None
) -> list[int]:
    """Ranks of a request's documents on the longest path in tokens that is held below a node, among equals the most
    recently used; at most `budget` nodes are examined."""
    if not held(top):
        return []
    best: list[int] = []
    best_end, best_stamp = top.end, 0
    stack: list[tuple[Node, list[int]]] = [(top, [])]
    while stack and budget > 0:
        above, path = stack.pop()
        for key in _shared(above.children or {}, ranks):
            node = (above.children or {})[key]
            ranked = [*path, ranks[key]]
            budget -= 1
            if permits is not None and not permits(ranked):
                continue
            end = tree.cached_tokens(node) if node.missing else node.end
            if (end, node.stamp) > (best_end, best_stamp):
                best, best_end, best_stamp = ranked, end, node.stamp
            if held(node):
                stack.append((node, ranked))
    return best


def held(node: Node) -> bool:
    """As a lease sees it."""
    return bool(node.stamp) and not node.missing


def held_tokens(tree: KnowledgeTree, path: Sequence[Node]) -> int:
    """Prompt tokens that a request on this path would find."""
    end = 0
    for node in path:
        end = max(0, tree.cached_tokens(node))
        if not held(node):
            break
    return end


def _shared(children: Mapping[Key, Node], ranks: Mapping[Key, int]) -> Iterable[Key]:
    if len(children) < len(ranks):
        return [key for key in children if key in ranks]
    return [key for key in ranks if key in children]


def _keys_to(node: Node) -> list[Key]:
    keys: list[Key] = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    keys.reverse()
    return keys


def _in_tree(node: Node) -> bool:
    parent = node.parent
    return parent is None or (parent.children or {}).get(node.key) is node


def _link(chain: bytes, key: str) -> bytes:
    return blake2b(chain + b"\0" + key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
