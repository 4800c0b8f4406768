"""Histories of conversations in the knowledge tree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

from ragorder.trie.search import Permits
from ragorder.trie.tree import Key, KnowledgeTree, Node, children_among

_KEPT_SEGMENTS = 32_768


@dataclass(frozen=True, slots=True)
class Segment:
    """An opaque part of a prompt, such as a message.

        Segment(hashlib.sha256(text.encode()).hexdigest(), tokens=312)

    `key` identifies the content; `tokens` includes template text. Raises TypeError or ValueError.
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
"""The segments after a request's documents: a question, or the rest of a rebased conversation."""


class History:
    """The messages around a request's documents in a conversation.

        History(builder.segments(messages), question=Segment("…", tokens=20))

    - `segments` precede the documents; a first turn has none
    - `question` follows them: one segment, or several of a rebased conversation
    - `sent`: the ranks in an earlier request's order, to repeat it

    `chains`: for each segment a digest of it and all before it.
    """

    __slots__ = ("chains", "following", "question", "segments", "sent")

    def __init__(
        self, segments: Iterable[Segment] = (), question: Question | None = None, sent: Sequence[int] | None = None
    ) -> None:
        self.segments = list(segments)
        asked = [] if question is None else [question] if isinstance(question, Segment) else list(question)
        self.question = asked[0] if asked else None
        self.following = asked[1:]
        self.sent = sent
        for given in (*self.segments, *asked):
            if not isinstance(given, Segment):
                raise TypeError(f"a history consists of ragorder.Segment objects, got {type(given).__name__}")
        self.chains: list[bytes] = []
        chain = b""
        for segment in self.segments:
            chain = _link(chain, segment.key)
            self.chains.append(chain)

    def document_keys(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Return the nodes' keys of documents after the segments, which may hold the same documents."""
        return [_LaterKey(key, self.chain) for key in keys] if self.segments else keys

    def tail_keys(self) -> list[Key]:
        asked = [] if self.question is None else [self.question]
        return [_link(b"question", segment.key) for segment in (*asked, *self.following)]

    @property
    def chain(self) -> bytes:
        return self.chains[-1] if self.chains else b""


class _LaterKey(NamedTuple):
    """Key of a later turn's document: no other turn of a conversation, and no request without one, has it."""

    key: Key
    chain: bytes


class AnswerKey(bytes):
    """Key of an answer's node. `resize` leaves its end, which the engine has reported."""


@dataclass(slots=True, eq=False, repr=False)
class TurnEnd:
    """A conversation's request in the tree.

    Its path is the root, `history_nodes` nodes (`sizes` by segment), the documents up to place `documents`, the
    question and later segments. Later turns name this message, with its documents, by the key `message` and its answer
    by `answer`. Template text of `closing_tokens` follows the answer.
    """

    _histories: Histories
    _history: History
    sizes: Sequence[int]
    history_nodes: int
    documents: int
    message: str = ""
    answer: str = ""
    closing_tokens: int = 0

    @property
    def opens(self) -> bool:
        return not self.history_nodes and not self._history.following

    @property
    def answer_key(self) -> Key | None:
        if not self.message or not self.answer:
            return None
        if self._history.question is None:
            return AnswerKey(_link(_link(b"answer", self.message), self.answer))
        # The key that answers have after the documents of a rebased conversation.
        return AnswerKey(_link(b"question", self.answer))

    def keep(self, path: Sequence[Node], answer: Node | None) -> None:
        if not self.message:
            return
        following = self._history.following
        chain = _link(self._history.chain, self.message)
        end = len(path) - len(following)
        self._histories.add(chain, path[self.history_nodes + 1 : end])
        for segment, node in zip(following, path[end:], strict=True):
            chain = _link(chain, segment.key)
            self._histories.add(chain, [node])
        if answer is not None:
            self._histories.add(_link(chain, self.answer), [answer])


class _Part(NamedTuple):
    keys: list[Key]
    lengths: list[int]


class _Path(NamedTuple):
    keys: list[Key]
    lengths: list[int]
    sizes: list[int]


class KnownSegments:
    """LRU cache of served segments of all scopes, by chain digest."""

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
    """Served segments of histories as nodes of a tree.

    A message is stored as its documents and question, which other requests share; an unknown one (forgotten, or served
    by another process) is one opaque node.
    """

    _numbers = count()

    def __init__(self, tree: KnowledgeTree, known: KnownSegments | None = None) -> None:
        self._tree = tree
        self._known = KnownSegments() if known is None else known
        # Scopes never share segments.
        self._own = b"%d:" % next(self._numbers)

    def add(self, chain: bytes, nodes: Sequence[Node]) -> None:
        starts = (0 if node.parent is None else node.parent.end for node in nodes)
        lengths = [node.end - start for node, start in zip(nodes, starts, strict=True)]
        self._known.put(self._own + chain, _Part([node.key for node in nodes], lengths))

    def insert(
        self, history: History, lengths: Sequence[int], keys: Sequence[Key], tokens: Sequence[int], order: Sequence[int]
    ) -> tuple[list[Node], TurnEnd]:
        path = self._path(history, lengths)
        keys = history.document_keys(keys)
        nodes_keys = [*path.keys, *(keys[rank] for rank in order)]
        nodes_lengths = [*path.lengths, *(tokens[rank] for rank in order)]
        nodes_keys += history.tail_keys()
        nodes_lengths += lengths[len(history.segments) :]
        nodes = self._tree.insert(nodes_keys, nodes_lengths, range(len(nodes_keys)))
        before = len(path.keys)
        return nodes, TurnEnd(self, history, path.sizes, before, before + len(order))

    def known_path(self, history: History, keys: Sequence[Key]) -> list[Node]:
        return self._walk([*self._path(history).keys, *history.document_keys(keys), *history.tail_keys()])

    def has_lost(self, history: History) -> bool:
        """Return whether the engine has evicted a history's first message; False if it was not served here."""
        part = self._known.get(self._own + history.chains[0]) if history.chains else None
        if part is None:
            return False
        nodes = self._walk(part.keys)
        return len(nodes) <= len(part.keys) or not held(nodes[-1])

    def end(self, history: History) -> Node | None:
        wanted = self._path(history).keys
        nodes = self._walk(wanted)
        return nodes[-1] if len(nodes) == len(wanted) + 1 else None

    def _path(self, history: History, lengths: Sequence[int] = ()) -> _Path:
        path = _Path([], [], [])
        for number, chain in enumerate(history.chains):
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
    """Return the ranks on the longest held path below `top`, the last used of equal ones.

    About `budget` nodes are examined.
    """
    if not held(top):
        return []
    best: list[int] = []
    best_end, best_stamp = top.end, 0
    stack: list[tuple[Node, list[int]]] = [(top, [])]
    while stack and budget > 0:
        above, path = stack.pop()
        for node in children_among(above, ranks):
            ranked = [*path, ranks[node.key]]
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
    return bool(node.stamp) and not node.missing


def held_tokens(tree: KnowledgeTree, path: Sequence[Node]) -> int:
    end = 0
    for node in path:
        end = max(0, tree.cached_tokens(node))
        if not held(node):
            break
    return end


def _link(chain: bytes, key: str) -> bytes:
    return blake2b(chain + b"\0" + key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
