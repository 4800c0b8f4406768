"""Batches planned for several independent engines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from ragorder.ordering import Ordering
from ragorder.scope.request import OrderRequest, RequestReader
from ragorder.trie.shards import plan_in_shards, shared_documents

__all__ = ["plan_shards"]

D = TypeVar("D")


def plan_shards(
    requests: Iterable[Iterable[D]],
    shards: int,
    *,
    key: Callable[[Any], Hashable] | None = None,
    tokens: Callable[[Any], int] | None = None,
) -> list[list[Ordering[D]]]:
    """Return orderings for each of `shards` engines, in serving order, from empty caches (docs/batches.md).

    Requests that share documents are in one shard; shards have about equal tokens. `prefix_documents` and
    `cached_tokens` are shared with the request before; `confirm` and `discard` have no effect. Plan tenants separately.
    `ragorder plan` is for batches larger than memory.
    """
    reader = RequestReader(key, tokens, None, None, by_group=False)
    read = [_read(reader, list(documents)) for documents in requests]
    lengths = {key: length for request in read for key, length in zip(request.keys, request.tokens, strict=True)}
    planned = plan_in_shards([request.keys for request in read], lengths, shards)
    made: list[list[Ordering[D]]] = []
    for orders in planned:
        before: Sequence[Hashable] = ()
        made.append([])
        for index, order in orders:
            shared = shared_documents(before, order)
            cached = sum(lengths[key] for key in order[:shared])
            made[-1].append(_ordering(read[index], index, order, shared, cached))
            before = order
    return made


def _read(reader: RequestReader, documents: list[D]) -> OrderRequest[D]:
    try:
        return reader.read(documents)
    except AttributeError as error:
        reader.refuse(documents, error)
        raise


def _ordering(
    request: OrderRequest[D], index: int, order: Sequence[Hashable], shared: int, cached_tokens: int
) -> Ordering[D]:
    permutation = [request.ranks[key] for key in order]
    ordering = Ordering([request.documents[rank] for rank in permutation], permutation, shared, cached_tokens)
    ordering.index = index
    return ordering
