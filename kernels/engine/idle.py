"""Idle precomputation of documents after documents requested with them (FusionRAG 3.1)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from ragorder.kernels.cache import (
    CopyKind,
    CopyLocation,
    KnowledgeCache,
    KVLease,
    OutOfBlocksError,
    Segment,
    segments_of,
)
from ragorder.kernels.engine.sequence import Positions, Sequence
from ragorder.kernels.engine.stats import EngineCounters
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.fusion.assemble import Assembler, Rows, as_blocks, moved_rows, read_rows
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.models.batch import Piece, pack
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.store.variants import variant_key

__all__ = ["BuildQueue", "IdleBuilder"]


class BuildQueue:
    """Documents by content, most requested first; ties go to the one that has waited longest."""

    def __init__(self) -> None:
        self._requests: dict[bytes, int] = {}
        # Without empty entries.
        self._by_requests: dict[int, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, content: bytes, requests: int) -> None:
        self.remove(content)
        self._requests[content] = requests
        self._by_requests.setdefault(requests, OrderedDict())[content] = None

    def take(self) -> bytes | None:
        if not self._requests:
            return None
        content = next(iter(self._by_requests[max(self._by_requests)]))
        self.remove(content)
        return content

    def remove(self, content: bytes) -> None:
        requests = self._requests.pop(content, None)
        if requests is None:
            return
        equals = self._by_requests[requests]
        del equals[content]
        if not equals:
            del self._by_requests[requests]


# As in `ragorder fuse build`.
_NEIGHBOURS = 10
# Tokens of all known documents and system prompts, documents, and companions counted per document.
_MOST_TOKENS = 1 << 20
_MOST_DOCUMENTS = 1 << 14
_MOST_COMPANIONS = 64
# Documents examined per step, while requests wait.
_MOST_EXAMINED = 8


@dataclass(slots=True, eq=False)
class _SystemPrompt:
    segment: Segment
    token_ids: tuple[int, ...]
    documents: int = 0


@dataclass(slots=True, eq=False)
class _Document:
    segment: Segment
    token_ids: tuple[int, ...]
    prompt: _SystemPrompt
    salt: str | None
    requests: int = 0
    companions: Counter[bytes] = field(default_factory=Counter)

    def asked_with(self, others: set[bytes]) -> None:
        self.requests += 1
        self.companions.update(others - {self.segment.content})
        if len(self.companions) > _MOST_COMPANIONS:
            self.companions = Counter(dict(self.companions.most_common(_MOST_COMPANIONS // 2)))


@dataclass(slots=True, eq=False)
class _Build:
    document: _Document
    neighbours: tuple[bytes, ...]
    token_ids: list[int]
    lease: KVLease
    todo: Positions | None = None

    @property
    def start(self) -> int:
        return len(self.token_ids) - len(self.document.token_ids)


class IdleBuilder:
    """Computes documents of fused requests without preprocessed KV, most requested first. The caller serialises all
    calls. Each is computed after its system prompt and the documents with KV that most often share its requests, within
    `build_idle` times the tokens that requests compute."""

    def __init__(
        self,
        cache: KnowledgeCache,
        model: PatchedModel,
        rotation: Rotation,
        settings: EngineSettings,
        longest: int,
        counters: EngineCounters,
    ) -> None:
        self._cache = cache
        self._model = model
        self._rotation = rotation
        self._assembler = Assembler(cache.pool, rotation)
        self._share = settings.build_idle
        self._step_tokens = self._most_step_tokens = settings.max_batch_tokens
        self._most_tokens = longest
        self._counters = counters
        self._documents: OrderedDict[bytes, _Document] = OrderedDict()
        self._prompts: dict[bytes, _SystemPrompt] = {}
        self._queue = BuildQueue()
        self._tokens = 0
        self._build: _Build | None = None
        # The next document exceeds the budget, and no request has arrived since.
        self._exhausted = False

    @property
    def _longest(self) -> int:
        """Maximum tokens of a document with its neighbours; copies take the same room again."""
        return min(self._most_tokens, self._cache.pool.blocks * self._cache.shape.block_size // 2)

    @property
    def has_work(self) -> bool:
        return self._build is not None or (len(self._queue) > 0 and not self._exhausted)

    def observe(self, sequence: Sequence) -> None:
        front, *documents = sequence.path or (None,)
        if sequence.fusion is None or front is None or front.content or not documents or not documents[0].content:
            return
        self._exhausted = False
        # Limited: each document is counted with each other one.
        others = {segment.content for segment in documents[:_MOST_COMPANIONS]}
        start = front.tokens
        for segment in documents:
            known = self._documents.get(segment.content)
            if known is None:
                own = tuple(sequence.tokens[start : start + segment.tokens])
                known = _Document(segment, own, self._prompt_of(sequence, front), sequence.request.salt)
                known.prompt.documents += 1
                self._documents[segment.content] = known
                self._tokens += segment.tokens
            self._documents.move_to_end(segment.content)
            known.asked_with(others)
            self._queue.put(segment.content, known.requests)
            start += segment.tokens
        while self._tokens > _MOST_TOKENS or len(self._documents) > _MOST_DOCUMENTS:
            self._forget(next(iter(self._documents)))

    def step(self) -> int:
        """Compute a part. Return its tokens: 0 without a document, and while its neighbours load."""
        build = self._build or self._begin()
        if build is None or not build.lease.ready:
            return 0
        if build.todo is None:
            try:
                build.todo = self._put_neighbours(build)
            except OutOfBlocksError:
                self.give_up()
                return 0
        positions, build.todo = build.todo[: self._step_tokens], build.todo[self._step_tokens :]
        if len(positions):
            token_ids = [build.token_ids[position] for position in positions]
            table = np.asarray(build.lease.block_table, dtype=np.int32)
            piece = Piece(token_ids, int(positions[0]), table, False, positions)
            self._model.forward(*pack([piece], self._cache.pool))
            self._counters.idle_tokens += len(positions)
        if not len(build.todo):
            self._finish(build)
        return len(positions)

    def abort(self) -> None:
        if self._build is not None:
            self._counters.idle_aborted += 1
            self._put_back(self._build)

    def give_up(self) -> None:
        if self._build is not None:
            self._forget(self._build.document.segment.content)
            self._end(self._build)

    def shrink(self) -> bool:
        """Use smaller steps after a memory shortage; drop a document that fails in the smallest. Return True."""
        if self._step_tokens == 1:
            self.give_up()
        elif self._build is not None:
            self._put_back(self._build)
        self._step_tokens = max(1, self._step_tokens // 2)
        return True

    def _begin(self) -> _Build | None:
        left = self._share * self._counters.computed_tokens - self._counters.idle_tokens
        for _ in range(_MOST_EXAMINED):
            content = self._queue.take()
            if content is None:
                return None
            document = self._documents[content]
            [_, kind] = self._cache.copy_kinds([document.prompt.segment, document.segment])
            if kind is CopyKind.PREPROCESSED:
                continue
            if len(document.token_ids) > left:
                # Only requests increase the budget.
                self._queue.put(content, document.requests)
                self._exhausted = True
                return None
            self._build = self._start(document)
            if self._build is not None:
                return self._build
        return None

    def _put_back(self, build: _Build) -> None:
        document = build.document
        self._end(build)
        if document.segment.content in self._documents:
            self._queue.put(document.segment.content, document.requests)

    def _start(self, document: _Document) -> _Build | None:
        neighbours = self._neighbours(document)
        if not neighbours:
            return None
        token_ids, ends = list(document.prompt.token_ids), [document.prompt.segment.tokens]
        for each in (*neighbours, document):
            token_ids += each.token_ids
            ends.append(len(token_ids))
        # A prompt's last token is in no node.
        path = segments_of([*token_ids, 0], ends, salt=document.salt, prefix_tokens=document.prompt.segment.tokens)
        # Without a content, other copies of it are not borrowed.
        path = (*path[:-1], path[-1]._replace(content=b""))
        try:
            lease = self._cache.acquire(path, borrow=True, background=True)
        except OutOfBlocksError:
            return None
        return _Build(document, tuple(each.segment.content for each in neighbours), token_ids, lease)

    def _neighbours(self, document: _Document) -> list[_Document]:
        known = [self._documents[each] for each, _ in document.companions.most_common() if each in self._documents]
        kinds = self._cache.copy_kinds([document.prompt.segment, *(each.segment for each in known)])[1:]
        left = self._longest - document.prompt.segment.tokens - len(document.token_ids)
        chosen: list[_Document] = []
        for each, kind in zip(known, kinds, strict=True):
            if kind is not None and len(each.token_ids) <= left and len(chosen) < _NEIGHBOURS:
                left -= len(each.token_ids)
                chosen.append(each)
        return chosen

    def _put_neighbours(self, build: _Build) -> Positions:
        lease, missing = build.lease, np.ones(len(build.token_ids), dtype=np.bool_)
        self._cache.extend(lease, len(build.token_ids))
        missing[: lease.cached_tokens] = False
        rows = []
        for each in lease.borrowed:
            missing[each.start : each.start + each.tokens] = False
            node = each.copy.node
            rows.append(Rows(each.copy.blocks, node.start, node.tokens, each.start))
        self._assembler.copy(rows, lease.block_table)
        self._cache.give_back(lease)
        return np.flatnonzero(missing)

    def _finish(self, build: _Build) -> None:
        document, front = build.document, build.document.prompt.segment
        with torch.inference_mode():
            own = read_rows(self._cache.pool, build.lease.block_table, build.start, len(build.token_ids))
            preceding = read_rows(self._cache.pool, build.lease.block_table, 0, front.tokens)
            own = moved_rows(own, build.start, front.tokens, self._rotation)
            blocks = as_blocks(own, front.tokens, preceding, self._cache.shape)
        self._end(build)
        if not bool(own.isfinite().all()):
            # Requests would fail with it.
            self._forget(document.segment.content)
            return
        key = variant_key(document.segment.content, b"".join(build.neighbours))
        copy = CopyLocation(key, front.key, front.tokens, len(own))
        if self._cache.adopt(document.segment.content, copy, blocks):
            self._counters.idle_documents += 1
            self._step_tokens = min(2 * self._step_tokens, self._most_step_tokens)
        else:
            # The next attempt would find no room either.
            self._forget(document.segment.content)

    def _end(self, build: _Build) -> None:
        self._cache.release(build.lease)
        self._build = None

    def _forget(self, content: bytes) -> None:
        document = self._documents.pop(content, None)
        if document is None:
            return
        self._queue.remove(content)
        self._tokens -= len(document.token_ids)
        document.prompt.documents -= 1
        if not document.prompt.documents:
            del self._prompts[document.prompt.segment.key]
            self._tokens -= len(document.prompt.token_ids)

    def _prompt_of(self, sequence: Sequence, front: Segment) -> _SystemPrompt:
        prompt = self._prompts.get(front.key)
        if prompt is None:
            prompt = self._prompts[front.key] = _SystemPrompt(front, tuple(sequence.tokens[: front.tokens]))
            self._tokens += front.tokens
        return prompt
