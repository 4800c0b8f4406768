"""The orderer: places each request's documents so that they extend a prefix that the engine still holds."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter, index
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from ragorder._scope import Contents, Request, Scope
from ragorder.batch import Batch
from ragorder.document import Estimate
from ragorder.ordering import Ordering
from ragorder.settings import Settings
from ragorder.trie.backlog import plan_backlog
from ragorder.trie.residency import EngineBlocks

if TYPE_CHECKING:
    from ragorder.prompt import PromptBuilder

__all__ = ["Orderer", "Orders"]

D = TypeVar("D")

_logger = logging.getLogger("ragorder")
_document_key = attrgetter("key")
_document_tokens = attrgetter("token_count")


def _metadata_source(document: Any) -> Hashable | None:
    source: Hashable | None = document.metadata.get("source")
    return source


class Orders(Protocol):
    """What adapters need of an orderer: `Orderer`, or a wrapper around it. Its methods are described there."""

    @property
    def settings(self) -> Settings: ...

    def order(
        self,
        documents: Iterable[D],
        *,
        waiting: Sequence[Iterable[D]] = (),
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        prefix_tokens: int | None = None,
    ) -> Ordering[D]: ...

    def preview(
        self, documents: Iterable[D], *, waiting: Sequence[Iterable[D]] = (), scope: Hashable = None
    ) -> list[D]: ...

    def foretell(
        self, documents: Iterable[D], *, scope: Hashable = None, prefix_tokens: int | None = None
    ) -> tuple[int, int]: ...

    def holds_prefix(self, *, scope: Hashable = None) -> bool: ...

    def order_batch(
        self,
        requests: Iterable[Iterable[D]],
        *,
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        max_wait: int | None = None,
    ) -> Batch[D]: ...

    def fall_back(self, documents: Iterable[D], error: Exception) -> Ordering[D]: ...


class Orderer:
    """Orders retrieved documents for the prefix cache of a serving engine. Thread-safe.

    `Orderer(capacity_tokens=262_144, block_size=16, prefix_tokens=64)` takes every field of `Settings` by name; or
    pass `settings`. Documents are `Document`s, or any objects if `key` (content identity, hashable) and `tokens`
    (length in the prompt, in tokens) are given; `group` names the group of a document for `keep_groups` (by default
    its metadata's "source").

    `Orderer.for_vllm` asks a live server instead. What it does can be done by hand: `token_ids` (a document's tokens in
    the prompt) and `prefix_ids` (the tokens in front of the documents) let the orderer find its documents among the
    `blocks` of an engine, which somebody keeps up to date (`ragorder.adapters.kv_events`). A scope that is a string is
    then the `cache_salt` that its requests are sent with, and None is for requests without one.

    Raises pydantic.ValidationError for settings that are wrong. Ordering itself never raises: after an internal error
    the documents stay in retrieval order, `fallbacks` counts it, and the first one is logged.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        key: Callable[[Any], Hashable] | None = None,
        tokens: Callable[[Any], int] | None = None,
        group: Callable[[Any], Hashable | None] | None = None,
        token_ids: Callable[[Any], Sequence[int]] | None = None,
        prefix_ids: Sequence[int] = (),
        blocks: EngineBlocks | None = None,
        **options: Any,
    ) -> None:
        if settings is not None and options:
            raise TypeError(f"give either settings or options, not both: {', '.join(sorted(options))}")
        self.settings = settings if settings is not None else Settings(**options)
        self.fallbacks = 0
        self._key = key or _document_key
        self._tokens = tokens or _document_tokens
        self._check_tokens = tokens is not None
        self._group = group or _metadata_source
        self._by_group = self.settings.keep_groups
        self._token_ids = token_ids if blocks is not None else None
        self._contents = Contents(blocks, prefix_ids) if blocks is not None else None
        self.events: Any = None
        self._lock = Lock()
        self._scopes: OrderedDict[Hashable, Scope] = OrderedDict()
        self._evicted_blocks = 0

    @classmethod
    def for_vllm(
        cls,
        base_url: str,
        *,
        builder: PromptBuilder | None = None,
        settings: Settings | None = None,
        api_key: str | None = None,
        **options: Any,
    ) -> Self:
        """An orderer for the vLLM server at `base_url`, which knows what its cache holds.

        Block size and capacity come from the server's `/metrics`, unless they are given. With `builder`, with
        `events_endpoint` and better with `replay_endpoint` in the settings, the server's KV events keep the residency
        exact (`events` is their subscriber). Whatever of this is missing is warned of once, and the residency mirrors
        a least recently used cache instead. Close it, or use it in a `with` block.

        Raises ImportError naming the extra to install, and ValueError or RuntimeError for an address that is none.
        """
        from ragorder.adapters.connect import connect

        if settings is not None and options:
            raise TypeError(f"give either settings or options, not both: {', '.join(sorted(options))}")
        return connect(cls, base_url, builder=builder, settings=settings or Settings(**options), api_key=api_key)

    @property
    def tree_size(self) -> int:
        """Nodes in the knowledge trees of all scopes."""
        with self._lock:
            return sum(scope.tree.size for scope in self._scopes.values())

    @property
    def evicted_blocks(self) -> int:
        """KV blocks that were counted as evicted so far, in all scopes."""
        with self._lock:
            return self._evicted_blocks + sum(scope.mirror.evicted_blocks for scope in self._scopes.values())

    def close(self) -> None:
        """Stop following the engine's events. The orderer goes on with the mirror, which begins anew."""
        if self.events is None or self._contents is None:
            return
        self.events.close()
        self._contents = self._token_ids = None
        with self._lock:
            while self._scopes:
                self._close(self._scopes.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def order(
        self,
        documents: Iterable[D],
        *,
        waiting: Sequence[Iterable[D]] = (),
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        prefix_tokens: int | None = None,
    ) -> Ordering[D]:
        """Order one request's documents, given in retrieval order, and count them as in flight.

        `waiting` holds the documents of requests that already wait, next first: what this request adds to the cache is
        then laid out for them. `scope` separates caches that share nothing: model, prompt template, tenant.
        `suffix_tokens` is the length of this request's question and answer, if it is known better than in the settings;
        `prefix_tokens` that of what stands in front of the documents in this scope, which its first request tells.
        """
        given = list(documents)
        try:
            request = self._read(given)
            backlog = [frozenset(map(self._key, others)) for others in waiting] if waiting else ()
            if suffix_tokens is not None:
                suffix_tokens = _length(suffix_tokens)
            if prefix_tokens is not None:
                prefix_tokens = _length(prefix_tokens)
        except Exception as error:
            return self.fall_back(given, error)
        try:
            with self._lock:
                return self._scope(scope, prefix_tokens).order(request, backlog, suffix_tokens)
        except Exception as error:
            self._forget(scope)
            return self.fall_back(given, error)

    def preview(
        self, documents: Iterable[D], *, waiting: Sequence[Iterable[D]] = (), scope: Hashable = None
    ) -> list[D]:
        """The documents as `order` would place them now. Nothing is in flight, and nothing is learnt of the request:
        for what is computed before anybody knows whether it will be wanted."""
        given = list(documents)
        try:
            request = self._read(given)
            backlog = [frozenset(map(self._key, others)) for others in waiting] if waiting else ()
            with self._lock, self._looking_at(scope) as looked_at:
                permutation = looked_at.preview(request, backlog)
        except Exception as error:
            return self.fall_back(given, error).documents
        return [given[rank] for rank in permutation]

    def foretell(
        self, documents: Iterable[D], *, scope: Hashable = None, prefix_tokens: int | None = None
    ) -> tuple[int, int]:
        """What `order` would foretell of a request now: its cached tokens, and its tokens up to the end of the last
        document. Nothing is recorded, and no order is made: for a request that waits for its turn.

        `prefix_tokens` is as for `order`. After an internal error nothing is cached, and documents have no length.
        """
        try:
            request = self._read(list(documents))
            with self._lock:
                if (known := self._scopes.get(scope)) is not None:
                    return known.foretell(request)
            prefix = self.settings.prefix_tokens if prefix_tokens is None else _length(prefix_tokens)
            return 0, prefix + sum(request.tokens)
        except Exception as error:
            self._report(error)
            return 0, 0

    def holds_prefix(self, *, scope: Hashable = None) -> bool:
        """Whether the engine is expected to hold what stands in front of the documents, or to be computing it. True
        where it is shorter than a block, of which nothing can be held."""
        try:
            with self._lock, self._looking_at(scope) as looked_at:
                return looked_at.holds_prefix()
        except Exception as error:
            self._report(error)
            return True

    def order_batch(
        self,
        requests: Iterable[Iterable[D]],
        *,
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        max_wait: int | None = None,
    ) -> Batch[D]:
        """Order the documents of many requests *and* the requests, so that those that share follow one another.

        The result gives the orderings in serving order, each with its `index` in `requests`; each counts as in flight
        once it is taken. No request is served more than `max_wait` places behind where it arrived (None: no bound).
        """
        given = [list(documents) for documents in requests]
        if max_wait is not None and max_wait < 0:
            raise ValueError(f"max_wait must not be negative, got {max_wait}")
        try:
            read = [self._read(documents) for documents in given]
            if suffix_tokens is not None:
                suffix_tokens = _length(suffix_tokens)
            planned = self._plan(read, scope, len(read) if max_wait is None else max_wait + 1)
        except Exception as error:
            self._report(error)
            return Batch(range(len(given)), lambda place: _unordered(given[place], place))

        def start(place: int) -> Ordering[D]:
            number, permutation = planned[place]
            try:
                with self._lock:
                    ordering = self._scope(scope).start(read[number], permutation, suffix_tokens)
            except Exception as error:
                self._forget(scope)
                ordering = self.fall_back(given[number], error)
            ordering.index = number
            return ordering

        return Batch([number for number, _ in planned], start)

    def fall_back(self, documents: Iterable[D], error: Exception) -> Ordering[D]:
        """Retrieval order after an error, which is counted, and logged if it is the first. For adapters, whose reading
        of their documents may fail. Raises the error instead in strict mode."""
        self._report(error)
        return _unordered(list(documents))

    def twin(self, **changes: Any) -> Orderer:
        """An orderer of the same documents with other settings and trees of its own, which nobody tells what the engine
        holds: to compare with."""
        tokens = self._tokens if self._check_tokens else None
        settings = self.settings.model_copy(update=changes)
        return Orderer(settings, key=self._key, tokens=tokens, group=self._group)

    def _plan(self, requests: list[Request[D]], scope: Hashable, window: int) -> list[tuple[int, list[int]]]:
        """(request, permutation of its ranks) in serving order; nobody leaves their window of so many requests.

        Planning may take seconds: the lock is held only to look at the tree, one request at a time.
        """
        planned = []
        for first in range(0, len(requests), max(1, window)):
            batch = requests[first : first + window]
            cached = []
            for request in batch:
                with self._lock:
                    cached.append(self._scope(scope).cached_path(request))
            tokens = {
                key: length for request in batch for key, length in zip(request.keys, request.tokens, strict=True)
            }
            for number, order in plan_backlog([request.keys for request in batch], tokens, cached):
                ranks = batch[number].ranks
                planned.append((first + number, [ranks[key] for key in order]))
        return planned

    def _read(self, given: list[D]) -> Request[D]:
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
            _length(min(tokens))
        token_ids = list(map(self._token_ids, given)) if self._token_ids is not None else ()
        return Request(given, keys, ranks, tokens, groups, token_ids, estimated)

    def _scope(self, name: Hashable, prefix_tokens: int | None = None) -> Scope:
        scope = self._scopes.get(name)
        if scope is None:
            settings = self.settings
            if prefix_tokens is not None:
                settings = settings.model_copy(update={"prefix_tokens": prefix_tokens})
            scope = self._scopes[name] = Scope(name, settings, self._lock, self._report, self._contents)
            if len(self._scopes) > self.settings.max_scopes:
                self._close(self._scopes.popitem(last=False)[1])
        elif len(self._scopes) > 1:
            self._scopes.move_to_end(name)
        return scope

    @contextmanager
    def _looking_at(self, name: Hashable) -> Iterator[Scope]:
        """The scope as it is; one that nobody has used yet is not kept."""
        known = self._scopes.get(name)
        scope = known or Scope(name, self.settings, self._lock, self._report, self._contents)
        try:
            yield scope
        finally:
            if known is None:
                scope.close()

    def _forget(self, scope: Hashable) -> None:
        """An error may have left the scope's tree half changed: start it anew."""
        with suppress(TypeError), self._lock:
            forgotten = self._scopes.pop(scope, None)
            if forgotten is not None:
                self._close(forgotten)

    def _close(self, scope: Scope) -> None:
        self._evicted_blocks += scope.mirror.evicted_blocks
        scope.close()

    def _report(self, error: Exception) -> None:
        if self.settings.strict:
            raise error
        self.fallbacks += 1
        if self.fallbacks == 1:
            # The message of an error may quote a document: only its type is logged.
            _logger.warning("ordering failed with %s: retrieval order is kept, and counted", type(error).__name__)


def _unordered(given: list[D], index: int = 0) -> Ordering[D]:
    ordering = Ordering(given, list(range(len(given))))
    ordering.index = index
    ordering.fallback = True
    return ordering


def _length(tokens: Any) -> int:
    length = index(tokens)
    if length < 0:
        raise ValueError(f"a length in tokens must not be negative, got {length}")
    return length


@dataclass(frozen=True, slots=True)
class _Repeat:
    """The key of a document that stands in a request once more."""

    key: Hashable
    number: int


def _number_repeats(keys: list[Hashable]) -> list[Hashable]:
    """Tell the second and later occurrences of a document apart, so that each has a place of its own."""
    seen: dict[Hashable, int] = {}
    numbered: list[Hashable] = []
    for key in keys:
        count = seen.get(key, 0)
        seen[key] = count + 1
        numbered.append(_Repeat(key, count) if count else key)
    return numbered
