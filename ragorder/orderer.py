"""The orderer: places each request's documents so that they extend a prefix that the engine still holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ragorder import _deferred, _fork
from ragorder._batch_plan import plan_batch
from ragorder._lock import DeferringLock
from ragorder._scope import Contents, Request, Scope
from ragorder._scopes import Scopes
from ragorder.batch import Batch
from ragorder.degraded import Degradations
from ragorder.document import Estimate, check_readable
from ragorder.ordering import Ordering
from ragorder.settings import Settings
from ragorder.trie.residency import EngineBlocks, LearnedLengths

if TYPE_CHECKING:
    from ragorder.prompt import PromptBuilder

__all__ = ["Orderer"]

D = TypeVar("D")
T = TypeVar("T")

_UNSALTED = (
    "with KV events a scope must be a string, the cache_salt of its requests, or None: others are followed by a mirror"
)
_logger = logging.getLogger("ragorder")
_document_key = attrgetter("key")
_document_tokens = attrgetter("token_count")


def _metadata_source(document: Any) -> Hashable | None:
    source: Hashable | None = document.metadata.get("source")
    return source


class Orderer:
    """Orders retrieved documents for the prefix cache of a serving engine. Thread-safe.

    `Orderer(capacity_tokens=262_144, block_size=16, prefix_tokens=64)` takes every field of `Settings` by name; or
    pass `settings`. Documents are `Document`s, or any objects if `key` (content identity, hashable) and `tokens`
    (length in the prompt, in tokens) are given; `group` names the group of a document for `keep_groups` (by default
    its metadata's "source").

    `Orderer.for_vllm` asks a live server instead. What it does can be done by hand: `token_ids` (a document's tokens in
    the prompt) and `prefix_ids` (the tokens in front of the documents) let the orderer find its documents among the
    `blocks` of an engine, kept up to date by `ragorder.adapters.vllm.kv_events`. A scope that is a string is then the
    `cache_salt` that its requests are sent with, and None is for requests without one.

    Raises pydantic.ValidationError for settings that are wrong. Ordering raises TypeError for objects that are no
    documents (strings, dictionaries, pairs with a score) where `key` and `tokens` do not say how to read them, and
    nothing else: after an internal error the documents stay in retrieval order, `fallbacks` counts it, and the first
    one is logged and warned of (`DegradedWarning`). `degraded`, and `repr`, say what the orderer has to do without.
    A copy of it, by `copy`, `pickle` or a process pool, starts cold: same settings and callables, no trees, no events.
    With `strict=True` it raises its internal errors instead: for tests, and while an application is being set up.
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
        self._callables: dict[str, Any] = {"key": key, "tokens": tokens, "group": group}
        self.fallbacks = 0
        self._degradations = Degradations()
        self._key = key or _document_key
        self._tokens = tokens or _document_tokens
        self._check_tokens = tokens is not None
        self._group = group or _metadata_source
        self._by_group = self.settings.keep_groups
        read = [("key", "key", key), ("token_count", "tokens", tokens)]
        if self._by_group:
            read.append(("metadata", "group", group))
        self._wanted = {attribute: argument for attribute, argument, given in read if given is None}
        self._token_ids = token_ids if blocks is not None else None
        self._contents = Contents(blocks, prefix_ids) if blocks is not None else None
        self.events: Any = None
        self._lock = DeferringLock(self._report)
        self._lengths = LearnedLengths()
        self._scopes = Scopes(self.settings, self._lock.defer, self._report)
        _fork.follow(self)

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

        Block size and capacity come from the server's `/metrics`, unless they are given. With `events_endpoint` and
        better with `replay_endpoint` in the settings, the server's KV events keep the residency exact, and tell what
        other processes have ordered (`events` is their subscriber); this needs `builder`, with the served model's
        tokenizer. Otherwise the residency mirrors a least recently used cache. What the server lacks, or stops to
        tell, is a `DegradedWarning`, once, and stays in `degraded`. Close the orderer, or use it in a `with` block.

        Raises ImportError naming the extra to install, RuntimeError if no server answers at the address, and ValueError
        for an endpoint that is none, or whose events could not be used.
        """
        from ragorder.adapters.vllm.connect import connect

        if settings is not None and options:
            raise TypeError(f"give either settings or options, not both: {', '.join(sorted(options))}")
        return connect(cls, base_url, builder=builder, settings=settings or Settings(**options), api_key=api_key)

    def __repr__(self) -> str:
        settings = self.settings
        capacity = "unlimited" if settings.capacity_tokens is None else settings.capacity_tokens
        degraded = f", degraded: {'; '.join(self.degraded)}" if self.degraded else ""
        return (
            f"{type(self).__name__}(capacity_tokens={capacity}, block_size={settings.block_size}, "
            f"residency={self._residency}{degraded})"
        )

    @property
    def _residency(self) -> str:
        """How is known what the engine holds."""
        if self.settings.residency == "none":
            return "none"
        if self._contents is not None:
            return "KV events"
        return "LRU mirror with feedback" if self.settings.feedback else "LRU mirror"

    @property
    def degraded(self) -> tuple[str, ...]:
        """What the orderer has to do without, in the order in which it was found. `DegradedWarning` told of each."""
        return self._degradations.reasons

    def degrade(self, reason: str) -> None:
        """Add a reason to `degraded`, and warn of it once. For adapters; never raises. No document's text, no key and
        no tenant may stand in it."""
        self._degradations.add(reason)

    @property
    def tree_size(self) -> int:
        """Nodes in the knowledge trees of all scopes."""
        return self._lock.run(lambda: sum(scope.tree.size for scope in dict.values(self._scopes)))

    @property
    def evicted_blocks(self) -> int:
        """KV blocks that were counted as evicted so far, in all scopes."""
        return self._lock.run(lambda: self._scopes.evicted_blocks)

    def close(self) -> None:
        """Stop following the engine's events. The orderer goes on with the mirror, which begins anew."""
        if self.events is None or self._contents is None:
            return
        self.events.close()
        self._contents = self._token_ids = None
        self._lock.run(self._scopes.clear)

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
        then laid out for them. `scope` separates requests that share no prefix: model, prompt template, tenant. All
        scopes share the engine's capacity: what was used least recently goes first, whichever scope it belongs to.
        `suffix_tokens` is the length of this request's question and answer, if it is known better than in the settings;
        `prefix_tokens` that of what stands in front of the documents in this scope, which its first request tells.
        """
        given = list(documents)
        if self._contents is not None and scope is not None and not (isinstance(scope, str) and scope):
            self.degrade(_UNSALTED)
        try:
            request = self._read(given)
            backlog = [frozenset(map(self._key, others)) for others in waiting] if waiting else ()
            if suffix_tokens is not None:
                suffix_tokens = _length(suffix_tokens)
            if prefix_tokens is not None:
                prefix_tokens = _length(prefix_tokens)
        except Exception as error:
            self._refuse(given, error)
            return self.fall_back(given, error)
        try:
            return self._enter(scope, lambda known: known.order(request, backlog, suffix_tokens), prefix_tokens)
        except Exception as error:
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
            permutation = self._look(scope, lambda known: known.preview(request, backlog))
        except Exception as error:
            self._refuse(given, error)
            return self.fall_back(given, error).documents
        return [given[rank] for rank in permutation]

    def predict_cached_tokens(
        self, documents: Iterable[D], *, scope: Hashable = None, prefix_tokens: int | None = None
    ) -> tuple[int, int]:
        """What `order` would predict of a request now: its cached tokens, and its tokens up to the end of the last
        document. Nothing is recorded, and no order is made: for a request that waits for its turn.

        `prefix_tokens` is as for `order`. After an internal error nothing is cached, and documents have no length.
        """
        given = list(documents)
        try:
            request = self._read(given)
            prefix = None if prefix_tokens is None else _length(prefix_tokens)
            return self._look(scope, lambda known: known.predict_cached_tokens(request), prefix)
        except Exception as error:
            self._refuse(given, error)
            self._report(error)
            return 0, 0

    def holds_prefix(self, *, scope: Hashable = None) -> bool:
        """Whether the engine is expected to hold what stands in front of the documents, or to be computing it. True
        where it is shorter than a block, of which nothing can be held."""
        try:
            return self._look(scope, Scope.holds_prefix)
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
        once it is taken. No request is served more than `max_wait` places behind where it arrived (None: no bound; 0:
        each is ordered as it comes, as by `order`). Never expected to find less in the cache than `order` for one
        request after the other.

        Raises ValueError for a negative `max_wait`.
        """
        given = [list(documents) for documents in requests]
        if max_wait is not None and max_wait < 0:
            raise ValueError(f"max_wait must not be negative, got {max_wait}")
        try:
            read = [self._read(documents) for documents in given]
            if suffix_tokens is not None:
                suffix_tokens = _length(suffix_tokens)
            steps = plan_batch(self._copy_of(scope, read), read, max_wait, suffix_tokens)
        except Exception as error:
            for documents in given:
                self._refuse(documents, error)
            self._report(error)
            return Batch(range(len(given)), lambda place: _unordered(given[place], place))

        def start(place: int) -> Ordering[D]:
            number, permutation = steps[place]
            try:
                ordering = self._enter(
                    scope,
                    lambda known: (
                        known.order(read[number], (), suffix_tokens)
                        if permutation is None
                        else known.start(read[number], permutation, suffix_tokens)
                    ),
                )
            except Exception as error:
                ordering = self.fall_back(given[number], error)
            ordering.index = number
            return ordering

        return Batch([step.number for step in steps], start)

    def fall_back(self, documents: Iterable[D], error: Exception) -> Ordering[D]:
        """Retrieval order after an error, which is counted, and logged if it is the first. For adapters, whose reading
        of their documents may fail. Raises the error instead in strict mode."""
        self._report(error)
        return _unordered(list(documents))

    def clone(self, **changes: Any) -> Orderer:
        """An orderer of the same documents with other settings and trees of its own, which nobody tells what the engine
        holds: to compare with. Lengths that the one or the other learns from the engine's reports hold for both."""
        clone = Orderer(self.settings.model_copy(update=changes), **self._callables)
        clone._lengths = self._lengths
        return clone

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "follows": self._contents is not None, **self._callables}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, pickled or not, starts cold: with the settings and the callables, and without trees and events."""
        follows = state.pop("follows")
        Orderer.__init__(self, **state)
        if follows:
            self.degrade("a copy follows no KV events: the residency is a mirror (Orderer.for_vllm follows them)")

    def _copy_of(self, name: Hashable, requests: Iterable[Request[D]]) -> Scope:
        """A copy of a scope to plan on, which may take seconds: others wait only while it is copied."""
        if self._contents is not None:
            # What others had computed for each request is looked for one request at a time.
            for request in requests:
                self._enter(name, partial(Scope.cached_path, request=request))
        return self._look(name, Scope.copy)

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

    def _enter(self, name: Hashable, work: Callable[[Scope], T], prefix_tokens: int | None = None) -> T:
        """What `work` gives in a scope, alone."""
        return self._lock.run(self._work_in, name, work, prefix_tokens)

    def _look(self, name: Hashable, work: Callable[[Scope], T], prefix_tokens: int | None = None) -> T:
        """The same in a scope as it is; one that nobody has used yet is not kept."""
        return self._lock.run(self._look_at, name, work, prefix_tokens)

    def _work_in(self, name: Hashable, work: Callable[[Scope], T], prefix_tokens: int | None) -> T:
        scopes = self._scopes
        scope = scopes.get(name)
        if scope is None or not scope.whole:
            scope = scopes.add(self._make_scope(name, prefix_tokens))
        elif len(scopes) > 1:
            scopes.move_to_end(name)
        # An error, or an interrupt, may leave the tree half changed: then nothing says that it is whole again.
        scope.whole = False
        result = work(scope)
        scopes.changed(scope)
        scope.whole = True
        return result

    def _look_at(self, name: Hashable, work: Callable[[Scope], T], prefix_tokens: int | None) -> T:
        known = self._scopes.get(name)
        if known is not None and known.whole:
            known.whole = False
            result = work(known)
            self._scopes.changed(known)
            known.whole = True
            return result
        scope = self._make_scope(name, prefix_tokens)
        try:
            return work(scope)
        finally:
            scope.close()

    def _make_scope(self, name: Hashable, prefix_tokens: int | None) -> Scope:
        settings = self.settings
        if prefix_tokens is not None:
            settings = settings.model_copy(update={"prefix_tokens": prefix_tokens})
        return Scope(name, settings, self._scopes, self._contents, self._lengths.of(name))

    def after_fork(self) -> None:
        """In a child process: no other thread goes on, so what it was changing is not whole, and no events come."""
        if self._lock.after_fork() or self._contents is not None:
            self._scopes = Scopes(self.settings, self._lock.defer, self._report)
        if self._contents is not None:
            self._contents = self._token_ids = None
            reason = "forked: KV events are followed in the parent process alone, here the residency is a mirror"
            _deferred.defer(partial(self.degrade, reason))

    def _refuse(self, given: list[Any], error: Exception) -> None:
        """Raise TypeError if the error comes of objects that are no documents: it would come with every request."""
        if isinstance(error, AttributeError):
            check_readable(given, self._wanted)

    def _report(self, error: Exception) -> None:
        if self.settings.strict:
            raise error
        self.fallbacks += 1
        if self.fallbacks == 1:
            # The message of an error may quote a document: only its type is logged.
            _logger.warning("ordering failed with %s: retrieval order is kept, and counted", type(error).__name__)
            self.degrade(
                f"ordering failed with {type(error).__name__}: retrieval order is kept, and counted in `fallbacks` "
                "(Orderer(strict=True) raises the error)"
            )


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
