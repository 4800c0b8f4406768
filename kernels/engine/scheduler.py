"""Continuous batching, first come first served among loaded sequences."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from ragorder.kernels.cache import KnowledgeCache
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.paging import OutOfBlocksError

__all__ = ["ScheduledChunk", "Scheduler"]

# Waiting sequences whose cached prefix is prefetched.
_PREFETCHED = 8


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `tokens` tokens of a sequence. `last`: the next token is chosen after them."""

    sequence: Sequence
    tokens: int
    last: bool


class Scheduler:
    """Waiting and running sequences, in order of arrival.

    Admitted with a loaded prefix and blocks for all tokens; later ones overtake those that load. Without blocks the
    latest are preempted.
    """

    def __init__(self, cache: KnowledgeCache, block_size: int, max_batch_tokens: int, max_requests: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preempted = 0
        self._cache = cache
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._max_requests = max_requests
        # There was no room for the first waiting sequence, and none has come free since.
        self._full = False

    @property
    def loading(self) -> list[Sequence]:
        return [sequence for sequence in self.waiting if sequence.lease is not None and not sequence.lease.ready]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> list[ScheduledChunk]:
        """At most `max_batch_tokens`; empty while all wait for prefixes. Raises OutOfBlocksError if the first never
        fits."""
        chunks: list[ScheduledChunk] = []
        left = self._max_batch_tokens
        for sequence in list(self.running):
            # An earlier sequence may have preempted it meanwhile.
            if left and sequence.lease is not None and self._make_room(sequence):
                left -= self._schedule(sequence, left, chunks)
        self._admit(left, chunks)
        if not chunks and (self.running or self.waiting) and not self.loading:
            self._admit_alone(chunks)
        self._prefetch()
        return chunks

    def mark_computed(self, chunk: ScheduledChunk) -> None:
        chunk.sequence.computed += chunk.tokens
        if chunk.sequence.lease is not None:
            self._cache.mark_computed(chunk.sequence.lease)

    def finish(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence whose last step is untrusted."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if sequence.lease is not None:
            self._cache.discard(sequence.lease)
            sequence.lease = None
        self._full = False

    def fail(self, sequences: list[Sequence]) -> None:
        """Remove a failed step's sequences, and its nodes from the cache."""
        # Waiting sequences may have found nodes that this step was to compute.
        for sequence in self.waiting:
            self._release(sequence)
        for sequence in sequences:
            self.drop(sequence)

    def _schedule(self, sequence: Sequence, left: int, chunks: list[ScheduledChunk]) -> int:
        tokens = min(left, sequence.pending)
        assert sequence.lease is not None
        # The first commit also counts the use of what was found.
        if sequence.computed < sequence.path_tokens or not sequence.lease.counted:
            self._cache.commit(sequence.lease, sequence.computed + tokens)
        chunks.append(ScheduledChunk(sequence, tokens, tokens == sequence.pending))
        return tokens

    def _make_room(self, sequence: Sequence) -> bool:
        assert sequence.lease is not None
        if len(sequence.tokens) <= len(sequence.lease.block_table) * self._block_size:
            return True
        while True:
            try:
                self._cache.extend(sequence.lease, len(sequence.tokens))
            except OutOfBlocksError:
                if not self._preempt_for(sequence):
                    return False
            else:
                return True

    def _preempt_for(self, sequence: Sequence) -> bool:
        holder = next((other for other in reversed(self.waiting) if other.lease is not None), None)
        if holder is not None:
            self._release(holder)
            return True
        last = self.running[-1]
        if last is sequence:
            # Earlier sequences need their blocks now, and will free them.
            return False
        self._preempt(last)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=lambda other: other.request_id)
        self.preempted += 1

    def _admit(self, left: int, chunks: list[ScheduledChunk]) -> None:
        if self._full and self.running:
            return
        self._full = False
        loading = 0
        for sequence in list(self.waiting):
            if not left or len(self.running) + loading >= self._max_requests:
                return
            try:
                if sequence.lease is None:
                    sequence.lease = self._cache.acquire(sequence.path)
                if not sequence.lease.ready:
                    loading += 1
                    continue
                self._cache.extend(sequence.lease, len(sequence.tokens))
            except OutOfBlocksError:
                # Later sequences must not take the blocks that this one waits for.
                self._full = True
                return
            left -= self._start(sequence, left, chunks)

    def _start(self, sequence: Sequence, left: int, chunks: list[ScheduledChunk]) -> int:
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda other: other.request_id)
        sequence.begin()
        return self._schedule(sequence, left, chunks)

    def _admit_alone(self, chunks: list[ScheduledChunk]) -> None:
        # Waiting sequences hold the blocks that each other needs: give the first one the whole pool.
        if self.running:
            raise OutOfBlocksError("the pool has no room for the only running sequence")
        first, *others = self.waiting
        for sequence in others:
            self._release(sequence)
        if first.lease is None:
            first.lease = self._cache.acquire(first.path)
        self._cache.extend(first.lease, len(first.tokens))
        self._start(first, self._max_batch_tokens, chunks)

    def _prefetch(self) -> None:
        for sequence in self.waiting[:_PREFETCHED]:
            if sequence.lease is None and not sequence.prefetched:
                sequence.prefetched = True
                self._cache.prefetch(sequence.path)

    def _release(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            self._cache.release(sequence.lease)
            sequence.lease = None
            self._full = False
