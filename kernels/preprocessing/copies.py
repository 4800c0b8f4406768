"""Documents' KV in a disk tier's folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from ragorder.errors import RagorderError
from ragorder.kernels.cache.disk import store_identity
from ragorder.kernels.cache.segments import segments_of
from ragorder.kernels.fusion.assemble import as_blocks
from ragorder.kernels.paging import KVShape
from ragorder.kernels.store import ChunkStore
from ragorder.trie.profile import PrefillProfile

__all__ = ["CopyStore", "WriteFailedError"]


class WriteFailedError(RagorderError, OSError): ...


class CopyStore:
    """KV (tokens, layers, 2, KV heads, head_dim) directly after a tenant's system prompt. Nothing is evicted."""

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
        """Chunks that were damaged (and removed) or another model's, by reason."""
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
        """Store the KV of a document or of the system prompt, unless it is stored. Raises WriteFailedError."""
        start, parent = self._place(key)
        payload = as_blocks(kv.cpu(), start, prefix[:start].cpu(), self._shape)
        cost = self._profile.cost(start, len(kv))
        if not self.store.write(key, memoryview(payload.rows()), parent, cost=cost, protected=_Everything()):
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


class _Everything(Container[bytes]):
    def __contains__(self, key: object) -> bool:
        return True
