"""Build of a corpus' KV in a disk tier's folder."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from ragorder.common.lru_cache import LRUCache
from ragorder.errors import RagorderError
from ragorder.kernels.cache.disk import store_identity
from ragorder.kernels.cache.segments import segments_of
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.fusion.assemble import as_blocks
from ragorder.kernels.models.identity import identity
from ragorder.kernels.models.loading import load_model
from ragorder.kernels.models.model import PatchedModel, device_blocks
from ragorder.kernels.models.prefill_times import engine_profile
from ragorder.kernels.paging import KVShape
from ragorder.kernels.preprocessing.manifest import BuildError, Manifest, PlannedDocument, drop_copies, remove_documents
from ragorder.kernels.preprocessing.neighbours import Neighbours, PreprocessingSettings
from ragorder.kernels.preprocessing.preprocessor import Prefill, Preprocessor, check_numbers
from ragorder.kernels.store import ChunkStore
from ragorder.trie.profile import PrefillProfile


class SourceDocument(NamedTuple):
    id: str
    text: str
    token_ids: Sequence[int]


class Planner:
    """Plans documents with at most `count` neighbours, with which they fit into `most_tokens`."""

    def __init__(
        self, neighbours: Neighbours, count: int, most_tokens: int, content: Callable[[Sequence[int]], bytes]
    ) -> None:
        self._neighbours = neighbours
        self._count = count
        self._most_tokens = most_tokens
        self._content = content

    def read(self, documents: Sequence[SourceDocument]) -> list[PlannedDocument]:
        """Plan documents, without neighbours yet. Raises BuildError."""
        counts = Counter(document.id for document in documents)
        _refuse((id for id, count in counts.items() if count > 1), "occurs twice: give every document its own id")
        _refuse((each.id for each in documents if not len(each.token_ids)), "has no tokens: leave it out")
        _refuse(
            (each.id for each in documents if len(each.token_ids) > self._most_tokens),
            f"has more than the {self._most_tokens:,} tokens that fit after the system prompt: split it, or leave it "
            "out",
        )
        vectors = self._neighbours.vectors([document.text for document in documents]) if documents else None
        kept = [None] * len(documents) if vectors is None else [np.float32(vector).tobytes() for vector in vectors]
        return [
            PlannedDocument(document.id, self._content(document.token_ids), document.token_ids, (), vector)
            for document, vector in zip(documents, kept, strict=True)
        ]

    def choose(self, documents: Sequence[PlannedDocument]) -> list[PlannedDocument]:
        nearest = self._neighbours.nearest([each.id for each in documents], _vectors(documents), self._count)
        chosen: dict[bytes, tuple[bytes, ...]] = {}
        for document, places in zip(documents, nearest, strict=True):
            # Documents with the same tokens share their KV.
            if document.content not in chosen:
                chosen[document.content] = self._fitting(document, [documents[place] for place in places])
        return [replace(document, neighbours=chosen[document.content]) for document in documents]

    def _fitting(self, document: PlannedDocument, neighbours: Iterable[PlannedDocument]) -> tuple[bytes, ...]:
        left = self._most_tokens - len(document.token_ids)
        fitting: list[bytes] = []
        for other in neighbours:
            if len(other.token_ids) <= left and other.content not in (document.content, *fitting):
                fitting.append(other.content)
                left -= len(other.token_ids)
        return tuple(fitting)


def _vectors(documents: Sequence[PlannedDocument]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]] | None:
    vectors = [document.vector for document in documents]
    if all(vector is None for vector in vectors):
        return None
    if len({len(vector or b"") for vector in vectors}) > 1:
        raise BuildError("documents have vectors of different models: build again, with one choice of neighbours")
    return np.stack([np.frombuffer(vector or b"", dtype=np.float32) for vector in vectors])


def _refuse(ids: Iterable[str], problem: str) -> None:
    found = list(ids)
    if found:
        others = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
        raise BuildError(f"document {found[0]!r}{others} {problem}")


class WriteFailedError(RagorderError, OSError): ...


class CopyStore:
    """KV (tokens, layers, 2, KV heads, head_dim) directly after a tenant's system prompt, never evicted."""

    def __init__(
        self,
        folder: Path,
        shape: KVShape,
        identity: str,
        prefix_ids: Sequence[int],
        salt: str | None,
        profile: PrefillProfile,
    ) -> None:
        self._shape = shape
        self._prefix_ids = list(prefix_ids)
        self._salt = salt
        self._profile = profile
        self._folder = folder
        self.prefix_key = self._path([])[0]
        self.identity = store_identity(identity, shape)
        self.store = ChunkStore(folder, sys.maxsize, self.identity)

    def __contains__(self, key: bytes) -> bool:
        return key in self.store

    @property
    def damaged(self) -> Mapping[str, int]:
        return self.store.counters.refusals()

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize

    def content(self, token_ids: Sequence[int]) -> bytes:
        return self._path(token_ids)[1]

    def bytes_on_disk(self, key: bytes, tokens: int) -> int:
        start, parent = self._place(key)
        blocks = len(self._shape.covering(start, tokens))
        return self.store.bytes_on_disk(key, blocks * self._shape.block_bytes, parent)

    def intact(self, key: bytes, tokens: int) -> bool:
        start, _ = self._place(key)
        return self.store.read(key, bytearray(len(self._shape.covering(start, tokens)) * self._shape.block_bytes))

    def write(self, key: bytes, kv: torch.Tensor, prefix: torch.Tensor) -> None:
        """Store KV of a document or the system prompt, if missing. Raises WriteFailedError."""
        start, parent = self._place(key)
        payload = as_blocks(kv.cpu(), start, prefix[:start].cpu(), self._shape)
        cost = self._profile.cost(start, len(kv))
        if not self.store.write(key, memoryview(payload.rows()), parent, cost=cost, protected=self.store):
            why = ", ".join(self.store.counters.refusals()) or "unknown reason"
            raise WriteFailedError(f"{self._folder} cannot be written ({why})")

    def close(self) -> None:
        self.store.close()

    def _path(self, token_ids: Iterable[int]) -> list[bytes]:
        # A prompt's last token is in no node.
        prompt = [*self._prefix_ids, *token_ids, 0]
        return [each.key for each in segments_of(prompt, [len(self._prefix_ids), len(prompt) - 1], salt=self._salt)]

    def _place(self, key: bytes) -> tuple[int, bytes | None]:
        return (0, None) if key == self.prefix_key else (len(self._prefix_ids), self.prefix_key)


_MOST_ENTRIES = 1 << 30
_WHOLE = (1, 1)


class Built(NamedTuple):
    id: str
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    documents: int
    tokens: int
    bytes: int


class FusionBuilder:
    """Preprocessed KV of documents after one system prompt, in a folder that a disk tier opens (FusionRAG 3.1).

    A `Preprocessor` computes it; neighbours' KV is computed after the system prompt alone. `plan`, `add`, `remove` and
    `refresh` decide the contents; `build` computes what is missing, after an interruption with the same bytes.

    Nothing else may use `model` and `folder` until `close`. `engine`: the serving engine's settings; `salt`: the
    tenant. Raises StoreRefusedError, ManifestError, UnsupportedModelError.
    """

    def __init__(
        self,
        model: PatchedModel,
        folder: Path,
        prefix_ids: Sequence[int],
        neighbours: Neighbours,
        settings: PreprocessingSettings | None = None,
        engine: EngineSettings | None = None,
        *,
        salt: str | None = None,
    ) -> None:
        self._settings = settings = settings or PreprocessingSettings()
        engine = engine or EngineSettings()
        self._model = model
        self.token_bytes = model.shape.token_bytes
        self.folder = folder
        size = model.shape.block_size
        blocks = device_blocks(model.shape, model.device, engine.device_tokens, model.longest, engine.device_share)
        longest = model.longest or blocks * size
        profile = engine.prefill_profile(lambda: engine_profile(model, engine, blocks))
        self._preprocessor = Preprocessor(
            model,
            prefix_ids,
            workspace_tokens=min(blocks, settings.batch_documents * model.shape.blocks_for(longest)) * size,
            max_batch_tokens=engine.max_batch_tokens,
        )
        # KV of neighbours computed after the system prompt alone.
        self._alone: LRUCache[torch.Tensor] = LRUCache(_MOST_ENTRIES, settings.host_bytes)
        self._copies = CopyStore(folder, model.shape, identity(model.model, model.shape), prefix_ids, salt, profile)
        try:
            self._manifest = Manifest(folder, vocabulary=model.vocabulary)
        except BaseException:
            self._copies.close()
            raise
        most = self._preprocessor.longest - len(prefix_ids)
        self._planner = Planner(neighbours, settings.neighbours, most, self._copies.content)

    @classmethod
    def load(
        cls,
        name: str | Path,
        folder: Path,
        prefix_ids: Sequence[int],
        neighbours: Neighbours,
        settings: PreprocessingSettings | None = None,
        engine: EngineSettings | None = None,
        *,
        salt: str | None = None,
    ) -> Self:
        engine = engine or EngineSettings()
        model = PatchedModel(load_model(name, engine), engine)
        try:
            return cls(model, folder, prefix_ids, neighbours, settings, engine, salt=salt)
        except BaseException:
            model.restore()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._manifest)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of `plan`, with `identity`, `prefix_key`, `prefix_tokens` and `token_bytes`; empty before it."""
        return self._manifest.facts

    @property
    def damaged(self) -> Mapping[str, int]:
        """Damaged KV, which is computed again, by reason."""
        return self._copies.damaged

    @property
    def size(self) -> int:
        return self._copies.store.used_bytes

    def close(self) -> None:
        self._manifest.close()
        self._copies.close()
        self._model.restore()

    def plan(self, documents: Sequence[SourceDocument], facts: Mapping[str, Any] | None = None) -> None:
        """Choose all documents' neighbours, replacing an earlier plan, and keep `facts` (JSON). Raises BuildError for
        duplicate ids, and empty or too long documents."""
        made = {
            "identity": self._copies.identity,
            "prefix_key": self._copies.prefix_key.hex(),
            "prefix_tokens": len(self._preprocessor.prefix),
            "token_bytes": self.token_bytes,
        }
        self._manifest.begin({**(facts or {}), **made}, self._planner.choose(self._planner.read(documents)))

    def is_planned(self, documents: Sequence[SourceDocument]) -> bool:
        known = [(each.id, each.content) for each in self._manifest]
        return known == [(each.id, self._copies.content(each.token_ids)) for each in documents]

    def add(self, documents: Sequence[SourceDocument]) -> int:
        """Plan new documents, and changed ones, whose KV is removed. Return their number."""
        read = self._planner.read(documents)
        known = {each.id: each for each in self._manifest}
        changed = {each.id: each for each in read if each.id not in known or known[each.id].content != each.content}
        if changed:
            planned = self._planner.choose(list((known | changed).values()))
            drop_copies(self._copies.store, self._manifest.contents_only_of(changed))
            self._manifest.put([each for each in planned if each.id in changed])
        return len(changed)

    def remove(self, ids: Iterable[str]) -> None:
        """Remove documents and their KV; documents computed after them become `stale`. Raises BuildError."""
        remove_documents(self._manifest, self._copies.store, ids)

    def stale(self) -> list[str]:
        """Return documents whose neighbours have changed; their KV is still served."""
        return [planned.id for planned, _ in self._stale()]

    def refresh(self) -> int:
        """Plan stale documents again and remove their KV. Return their number."""
        pairs = self._stale()
        drop_copies(self._copies.store, {known.content for _, known in pairs})
        self._manifest.put(planned for planned, _ in pairs)
        return len(pairs)

    def verify(self) -> int:
        """Read all KV and remove damaged chunks. Return their number."""
        chunks = {each.key: len(each.token_ids) for each in self._manifest}
        chunks[self._copies.prefix_key] = len(self._preprocessor.prefix)
        return sum(key in self._copies and not self._copies.intact(key, tokens) for key, tokens in chunks.items())

    def estimate(self, shard: tuple[int, int] = _WHOLE) -> Estimate:
        missing = [each for group in self._groups(shard) for each in group if each.key not in self._copies]
        size = sum(self._bytes_on_disk(each) for each in missing)
        if self._copies.prefix_key not in self._copies:
            size += self._copies.bytes_on_disk(self._copies.prefix_key, len(self._preprocessor.prefix))
        return Estimate(len(missing), sum(len(each.token_ids) for each in missing), size)

    def build(self, shard: tuple[int, int] = _WHOLE) -> Iterator[Built]:
        """Compute missing documents of `shard` (i, n), i from 1. Parts built in separate folders become one build when
        their `chunks` are in one folder. Finished documents stay. Raises WriteFailedError, and BuildError for a wrong
        shard, KV with NaN or inf, or too small a disk."""
        groups = self._groups(shard)
        self._check_room(self.estimate(shard))
        check_numbers("the system prompt", self._preprocessor.prefix)
        self._copies.write(self._copies.prefix_key, self._preprocessor.prefix, self._preprocessor.prefix)
        for group in groups:
            if any(each.key not in self._copies for each in group):
                yield from self._build_group(group)

    def _build_group(self, group: Sequence[PlannedDocument]) -> Iterator[Built]:
        prefills = [Prefill(each.token_ids, [self._kv_alone(content) for content in each.neighbours]) for each in group]
        for document, kv in zip(group, self._preprocessor.compute(prefills), strict=True):
            check_numbers(f"document {document.id!r}", kv)
            key = document.key
            if key not in self._copies:
                self._copies.write(key, kv, self._preprocessor.prefix)
                yield Built(document.id, len(document.token_ids), self._bytes_on_disk(document))

    def _kv_alone(self, content: bytes) -> torch.Tensor:
        kv = self._alone.get(content)
        if kv is None:
            document = self._manifest.with_content(content)
            assert document is not None
            # Computed alone, so that its numbers do not depend on which documents are missing.
            [computed] = self._preprocessor.compute([Prefill(document.token_ids)])
            kv = computed.cpu()
            check_numbers(f"document {document.id!r}", kv)
            self._alone.put(content, kv, kv.nbytes)
        return kv

    def _groups(self, shard: tuple[int, int]) -> list[list[PlannedDocument]]:
        number, parts = shard
        if not 1 <= number <= parts:
            raise BuildError(f"shard {number}/{parts}: give i/n with i from 1 to n")
        documents = self._computable()
        lengths = {each.content: len(each.token_ids) for each in self._manifest}
        groups: list[list[PlannedDocument]] = []
        left = 0
        for document in documents:
            context = sum(lengths[content] for content in document.neighbours)
            room = self._preprocessor.room(len(document.token_ids), context)
            if not groups or room > left or len(groups[-1]) == self._settings.batch_documents:
                groups.append([])
                left = self._preprocessor.workspace_tokens
            groups[-1].append(document)
            left -= room
        return groups[(number - 1) * len(groups) // parts : number * len(groups) // parts]

    def _computable(self) -> list[PlannedDocument]:
        """Return documents with known neighbours, each content once; plan others again if their KV is lost."""
        documents = list(self._manifest)
        known = {each.content for each in documents}
        lost = {each.id for each in documents if each.key not in self._copies and not known.issuperset(each.neighbours)}
        if lost:
            self._manifest.put([planned for planned, _ in self._replanned() if planned.id in lost])
            documents = list(self._manifest)
        return list({each.content: each for each in documents if known.issuperset(each.neighbours)}.values())

    def _replanned(self) -> list[tuple[PlannedDocument, PlannedDocument]]:
        known = list(self._manifest)
        return list(zip(self._planner.choose(known), known, strict=True))

    def _stale(self) -> list[tuple[PlannedDocument, PlannedDocument]]:
        return [(planned, known) for planned, known in self._replanned() if planned.neighbours != known.neighbours]

    def _bytes_on_disk(self, document: PlannedDocument) -> int:
        return self._copies.bytes_on_disk(document.key, len(document.token_ids))

    def _check_room(self, estimate: Estimate) -> None:
        free = self._copies.free_bytes
        if estimate.bytes > free:
            raise BuildError(
                f"{self.folder} has {free:,} bytes free, but the KV of {estimate.documents:,} documents "
                f"({estimate.tokens:,} tokens of {self.token_bytes:,} bytes) needs {estimate.bytes:,}: make room, "
                "choose another disk, or build a shard"
            )
