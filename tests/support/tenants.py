"""Tenants of one simulated engine, which tells its KV events when it is asked to."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import pytest

from ragorder import Document, Lengths, Orderer
from ragorder.eval.engines.base import settings_of
from ragorder.eval.engines.sim import Like, SimEngine
from ragorder.scope.scopes import MAX_NODES
from ragorder.trie.residency.blocks import EngineBlocks
from support.inside import blocks_in

BLOCK = 16
PREFIX = 100
QUESTION = 20
ANSWER = 32
_TENANT = 1 << 40
_TEXT = 1 << 20


class Served(NamedTuple):
    """`predicted` and `true` cached tokens."""

    tenant: int
    permutation: tuple[int, ...]
    predicted: int
    true: int


class _Engine(SimEngine):
    """Notes which blocks it gives up."""

    def reset(self) -> None:
        super().reset()
        self.removed: list[int] = []

    def _evict(self, block: int, block_hash: int) -> None:
        super()._evict(block, block_hash)
        if block_hash not in self._block_of:
            self.removed.append(block_hash)


class Tenants:
    """Requests of many tenants, with a prompt of its own each, to one engine, `in_flight` at a time.

    An answer is generated just before its request ends, and takes blocks only then; its last token takes none (vLLM).
    With `tell_every` an orderer follows the engine's events, told after so many requests. `apart` gives each tenant an
    orderer of its own. `name` gives the id of a tenant's document. Orderers are told a `told_capacity` times as large.
    """

    def __init__(
        self,
        capacity_tokens: int | None,
        *,
        in_flight: int = 1,
        tell_every: int | None = None,
        apart: bool = False,
        like: Like = "vllm-0.32",
        told_capacity: float = 1.0,
        max_nodes: int = MAX_NODES,
        name: Callable[[int, int], int] = lambda tenant, document: document,
        **options: Any,
    ) -> None:
        self.engine = _Engine(capacity_tokens=capacity_tokens, in_flight=10**6, output_tokens=ANSWER, like=like)
        self.served: list[Served] = []
        self._in_flight = in_flight
        self._tell_every = tell_every
        self._apart = apart
        self._name = name
        self._max_nodes = max_nodes
        self.blocks = EngineBlocks(BLOCK)
        self._noted: set[int] = set()
        self._untold: deque[tuple[Any, ...]] = deque()
        self._running: deque[tuple[Any, int, int, int, int]] = deque()
        told: dict[str, Any] = {"prefix_tokens": PREFIX, "strict": True}
        if capacity_tokens is not None:
            told["capacity_tokens"] = round(told_capacity * capacity_tokens)
        self._options: dict[str, Any] = {"settings": settings_of(self.engine, **told | options)}
        # A pool is told of the question alone, as vLLM takes room for an answer's tokens one by one; its length is
        # reported. KV events correct what was expected.
        self._suffix_tokens = QUESTION if tell_every is None else QUESTION + ANSWER - 1
        if tell_every is not None:
            self._options |= {"token_ids": token_ids, "prefix_ids": range(PREFIX), "blocks": self.blocks}
        self._orderers: dict[int | None, Orderer] = {}

    def orderer(self, tenant: int) -> Orderer:
        name = tenant if self._apart else None
        if name not in self._orderers:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ragorder.scope.scopes.MAX_NODES", self._max_nodes)
                self._orderers[name] = Orderer(**self._options)
        return self._orderers[name]

    def serve(
        self, tenant: int, documents: Sequence[int], lengths: Sequence[int], answer_tokens: int = ANSWER
    ) -> Served:
        """Documents by number, and the lengths of all of the tenant's documents."""
        while len(self._running) >= self._in_flight:
            self.finish()
        given = [
            Document(str(self._name(tenant, number)), "", tokens=lengths[number], metadata={"tenant": tenant})
            for number in documents
        ]
        prefix_tokens = PREFIX if self._tell_every is not None else PREFIX + 3 * tenant
        ordering = self.orderer(tenant).order(
            given, scope=f"t{tenant}", lengths=Lengths(prefix=prefix_tokens, suffix=self._suffix_tokens)
        )
        prompt = array("q", range(prefix_tokens))
        for document in ordering.documents:
            prompt.extend(token_ids(document))
        end = -QUESTION * (len(self.served) + 1)
        prompt.extend(range(end, end + QUESTION))
        salted = self.salted(tenant, prompt)
        completion, handle = self.engine.admit(salted, 0)
        if self._tell_every is not None:
            self._note(salted, prompt, f"t{tenant}")
            if len(self.served) % self._tell_every == 0:
                self.tell()
        self._running.append((ordering, handle, completion.cached_tokens, len(prompt), answer_tokens))
        served = Served(tenant, tuple(ordering.permutation), ordering.cached_tokens, completion.cached_tokens)
        self.served.append(served)
        return served

    def salted(self, tenant: int, prompt: Sequence[int]) -> array[int]:
        """The engine tells tenants apart by their salt, which its events report, and which here is in each token."""
        return array("q", [token + (tenant + 1) * _TENANT for token in prompt])

    def cached_tokens(self, tenant: int, documents: Sequence[Document]) -> int:
        """Of a prompt that ends after these documents, as the engine holds it now."""
        prompt = [*range(PREFIX), *(token for document in documents for token in token_ids(document))]
        return self.engine.cached_tokens(self.salted(tenant, prompt))

    def settle(self) -> None:
        """Everything is answered, and everything told."""
        while self._running:
            self.finish()
        self.tell()

    def finish(self) -> None:
        if not self._running:
            return
        ordering, handle, cached_tokens, prompt_tokens, answer_tokens = self._running.popleft()
        end = -_TEXT * handle
        self.engine.extend(handle, range(end - answer_tokens + 1, end))
        self.engine.finish(handle)
        if self._tell_every is not None:
            self._note_removed()
        ordering.confirm(cached_tokens, prompt_tokens + answer_tokens)

    def _note(self, salted: array[int], prompt: array[int], salt: Hashable) -> None:
        held, hashes = blocks_in(self.engine), self.engine.block_hashes(salted)
        self._note_removed()
        for place, each in enumerate(hashes):
            if each in held and each not in self._noted:
                self._noted.add(each)
                parent = hashes[place - 1] if place else None
                tokens = prompt[place * BLOCK : (place + 1) * BLOCK]
                self._untold.append(("stored", [each], parent, tokens, None if place else [[salt]]))

    def _note_removed(self) -> None:
        self._noted.difference_update(self.engine.removed)
        self._untold.append(("removed", self.engine.removed))
        self.engine.removed = []

    def tell(self) -> None:
        while self._untold:
            kind, *event = self._untold.popleft()
            (self.blocks.store if kind == "stored" else self.blocks.remove)(*event)


def token_ids(document: Document) -> range:
    start = (int(document.id) + 1) * _TEXT
    return range(start, start + document.token_count)
