"""The orderer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeVar, TypeVarTuple, Unpack

from ragorder.common.degraded import Degradations
from ragorder.common.lock import DeferringLock, defer, follow
from ragorder.ordering import Batch, Ordering
from ragorder.prompt import PromptBuilder
from ragorder.scope.request import USUAL, Lengths, OrderRequest, RequestReader, read_lengths
from ragorder.scope.scope import EngineContents, Scope
from ragorder.scope.scopes import Scopes
from ragorder.scope.tiers import EngineTiers
from ragorder.settings import OrdererOptions, Settings, either
from ragorder.trie.histories import History
from ragorder.trie.residency import LearnedLengths, Pool

if TYPE_CHECKING:
    from ragorder.clouds import CacheRules, Prices, Provider
    from ragorder.scope.cloud_scope import CloudCache, CloudScopes, RulesOptions
    from ragorder.topic import Topics
    from ragorder.trie.residency.blocks import EngineBlocks

D = TypeVar("D")
H = TypeVar("H")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_UNSALTED = (
    "with KV events a scope must be the cache_salt of its requests (a string) or None; other scopes use an LRU mirror"
)
_FUSED_HISTORY = (
    "reuse='fused' does not follow conversations: documents after a history count as recomputed. Give reuse='exact'"
)
_logger = logging.getLogger("ragorder")


class Orderer:
    """Orders retrieved documents for the prefix cache of a serving engine. Thread-safe.

        orderer = Orderer(capacity_tokens=262_144, block_size=16)
        ordering = orderer.order(documents)  # in retrieval order
        answer = generate(question, ordering.documents)
        ordering.confirm(answer.cached_tokens)

    Options are the fields of `Settings`, above all `capacity_tokens`, the size of the engine's KV cache. Documents are
    `Document`s, or objects with the callables `key` (content identity), `tokens` (length in the prompt) and `group`
    (for `keep_groups`).

    Without `Orderer.for_vllm`, `token_ids` (a document's tokens) and `prefix_ids` (those before the documents; None:
    `lengths` has them, as `KnownTokens`) locate documents among a live engine's `blocks`. A scope is then the requests'
    `cache_salt`.

    Ordering raises only TypeError, for objects that are not documents. After an internal error, counted in `fallbacks`,
    retrieval order stays; `strict=True` raises it. A copy (copy, pickle, process pool) starts empty.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        key: Callable[[Any], Hashable] | None = None,
        tokens: Callable[[Any], int] | None = None,
        group: Callable[[Any], Hashable | None] | None = None,
        token_ids: Callable[[Any], Sequence[int]] | None = None,
        prefix_ids: Sequence[int] | None = (),
        blocks: EngineBlocks | None = None,
        topics: Topics | None = None,
        cloud: CloudCache | None = None,
        **options: Unpack[OrdererOptions],
    ) -> None:
        self.settings = either(settings, options)
        self._given: dict[str, Any] = {"key": key, "tokens": tokens, "group": group, "topics": topics, "cloud": cloud}
        self.fallbacks = 0
        self._degradations = Degradations()
        follows = token_ids if blocks is not None else None
        self._reader = RequestReader(key, tokens, group, follows, by_group=self.settings.keep_groups)
        self._contents = EngineContents(blocks, prefix_ids) if blocks is not None else None
        self.events: Any = None
        self._lock = DeferringLock(self._report)
        self._topics = topics
        self._lengths = LearnedLengths()
        self._tiers = EngineTiers(self.settings)
        self._clouds: CloudScopes | None = None
        if cloud is not None:
            from ragorder.scope.cloud_scope import CloudScopes

            self._clouds = CloudScopes(cloud)
        self._scopes = Scopes(self.settings, self._tiers, self._lock.defer, blocks)
        if self._tiers.unpriced:
            self.degrade(
                "the profile has no load times: cached prefixes are compared in tokens; measure it with "
                "`ragorder profile --loads`"
            )
        follow(self)

    @classmethod
    def for_vllm(
        cls,
        base_url: str,
        *,
        builder: PromptBuilder | None = None,
        settings: Settings | None = None,
        api_key: str | None = None,
        **options: Unpack[OrdererOptions],
    ) -> Self:
        """Return an orderer for a vLLM server, with block size and capacity from its `/metrics`.

        With `events_endpoint`, better also `replay_endpoint`, KV events keep the residency exact; this needs `builder`
        with the model's tokenizer. Each missing feature of the server is a `DegradedWarning`.

        Raises ImportError naming the extra, RuntimeError if no server answers, ValueError for an unusable endpoint.
        """
        from ragorder.adapters.vllm.connect import connect

        return connect(cls, base_url, builder=builder, settings=either(settings, options), api_key=api_key)

    @classmethod
    def for_cloud(
        cls,
        provider: Provider,
        *,
        model: str,
        ttl: str | None = None,
        builder: PromptBuilder | None = None,
        **options: Unpack[RulesOptions],
    ) -> Self:
        """Return an orderer for a cloud whose cache resumes a prompt only at breakpoints of earlier prompts.

        `ordering.breakpoints` has those to set (docs/clouds.md). `ttl`: "5m", "1h". Options as for `for_rules`.
        """
        from ragorder.clouds import cache_rules

        return cls.for_rules(cache_rules(provider, model, ttl), model=model, builder=builder, **options)

    @classmethod
    def for_rules(
        cls,
        rules: CacheRules,
        *,
        model: str | None = None,
        prices: Prices | str | PathLike[str] | None = None,
        builder: PromptBuilder | None = None,
        key: Callable[[Any], Hashable] | None = None,
        tokens: Callable[[Any], int] | None = None,
        group: Callable[[Any], Hashable | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: Settings | None = None,
        **options: Unpack[OrdererOptions],
    ) -> Self:
        """Return an orderer for a cache that resumes a prompt only where `rules` say, such as a hybrid model's.

        `model` is looked up in `prices`. `builder` knows the lengths of documents and system prompt.
        """
        from ragorder.scope.cloud_scope import CloudCache, cloud_settings

        if tokens is None and builder is not None:
            tokens = builder.document_tokens
        known = cloud_settings(either(settings, options), None if builder is None else builder.prefix_tokens)
        return cls(known, key=key, tokens=tokens, group=group, cloud=CloudCache.of(rules, model, prices, clock))

    def __repr__(self) -> str:
        settings = self.settings
        capacity = "unlimited" if settings.capacity_tokens is None else str(settings.capacity_tokens)
        if "capacity_tokens" not in settings.model_fields_set:
            capacity += " (assumed: give the engine's)"
        degraded = f", degraded: {'; '.join(self.degraded)}" if self.degraded else ""
        return (
            f"{type(self).__name__}(capacity_tokens={capacity}, block_size={settings.block_size}, "
            f"residency={self._residency}{degraded})"
        )

    @property
    def _residency(self) -> str:
        if self._clouds is not None:
            return f"rules ({self._clouds.cache.model.rules.name})"
        if self.settings.residency == "none":
            return "none"
        if self._contents is not None:
            return "KV events"
        return "LRU mirror with feedback" if self.settings.feedback else "LRU mirror"

    @property
    def degraded(self) -> tuple[str, ...]:
        """Reasons for doing less than configured, oldest first. Each was a `DegradedWarning`."""
        return self._degradations.reasons

    def degrade(self, reason: str) -> None:
        """Add a reason to `degraded`, with one warning. Never raises. It must not name a document, key or tenant."""
        self._degradations.add(reason)

    @property
    def tree_size(self) -> int:
        return self._lock.run(lambda: sum(scope.tree.size for scope in dict.values(self._scopes)))

    @property
    def evicted_blocks(self) -> int:
        return self._lock.run(lambda: self._scopes.pool.evicted_blocks)

    def close(self) -> None:
        """Stop following the engine's events. Ordering continues with an empty mirror."""
        if self.events is None or self._contents is None:
            return
        self.events.close()
        self._contents = self._reader.token_ids = None
        self._lock.run(self._scopes.stop_following)

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
        lengths: Lengths = USUAL,
        history: History | None = None,
    ) -> Ordering[D]:
        """Order one request's documents, given in retrieval order, and count them as in flight.

        - `waiting`: documents of each waiting request, next first, to order for
        - `scope` separates requests that share no prefix: model, prompt template, tenant
        - `lengths`: tokens before and after the documents
        - `history`: a conversation's messages (docs/conversations.md); `History()` for its first turn
        """
        given, contents = list(documents), self._contents  # Another thread may close the orderer.
        if history is not None and _checked(history).segments and self.settings.reuse == "fused":
            self.degrade(_FUSED_HISTORY)
        follows = contents is not None and contents.prefix_ids is not None
        if follows and scope is not None and not (isinstance(scope, str) and scope):
            self.degrade(_UNSALTED)
        try:
            request = self._reader.read(given)
            backlog = self._reader.read_waiting(waiting)
            prefix, suffix = lengths if lengths is USUAL else read_lengths(lengths)
            if history is not None and history.sent is not None:
                request.send_as(history.sent)
        except Exception as error:
            self._reader.refuse(given, error)
            return self.fall_back(given, error)
        try:
            ordering = self._lock.run(self._work_in, scope, prefix, Scope.order, request, backlog, suffix, history)
        except Exception as error:
            return self.fall_back(given, error)
        self._ordered(given, ordering, scope, lengths, history)
        return ordering

    def preview(
        self,
        documents: Iterable[D],
        *,
        waiting: Sequence[Iterable[D]] = (),
        scope: Hashable = None,
        history: History | None = None,
    ) -> list[D]:
        """Return the documents in the order of `order`, recording nothing."""
        given, history = list(documents), _checked(history)
        try:
            request = self._reader.read(given)
            backlog = self._reader.read_waiting(waiting)
            permutation = self._lock.run(self._look_at, scope, None, Scope.preview, request, backlog, history)
        except Exception as error:
            self._reader.refuse(given, error)
            return self.fall_back(given, error).documents
        return [given[rank] for rank in permutation]

    def predict_cached_tokens(
        self,
        documents: Iterable[D],
        *,
        scope: Hashable = None,
        lengths: Lengths = USUAL,
        history: History | None = None,
    ) -> tuple[int, int]:
        """Return the cached tokens that `order` would predict, and the tokens to the end of question or documents."""
        given, history = list(documents), _checked(history)
        try:
            request = self._reader.read(given)
            prefix, _ = read_lengths(lengths)
            return self._lock.run(self._look_at, scope, prefix, Scope.predict_cached_tokens, request, history)
        except Exception as error:
            self._reader.refuse(given, error)
            self._report(error)
            return 0, 0

    def holds_prefix(self, *, scope: Hashable = None) -> bool:
        try:
            return self._lock.run(self._look_at, scope, None, Scope.holds_prefix)
        except Exception as error:
            self._report(error)
            return True

    def has_lost(self, history: History, *, scope: Hashable = None) -> bool:
        """Return whether the engine should have evicted a conversation. False for an unknown history."""
        history = _checked(history)
        try:
            return self._lock.run(self._look_at, scope, None, Scope.has_lost, history)
        except Exception as error:
            self._report(error)
            return False

    def topic(self, documents: Iterable[Any], *, scope: Hashable = None) -> str | None:
        """Count a request's documents and return their topic (see `Topics`), or None without documents."""
        given = list(documents)
        try:
            if self._topics is None:
                from ragorder.topic import Topics

                self._topics = Topics()
            return self._topics.of(self._reader.read_keys(given), scope)
        except Exception as error:
            self._reader.refuse(given, error)
            self._report(error)
            return None

    def record(
        self,
        documents: Iterable[Any],
        *,
        permutation: Sequence[int] | None = None,
        scope: Hashable = None,
        lengths: Lengths = USUAL,
    ) -> None:
        """Count a request that another process served on the same engine. Not needed with KV events.

        Without its ordering's `permutation` the documents are in prompt order.
        """
        given = list(documents)
        try:
            self._record(self._reader.read(given), permutation, scope, lengths)
        except Exception as error:
            self._reader.refuse(given, error)
            self._report(error)

    def order_batch(
        self,
        requests: Iterable[Iterable[D]],
        *,
        scope: Hashable = None,
        lengths: Lengths = USUAL,
        max_wait: int | None = None,
    ) -> Batch[D]:
        """Order requests and their documents, so that requests that share documents are adjacent.

        A request is at most `max_wait` places late. Predicted hits are at least those of `order` for each in turn.
        """
        given = [list(documents) for documents in requests]
        if max_wait is not None and max_wait < 0:
            raise ValueError(f"max_wait must not be negative, got {max_wait}")
        from ragorder.scope.batch_plan import plan_batch

        try:
            read = [self._reader.read(documents) for documents in given]
            prefix, suffix = read_lengths(lengths)
            steps = plan_batch(partial(self._copy_of, scope, prefix, read), read, max_wait, suffix)
        except Exception as error:
            for documents in given:
                self._reader.refuse(documents, error)
            self._report(error)
            return Batch(range(len(given)), lambda place: _unordered(given[place], place))

        def start(place: int) -> Ordering[D]:
            number, permutation = steps[place]
            request = read[number]
            try:
                if permutation is None:
                    ordering = self._lock.run(self._work_in, scope, prefix, Scope.order, request, (), suffix, None)
                else:
                    ordering = self._lock.run(self._work_in, scope, prefix, Scope.start, request, permutation, suffix)
                self._ordered(given[number], ordering, scope, lengths, None)
            except Exception as error:
                ordering = self.fall_back(given[number], error)
            ordering.index = number
            return ordering

        return Batch([step.number for step in steps], start)

    def fall_back(self, documents: Iterable[D], error: Exception) -> Ordering[D]:
        """Count an adapter's error and return retrieval order; raise the error in strict mode."""
        self._report(error)
        return _unordered(list(documents))

    def clone(self, **changes: Unpack[OrdererOptions]) -> Orderer:
        """Return an orderer with changed settings, empty trees and no KV events. Learned lengths are shared."""
        clone = Orderer(self.settings.changed(**changes), **self._given)
        clone._lengths = self._lengths
        return clone

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "follows": self._contents is not None, **self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        follows = state.pop("follows")
        Orderer.__init__(self, **state)
        if follows:
            self.degrade("a copy uses an LRU mirror instead of KV events: call Orderer.for_vllm to follow them")

    def _ordered(
        self, documents: list[D], ordering: Ordering[D], scope: Hashable, lengths: Lengths, history: History | None
    ) -> None: ...

    def _record(
        self, request: OrderRequest[Any], permutation: Sequence[int] | None, scope: Hashable, lengths: Lengths
    ) -> None:
        places = list(range(len(request.keys))) if permutation is None else list(permutation)
        if sorted(places) != list(range(len(request.keys))):
            raise ValueError("permutation must have each rank of the documents exactly once")
        prefix, suffix = read_lengths(lengths)
        self._lock.run(self._work_in, scope, prefix, Scope.record, request, places, suffix)

    def _copy_of(self, name: Hashable, prefix_tokens: int | None, requests: Iterable[OrderRequest[D]]) -> Scope:
        if self._contents is not None:
            # Prefixes of other processes are discovered for one request at a time.
            for request in requests:
                self._lock.run(self._work_in, name, prefix_tokens, Scope.cached_path, request)
        copy: Scope = self._lock.run(self._look_at, name, prefix_tokens, lambda scope: scope.copy())
        return copy

    def _work_in(
        self, name: Hashable, prefix_tokens: int | None, work: Callable[[Scope, *Arguments], T], *arguments: *Arguments
    ) -> T:
        scopes = self._scopes
        scope = scopes.get(name)
        if scope is None or not scope.whole:
            scope = scopes.add(self._make_scope(name, scopes.pool, prefix_tokens))
        elif len(scopes) > 1:
            scopes.move_to_end(name)
        # After an error or an interrupt the tree may be half changed, and `whole` stays False.
        mirror = scope.mirror
        mirror.whole = False
        result = work(scope, *arguments)
        scopes.changed()
        mirror.whole = True
        return result

    def _look_at(
        self, name: Hashable, prefix_tokens: int | None, work: Callable[[Scope, *Arguments], T], *arguments: *Arguments
    ) -> T:
        known = self._scopes.get(name)
        if known is not None and known.whole:
            known.whole = False
            result = work(known, *arguments)
            self._scopes.changed()
            known.whole = True
            return result
        scope = self._make_scope(name, self._scopes.make_pool(), prefix_tokens)
        try:
            return work(scope, *arguments)
        finally:
            scope.close()

    def _make_scope(self, name: Hashable, pool: Pool, prefix_tokens: int | None) -> Scope:
        settings = self.settings
        if prefix_tokens is not None:
            settings = settings.model_copy(update={"prefix_tokens": prefix_tokens})
        if self._clouds is not None:
            return self._clouds.make(name, settings, self._scopes, pool, self._lengths.of(name))
        return Scope(name, settings, self._scopes, pool, self._contents, self._lengths.of(name))

    def after_fork(self) -> None:
        if self._lock.after_fork() or self._contents is not None:
            self._scopes = Scopes(self.settings, self._tiers, self._lock.defer)
        if self._contents is not None:
            self._contents = self._reader.token_ids = None
            reason = "after a fork only the parent process follows KV events: this process uses an LRU mirror"
            defer(partial(self.degrade, reason))

    def _report(self, error: Exception) -> None:
        if self.settings.strict:
            raise error
        self.fallbacks += 1
        if self.fallbacks == 1:
            # The message of an error may quote a document, so only its type is logged.
            _logger.warning("ordering failed with %s: retrieval order is kept, and counted", type(error).__name__)
            self.degrade(
                f"ordering failed with {type(error).__name__}: retrieval order is kept, and counted in `fallbacks` "
                "(Orderer(strict=True) raises the error)"
            )


def _checked(history: H) -> H:
    if history is not None and not isinstance(history, History):
        raise TypeError(f"history is a {type(history).__name__}: give ragorder.History(segments)")
    return history


def _unordered(given: list[D], index: int = 0) -> Ordering[D]:
    ordering = Ordering(given, list(range(len(given))))
    ordering.index, ordering.fallback = index, True
    return ordering
