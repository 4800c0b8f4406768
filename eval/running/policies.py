"""Ordering policies that a benchmark compares: ours, the papers', and plain ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from functools import cache
from typing import Any, Protocol, Self

from ragorder.document import Document
from ragorder.errors import RagorderError
from ragorder.eval.data.names import unknown
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.base import Cache, settings_of
from ragorder.eval.engines.openai import OpenAIEngine
from ragorder.eval.engines.prompts import BuiltPrompts, Prompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.peers import PEERS, make_peer
from ragorder.orderer import Orderer
from ragorder.ordering import Batch, Ordering
from ragorder.prompt import PromptBuilder
from ragorder.scope.request import USUAL, Lengths
from ragorder.settings import Settings
from ragorder.trie.residency.blocks import EngineBlocks
from ragorder.trie.tail import Tail, Waiting, tails
from ragorder.trie.tree import Key, RequestedDocuments

Documents = list[Document]

ORDERERS: dict[str, dict[str, Any]] = {
    "greedy": {"search": "greedy", "moves": "prefix", "residency": "none"},
    "prefix": {"moves": "prefix"},
    "frequency": {"moves": "frequency"},
    "popularity": {"moves": "popularity"},
    "queue": {"moves": "queue"},
    "earned": {"moves": "earned"},
    "free": {"moves": "free"},
}

POLICIES = ("none", "retrieval", "reversed", "sorted", "recency", "random", *ORDERERS, "events", "oracle", *PEERS)


_GUARDS: Mapping[str, Callable[[str], Any]] = {
    "keep_first": int,
    "keep_last": int,
    "max_displacement": int,
    "max_gain_lost": float,
    "min_gain": float,
    "best": str,
    "best_tokens": int,
}


def parse_guards(guards: Iterable[str], flags: Sequence[str] = ("keep_groups",)) -> dict[str, Any]:
    """Settings of an orderer from "keep_first=1", "keep_groups". Raises ValueError."""
    settings: dict[str, Any] = {}
    for guard in guards:
        name, given, value = guard.partition("=")
        if name in settings:
            raise ValueError(f"{name} twice: leave one of them out")
        try:
            if name in flags and not given:
                settings[name] = True
            else:
                settings[name] = _parse_guard(name, value)
        except (KeyError, ValueError):
            choices = ", ".join([*(f"{each}={'first|last' if each == 'best' else 'N'}" for each in _GUARDS), *flags])
            raise ValueError(f"unknown guard {guard!r}: choose from {choices}") from None
    return settings


@cache
def _parse_guard(name: str, value: str) -> Any:
    # The same few stand in hundreds of cells, and settings read the environment for each.
    setting = _GUARDS[name](value)
    Settings(**{name: setting})
    return setting


class PolicyError(RagorderError, ValueError):
    """A policy does not exist or cannot run on this engine."""


class Policy(Protocol):
    """Orders documents, as an `Orderer` does."""

    def order(
        self, documents: Documents, *, waiting: Sequence[Documents] = (), lengths: Lengths = USUAL
    ) -> Ordering[Document]:
        """`waiting` are the documents of the requests after this one."""

    def order_batch(
        self, requests: Sequence[Documents], *, lengths: Lengths = USUAL, max_wait: int | None = None
    ) -> Iterable[Ordering[Document]]:
        """In serving order, none more than `max_wait` places late."""


def make_policy(
    name: str, *, engine: Cache, prompts: Prompts, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> Policy:
    """A policy for one run on a fresh engine; orderers take `settings`. Raises PolicyError or ValidationError."""
    if name in ORDERERS:
        given = {"prefix_tokens": prompts.prefix_tokens, **(settings or {})}
        return make_orderer(name, engine=engine, tokens=prompts.document_tokens, **given)
    if name == "events":
        if not isinstance(engine, OpenAIEngine) or engine.blocks is None or not isinstance(prompts, BuiltPrompts):
            raise PolicyError("policy 'events' follows a server's KV events: use it with --engine openai")
        return _EventsOrderer(engine, engine.blocks, prompts.builder, settings or {})
    if name in ("none", "retrieval"):
        return _Plain(lambda documents: list(range(len(documents))))
    if name == "reversed":
        return _Plain(lambda documents: list(range(len(documents)))[::-1])
    if name == "sorted":
        return _Plain(lambda documents: sorted(range(len(documents)), key=lambda rank: documents[rank].id))
    if name == "recency":
        return _Plain(_Recency())
    if name == "random":
        rng = random.Random(seed)
        return _Plain(lambda documents: rng.sample(range(len(documents)), len(documents)))
    if name == "oracle":
        if not isinstance(engine, SimEngine):
            raise PolicyError("policy 'oracle' reads the engine's block table: use it with --engine sim")
        return _Plain(_Oracle(engine, prompts))
    if name in PEERS:
        return make_peer(name)
    raise PolicyError(unknown("policy", name, POLICIES))


def make_orderer(
    name: str,
    *,
    engine: Cache,
    key: Callable[[Any], Hashable] | None = None,
    tokens: Callable[[Any], int] | None = None,
    group: Callable[[Any], Hashable | None] | None = None,
    **options: Any,
) -> Orderer:
    """The orderer of a policy of `ORDERERS`; `options` override its own."""
    return Orderer(settings_of(engine, **ORDERERS[name] | options), key=key, tokens=tokens, group=group)


class _EventsOrderer(Orderer):
    def __init__(
        self, engine: OpenAIEngine, blocks: EngineBlocks, builder: PromptBuilder, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(
            tokens=builder.document_tokens,
            token_ids=builder.document_ids,
            prefix_ids=builder.prefix_ids,
            blocks=blocks,
            capacity_tokens=engine.capacity_tokens,
            block_size=engine.block_size,
            prefix_tokens=builder.prefix_tokens,
            **ORDERERS["free"] | dict(settings),
        )
        self._salt = engine.salt

    def order(self, documents: Any, **options: Any) -> Ordering[Any]:
        return super().order(documents, **options | {"scope": self._salt})

    def order_batch(self, requests: Any, **options: Any) -> Batch[Any]:
        return super().order_batch(requests, **options | {"scope": self._salt})


class _Plain:
    def __init__(self, permute: Callable[[Documents], list[int]]) -> None:
        self._permute = permute

    def order(
        self, documents: Documents, *, waiting: Sequence[Documents] = (), lengths: Lengths = USUAL
    ) -> Ordering[Document]:
        permutation = self._permute(documents)
        return Ordering([documents[rank] for rank in permutation], permutation)

    def order_batch(
        self, requests: Sequence[Documents], *, lengths: Lengths = USUAL, max_wait: int | None = None
    ) -> Iterator[Ordering[Document]]:
        for index, documents in enumerate(requests):
            ordering = self.order(documents)
            ordering.index = index
            yield ordering


class _Recency:
    """Most recently served documents first (RAGCache++ Table 9)."""

    def __init__(self) -> None:
        self._clock = 0
        self._last_seen: dict[str, int] = {}

    def __call__(self, documents: Documents) -> list[int]:
        self._clock += 1
        permutation = sorted(range(len(documents)), key=lambda rank: -self._last_seen.get(documents[rank].key, 0))
        for document in documents:
            self._last_seen[document.key] = self._clock
        return permutation


class _Oracle:
    """The order with the longest prefix in the engine's true cache (RAGCache++ Table 9). Only cached prefixes are
    extended: an order that has left the cache gains nothing. Beyond 7 documents at most 2,000 are."""

    def __init__(self, engine: SimEngine, prompts: Prompts) -> None:
        self._engine = engine
        self._prompts = prompts

    def __call__(self, documents: Documents) -> list[int]:
        count = len(documents)
        budget = 2_000 if count > 7 else -1
        best: list[int] = []
        best_cached = -1
        stack: list[list[int]] = [[]]
        while stack and budget:
            budget -= 1
            begun = stack.pop()
            ids = self._prompts.token_ids(0, TraceRequest("", []), [documents[rank] for rank in begun])
            end = self._prompts.prefix_tokens + sum(self._prompts.document_tokens(documents[rank]) for rank in begun)
            cached = self._engine.cached_tokens(ids[:end])
            if cached > best_cached:
                best, best_cached = begun, cached
            if end - cached < self._engine.block_size:
                stack += [[*begun, rank] for rank in reversed(range(count)) if rank not in begun]
        return best + [rank for rank in range(count) if rank not in best]


_RESCALE = 1e200


@tails.register("frequency", "the most requested documents first")
class FrequencyTail(Tail):
    """Ties stay in rank order. A request counts half after `half_life` further ones. Of more than `max_documents` the
    rarer half is forgotten."""

    def __init__(self, half_life: int = 300, max_documents: int = 16_384) -> None:
        self.max_documents = max_documents
        self._growth = 2.0 ** (1 / half_life)
        # Instead of decaying every count, each new request weighs more than the one before.
        self._weight = 1.0
        self._counts: dict[Key, float] = {}

    def observe(self, request: RequestedDocuments) -> None:
        self._weight = weight = self._weight * self._growth
        counts = self._counts
        for key in request.keys:
            counts[key] = counts.get(key, 0.0) + weight
        if len(counts) > self.max_documents:
            kept = sorted(counts.items(), key=lambda item: -item[1])[: self.max_documents // 2]
            self._counts = dict(kept)
        if weight > _RESCALE:
            self._counts = {key: count / weight for key, count in self._counts.items()}
            self._weight = 1.0

    @contextmanager
    def observing(self, request: RequestedDocuments) -> Iterator[None]:
        counts, weight = self._counts, self._weight
        before = {key: counts.get(key) for key in request.keys}
        self.observe(request)
        try:
            yield
        finally:
            self._counts, self._weight = counts, weight
            for key, count in before.items():
                if count is None:
                    del counts[key]
                else:
                    counts[key] = count

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy._counts = dict(self._counts)
        return copy

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        keys, counts = request.keys, self._counts
        return sorted(rest, key=lambda rank: -counts.get(keys[rank], 0.0))


@tails.register("popularity", "documents first that are requested 8 times as often")
class PopularityTail(FrequencyTail):
    """Documents 8 times as popular first; within a class, rank order. Exact frequency order loses on bursts: small
    differences tear apart what rank order keeps together."""

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        keys, count, weight = request.keys, self._counts.get, self._weight
        classes = [-((int(count(keys[rank], 0.0) / weight).bit_length() + 2) // 3) for rank in rest]
        if len(set(classes)) < 2:
            return rest
        return [rank for _, rank in sorted(zip(classes, rest, strict=True))]
