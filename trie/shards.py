"""Shards of a batch, planned independently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import log, sqrt
from typing import NamedTuple, Self

from ragorder.trie.plan import Planned, plan, shared_documents
from ragorder.trie.tree import Key

__all__ = ["PlannedRequest", "ShardPaths", "ShardRequest", "plan_in_shards", "plan_requests", "shared_documents"]

_PARTS = 8
"""Groups below 1/8 of the mean shard are not split, so no shard is much larger."""

_DEEPEST = 8
"""Maximum documents of a path: each costs a pass over all requests."""

_LARGEST_EXPONENT = 0.6

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class ShardRequest(NamedTuple):
    """Numbers of a request's distinct documents (not negative), their lengths, and its tenant's number."""

    documents: Sequence[int]
    tokens: Sequence[int]
    scope: int | None = None

    @classmethod
    def of(cls, names: Iterable[str], tokens: Sequence[int], scope: str | None = None) -> Self:
        """Return a request of named documents. Numbers have 63 bits, the same in every process."""
        salt = b"" if scope is None else _digest(scope, size=blake2b.SALT_SIZE)
        taken: dict[int, None] = {}
        for name in names:
            number = int.from_bytes(_digest(name, salt), "big") >> 1
            while number in taken:
                number = (number + 1) & (_WORD >> 1)
            taken[number] = None
        return cls(list(taken), tokens, int.from_bytes(salt[:8], "big") >> 1 if salt else None)


class ShardPaths:
    """Shards by paths of popular documents.

        paths = ShardPaths.of(requests, shards=64)
        shard = paths.shard(requests[0])

    Requests are grouped by tenant, then by the document by which most tokens can be shared (estimated from a document's
    consecutive requests; a sample suffices). Large groups are split by the next such document, up to eight times.
    Groups fill shards of about equal tokens, in path order.
    """

    def __init__(self, worth: Mapping[int, float], root: _Group, shards: int) -> None:
        self.shards = shards
        self._worth = worth
        self._root = root

    @classmethod
    def of(cls, requests: Iterable[ShardRequest], shards: int, *, most_documents: int = 1 << 23) -> Self:
        """Return the paths of these requests, which are iterated up to ten times.

        Beyond `most_documents` the rarest are not counted (Manku and Motwani 2002).
        """
        if shards < 1:
            raise ValueError(f"shards must be at least 1, got {shards}")
        root = _Group()
        if shards == 1:
            return cls({}, root, shards)
        counted = _count(requests, most_documents)
        paths = cls(counted.worth, root, shards)
        fewest = max(2, counted.requests // (_PARTS * _PARTS * shards))
        frequent = {branch for branch, count in counted.popularity.items() if count >= fewest}
        root.size, root.requests = counted.size, counted.requests
        paths._grow(requests, frequent, max(1, counted.size // (_PARTS * shards)))
        paths._pack(max(1, counted.size))
        return paths

    def branch(self, request: ShardRequest) -> list[int]:
        worth = self._worth.get
        ranked = sorted([(worth(document, 0.0), document) for document in request.documents], reverse=True)
        path = [document for _, document in ranked]
        return path if request.scope is None else [~request.scope, *path]

    def shard(self, request: ShardRequest, number: int = 0) -> int:
        """Return the request's shard, from 0. `number` spreads requests without a further document."""
        group, cell = self._find(self.branch(request), number)
        return group.shards[cell]

    def _find(self, path: Sequence[int], number: int) -> tuple[_Group, int]:
        group = self._root
        for branch in path:
            if not group.cells:
                return group, 0
            child = group.children.get(branch)
            if child is None:
                return group, _cell(branch, len(group.cells))
            group = child
        return group, _cell(number, len(group.cells)) if group.cells else 0

    def _grow(self, requests: Iterable[ShardRequest], frequent: set[int], limit: int) -> None:
        large = [self._root]
        for depth in range(_DEEPEST + 1):
            for group in large:
                group.split(max(1, -(-group.size // limit)))
            known = frequent if depth < _DEEPEST else set[int]()
            for number, request in enumerate(requests):
                self._add(request, number, known)
            children = [child for group in large for child in group.children.values()]
            for group in large:
                group.open = False
            large = [child for child in children if child.size > limit and child.requests > 1]
            if not large:
                break

    def _add(self, request: ShardRequest, number: int, frequent: set[int]) -> None:
        path, size = self.branch(request), _size(request)
        group = self._root
        for branch in path:
            if group.open:
                child = group.children.get(branch)
                if child is None and branch in frequent:
                    child = group.children[branch] = _Group()
                if child is None:
                    group.cells[_cell(branch, len(group.cells))] += size
                else:
                    child.size += size
                    child.requests += 1
                return
            if not group.cells:
                return
            below = group.children.get(branch)
            if below is None:
                return
            group = below
        if group.open:
            group.cells[_cell(number, len(group.cells))] += size

    def _pack(self, total: int) -> None:
        before = 0
        for group in self._root.walk():
            for cell, size in enumerate(group.cells or [group.size]):
                group.shards[cell] = min(self.shards - 1, (2 * before + size) * self.shards // (2 * total))
                before += size


class _Group:
    """Requests of one path. A large group has a child for each frequent next document, and cells for the rest."""

    __slots__ = ("cells", "children", "open", "requests", "shards", "size")

    def __init__(self) -> None:
        self.size = self.requests = 0
        self.open = False
        self.children: dict[int, _Group] = {}
        self.cells: list[int] = []
        self.shards = [0]

    def split(self, cells: int) -> None:
        self.open = True
        self.cells, self.shards = [0] * cells, [0] * cells

    def walk(self) -> Iterator[_Group]:
        yield self
        for branch in sorted(self.children):
            yield from self.children[branch].walk()


class _Counted(NamedTuple):
    popularity: dict[int, int]
    worth: dict[int, float]
    requests: int
    size: int


class _Facts:
    __slots__ = ("last", "requests", "shared", "squares")

    def __init__(self, last: Sequence[int]) -> None:
        self.requests = 1
        self.shared = self.squares = 0
        self.last = last

    def worth(self) -> float:
        pairs = self.requests - 1
        mean = self.shared / pairs
        deviation = sqrt(max(0.0, self.squares / pairs - mean * mean))
        # The largest of n normal values has an exponent of 1/2; a larger one compensates the noise of rare documents.
        # The first request of a group shares nothing.
        largest: float = (2 * log(self.requests)) ** _LARGEST_EXPONENT
        return (mean + deviation * largest) * pairs / self.requests


def _count(requests: Iterable[ShardRequest], most: int) -> _Counted:
    facts: dict[int, _Facts] = {}
    scopes: Counter[int] = Counter()
    number = size = 0
    for request in requests:
        number += 1
        size += _size(request)
        documents = request.documents
        if request.scope is not None:
            scopes[~request.scope] += 1
        own = dict(zip(documents, request.tokens, strict=True))
        for document in documents:
            known = facts.get(document)
            if known is None:
                facts[document] = _Facts(documents)
                continue
            shared = sum([own[other] for other in known.last if other in own])
            known.requests += 1
            known.shared += shared
            known.squares += shared * shared
            known.last = documents
        if len(facts) > most:
            least = 1
            while len(facts) > most // 2:
                facts = {document: known for document, known in facts.items() if known.requests > least}
                least += 1
    popularity = {document: known.requests for document, known in facts.items()} | scopes
    worth = {document: known.worth() for document, known in facts.items() if known.requests > 1}
    return _Counted(popularity, worth, number, size)


def _digest(name: str, salt: bytes = b"", size: int = 8) -> bytes:
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=size, salt=salt).digest()


def _size(request: ShardRequest) -> int:
    # A request without tokens counts too.
    return 1 + sum(request.tokens)


def _cell(value: int, cells: int) -> int:
    return (value * _GOLDEN & _WORD) * cells >> 64


def plan_in_shards(requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int], shards: int) -> list[list[Planned]]:
    """Return the `plan` of each shard, which may be empty."""
    number: dict[Key, int] = {}
    counted = [
        ShardRequest([number.setdefault(key, len(number)) for key in keys], [tokens[key] for key in keys])
        for keys in requests
    ]
    paths = ShardPaths.of(counted, shards)
    members: list[list[int]] = [[] for _ in range(shards)]
    for index, request in enumerate(counted):
        members[paths.shard(request, index)].append(index)
    return [
        [(indices[place], order) for place, order in plan([requests[index] for index in indices], tokens)]
        for indices in members
    ]


class PlannedRequest(NamedTuple):
    """A request with its documents' ranks in prompt order, and the prefix shared with the one before."""

    number: int
    permutation: list[int]
    shared_documents: int
    shared_tokens: int


def plan_requests(requests: Sequence[ShardRequest]) -> Iterator[PlannedRequest]:
    """Yield the `plan` of one shard, tenant by tenant. The last length of a document counts."""
    by_scope: dict[int | None, list[int]] = {}
    for index, request in enumerate(requests):
        by_scope.setdefault(request.scope, []).append(index)
    for members in by_scope.values():
        tokens: dict[Key, int] = {}
        for index in members:
            tokens.update(zip(requests[index].documents, requests[index].tokens, strict=True))
        before: Sequence[Key] = ()
        for place, order in plan([requests[index].documents for index in members], tokens):
            index = members[place]
            ranks: dict[Key, int] = {document: rank for rank, document in enumerate(requests[index].documents)}
            shared = shared_documents(before, order)
            saved = sum([tokens[document] for document in order[:shared]])
            yield PlannedRequest(index, [ranks[document] for document in order], shared, saved)
            before = order
