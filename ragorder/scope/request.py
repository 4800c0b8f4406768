"""Documents of one request, read from the caller's objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, index
from typing import Any, Generic, NamedTuple, TypeVar

from ragorder.common.counts import Estimate, KnownTokens
from ragorder.document import check_readable
from ragorder.trie.residency import TokenIds
from ragorder.trie.tree import Key

D = TypeVar("D")

_document_key = attrgetter("key")
_document_tokens = attrgetter("token_count")


class Lengths(NamedTuple):
    """Tokens of a request besides its documents, if they differ from the settings.

    `prefix`: before the documents, read with a scope's first request. `suffix`: of question and answer.
    """

    prefix: int | None = None
    suffix: int | None = None


USUAL = Lengths()


@dataclass(slots=True, eq=False, repr=False)
class OrderRequest(Generic[D]):
    documents: list[D]
    keys: Sequence[Key]
    ranks: Mapping[Key, int]
    tokens: Sequence[int]
    groups: Sequence[Hashable | None]
    token_ids: Sequence[TokenIds] = ()
    estimated: bool = False
    sent: list[int] | None = None

    def send_as(self, permutation: Sequence[int]) -> None:
        sent = list(map(index, permutation))
        if sorted(sent) != list(range(len(self.keys))):
            raise ValueError("History.sent must have each rank of the documents exactly once")
        self.sent = sent


class RequestReader:
    """Reads the caller's objects as `Document`s, or by the callables of `Orderer`."""

    def __init__(
        self,
        key: Callable[[Any], Hashable] | None,
        tokens: Callable[[Any], int] | None,
        group: Callable[[Any], Hashable | None] | None,
        token_ids: Callable[[Any], TokenIds] | None,
        *,
        by_group: bool,
    ) -> None:
        self.token_ids = token_ids
        self._key = key or _document_key
        self._tokens = tokens or _document_tokens
        self._check_tokens = tokens is not None
        self._group = group or _metadata_source
        self._by_group = by_group
        read = [("key", "key", key), ("token_count", "tokens", tokens)]
        if by_group:
            read.append(("metadata", "group", group))
        self._wanted = {attribute: argument for attribute, argument, given in read if given is None}

    def read(self, given: list[D]) -> OrderRequest[D]:
        keys: list[Hashable] = list(map(self._key, given))
        ranks = {key: rank for rank, key in enumerate(keys)}
        if len(ranks) < len(keys):
            keys = _number_repeats(keys)
            ranks = {key: rank for rank, key in enumerate(keys)}
        groups = list(map(self._group, given)) if self._by_group else ()
        tokens = list(map(self._tokens, given))
        estimated = Estimate in map(type, tokens)
        if self._check_tokens and tokens:
            tokens = list(map(index, tokens))
            read_length(min(tokens))
        # Read once: another thread may close the orderer.
        ids_of = self.token_ids
        token_ids = list(map(ids_of, given)) if ids_of is not None else ()
        return OrderRequest(given, keys, ranks, tokens, groups, token_ids, estimated)

    def read_keys(self, given: Iterable[Any]) -> list[Hashable]:
        return list(map(self._key, given))

    def read_waiting(self, waiting: Sequence[Any]) -> Sequence[frozenset[Hashable]]:
        return [frozenset(map(self._key, others)) for others in waiting] if waiting else ()

    def refuse(self, given: list[Any], error: Exception) -> None:
        if isinstance(error, AttributeError):
            check_readable(given, self._wanted)


def read_length(tokens: Any) -> int:
    # The index of a subclass is a plain integer.
    length = tokens if isinstance(tokens, KnownTokens) else index(tokens)
    if length < 0:
        raise ValueError(f"a length in tokens must not be negative, got {length}")
    return length


def read_lengths(lengths: Lengths) -> Lengths:
    return Lengths(*(None if tokens is None else read_length(tokens) for tokens in lengths))


def _metadata_source(document: Any) -> Hashable | None:
    source: Hashable | None = document.metadata.get("source")
    return source


@dataclass(frozen=True, slots=True)
class _Repeat:
    key: Hashable
    number: int


def _number_repeats(keys: list[Hashable]) -> list[Hashable]:
    seen: dict[Hashable, int] = {}
    numbered: list[Hashable] = []
    for key in keys:
        count = seen.get(key, 0)
        seen[key] = count + 1
        numbered.append(_Repeat(key, count) if count else key)
    return numbered
