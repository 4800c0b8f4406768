"""Histories of conversations in the knowledge tree: documents behind a fixed path, and answers that later requests
continue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

from ragorder.trie.search.base import Permits
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = [
    "AnswerKey",
    "Behind",
    "Histories",
    "KnownSegments",
    "Question",
    "Segment",
    "TurnEnd",
    "find_below",
    "held_tokens",
]

_KEPT_SEGMENTS = 32_768


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


Question = Segment | Sequence[Segment]
"""What stands behind a request's documents: a question, or the rest of a conversation that is laid out again."""


class Behind:
    """Where a request's documents stand: behind the segments of a history, in front of a `question`, which others may
    `follow`.

    `chains` has, for each segment, a digest of it and of all before it. Raises TypeError for other objects.
    """

    __slots__ = ("chains", "following", "question", "segments")

    def __init__(self, segments: Iterable[Segment] = (), question: Question | None = None) -> None:
        self.segments = list(segments)
        asked = [] if question is None else [question] if isinstance(question, Segment) else list(question)
        self.question = asked[0] if asked else None
        self.following = asked[1:]
        for given in (*self.segments, *asked):
            if not isinstance(given, Segment):
                raise TypeError(f"a history consists of ragorder.Segment objects, got {type(given).__name__}")
        self.chains: list[bytes] = []
        chain = b""
        for segment in self.segments:
            chain = _link(chain, segment.key)
            self.chains.append(chain)

    def tail_keys(self) -> list[Key]:
        """Of the nodes behind the documents."""
        asked = [] if self.question is None else [self.question]
        return [_link(b"question", segment.key) for segment in (*asked, *self.following)]

    @property
    def chain(self) -> bytes:
        """Digest of the whole history."""
        return self.chains[-1] if self.chains else b""


class AnswerKey(bytes):
    """Key of an answer's node, which ends where the engine has reported, whatever the lengths in front of it."""


class TurnEnd:
    """The turn of a request behind a history: in a lease's path `history` nodes stand in front of its documents, of
    which the last is number `documents`, and the question and what follows it behind them; `sizes` are the nodes of
    each segment of the history. `message` (the one with the documents) and `answer` are the keys by which later
    histories name the turn, with `closing_tokens` of template text behind the answer."""

    __slots__ = ("_behind", "_histories", "answer", "closing_tokens", "documents", "history", "message", "sizes")

    def __init__(self, histories: Histories, behind: Behind, sizes: Sequence[int], documents: int) -> None:
        self._histories = histories
        self._behind = behind
        self.sizes = sizes
        self.history = sum(sizes)
        self.documents = self.history + documents
        self.message = self.answer = ""
        self.closing_tokens = 0

    @property
    def opens(self) -> bool:
        """Whether its prompt is documents and a question, without any other message."""
        return not self.history and not self._behind.following

    @property
    def answer_key(self) -> Key | None:
        """None: later requests do not continue this answer."""
        if not self.message or not self.answer:
            return None
        if self._behind.question is None:
            return AnswerKey(_link(_link(b"answer", self.message), self.answer))
        # As behind the documents of a conversation that is laid out again.
        return AnswerKey(_link(b"question", self.answer))

    def keep(self, path: Sequence[Node], answer: Node | None) -> None:
        """The request is served: its turn has these nodes in later histories."""
        if not self.message:
            return
        following = self._behind.following
        chain = _link(self._behind.chain, self.message)
        end = len(path) - len(following)
        self._histories.add(chain, path[self.history + 1 : end])
        for segment, node in zip(following, path[end:], strict=True):
            chain = _link(chain, segment.key)
            self._histories.add(chain, [node])
        if answer is not None:
            self._histories.add(_link(chain, self.answer), [answer])


class _Part(NamedTuple):
    """Consecutive nodes: their keys, and their lengths in tokens."""

    keys: list[Key]
    lengths: list[int]


class _Path(NamedTuple):
    """The same of a history, and the number of nodes of each segment."""

    keys: list[Key]
    lengths: list[int]
    sizes: list[int]


class KnownSegments:
    """Segments that were served, of all scopes, by a digest of all up to there; the `kept` that were used last."""

    def __init__(self, kept: int = _KEPT_SEGMENTS) -> None:
        self._kept = kept
        self._parts: OrderedDict[bytes, _Part] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, key: bytes) -> _Part | None:
        part = self._parts.get(key)
        if part is not None:
            self._parts.move_to_end(key)
        return part

    def put(self, key: bytes, part: _Part) -> None:
        self._parts[key] = part
        self._parts.move_to_end(key)
        if len(self._parts) > self._kept:
            self._parts.popitem(last=False)


class Histories:
    """Segments of histories that were served, as nodes of a tree: a message is its documents and its question, so that
    it shares them with other requests, and is predicted while a part of them is held.

    Of those that are not `known` any more, and of those of other processes, each is one opaque node.
    """

    _numbers = count()

    def __init__(self, tree: KnowledgeTree, known: KnownSegments | None = None) -> None:
        self._tree = tree
        self._known = KnownSegments() if known is None else known
        # No two scopes have a segment in common.
        self._own = b"%d:" % next(self._numbers)

    def add(self, chain: bytes, nodes: Sequence[Node]) -> None:
        starts = (0 if node.parent is None else node.parent.end for node in nodes)
        lengths = [node.end - start for node, start in zip(nodes, starts, strict=True)]
        self._known.put(self._own + chain, _Part([node.key for node in nodes], lengths))

    def insert(
        self, behind: Behind, lengths: Sequence[int], keys: Sequence[Key], tokens: Sequence[int], order: Sequence[int]
    ) -> tuple[list[Node], TurnEnd]:
        """The path of a request: its history, segments of `lengths`, its documents in their order (as in
        `KnowledgeTree.insert`), and what is behind them, of the lengths that are left."""
        path = self._path(behind, lengths)
        nodes_keys = [*path.keys, *(keys[rank] for rank in order)]
        nodes_lengths = [*path.lengths, *(tokens[rank] for rank in order)]
        nodes_keys += behind.tail_keys()
        nodes_lengths += lengths[len(behind.segments) :]
        nodes = self._tree.insert(nodes_keys, nodes_lengths, range(len(nodes_keys)))
        return nodes, TurnEnd(self, behind, path.sizes, len(order))

    def known_path(self, behind: Behind, keys: Sequence[Key]) -> list[Node]:
        """The nodes, from the root, of a request's path that are in the tree: of its history, its documents `keys`, and
        what is behind them."""
        return self._walk([*self._path(behind).keys, *keys, *behind.tail_keys()])

    def has_lost(self, behind: Behind) -> bool:
        """Whether a history was served whose first message is not held any more, and with it all behind that. Of one
        that is not known, which others may have served, nothing can be said."""
        part = self._known.get(self._own + behind.chains[0]) if behind.chains else None
        if part is None:
            return False
        nodes = self._walk(part.keys)
        return len(nodes) <= len(part.keys) or not held(nodes[-1])

    def end(self, behind: Behind) -> Node | None:
        """The node at which the history ends; None if the tree does not have it."""
        wanted = self._path(behind).keys
        nodes = self._walk(wanted)
        return nodes[-1] if len(nodes) == len(wanted) + 1 else None

    def _path(self, behind: Behind, lengths: Sequence[int] = ()) -> _Path:
        path = _Path([], [], [])
        for number, chain in enumerate(behind.chains):
            part = self._known.get(self._own + chain)
            if part is None:
                part = _Part([chain], list(lengths[number : number + 1]))
            path.keys.extend(part.keys)
            path.lengths.extend(part.lengths)
            path.sizes.append(len(part.keys))
        return path

    def _walk(self, keys: Sequence[Key]) -> list[Node]:
        nodes = [self._tree.root]
        for key in keys:
            node = (nodes[-1].children or {}).get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes


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


def _link(chain: bytes, key: str) -> bytes:
    return blake2b(chain + b"\0" + key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
