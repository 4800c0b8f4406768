"""Who is computed in a step: continuous batching, first come first served among those whose prefix is there."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Many
from dataclasses import dataclass

from ragorder.kernels.cache import KnowledgeCache
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.paging import OutOfBlocksError

__all__ = ["Chunk", "Scheduler"]

# How many of those that wait for their turn have what is cached of them loaded ahead.
_PREFETCHED = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of a sequence: its next `tokens` tokens. After the last chunk its next token is chosen."""

    sequence: Sequence
    tokens: int
    last: bool


class Scheduler:
    """Sequences that wait, in the order in which they came, and those that run, in the same order.

    A sequence is admitted when what it finds cached is on the device, and there are blocks for all of its tokens so
    far. While its prefix is still being loaded others go first. If blocks run out for an answer, those that came last
    give theirs up and wait again; what they had computed for the tree may still be cached when their turn comes.
    """

    def __init__(self, cache: KnowledgeCache, block_size: int, max_batch_tokens: int, max_requests: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preempted = 0
        self._cache = cache
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._max_requests = max_requests
        # There has been no room for the first who waits, and none has come free since.
        self._full = False

    @property
    def loading(self) -> list[Sequence]:
        """Those that wait for a part of their prefix."""
        return [sequence for sequence in self.waiting if sequence.lease is not None and not sequence.lease.ready]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> list[Chunk]:
        """The next step, at most `max_batch_tokens` tokens; empty if everybody waits for a part of a prefix.

        Raises OutOfBlocksError if the first one cannot be computed although nothing else is in use.
        """
        chunks: list[Chunk] = []
        left = self._max_batch_tokens
        for sequence in list(self.running):
            # Somebody who came before may have taken its blocks meanwhile.
            if left and sequence.lease is not None and self._make_room(sequence):
                left -= self._schedule(sequence, left, chunks)
        self._admit(left, chunks)
        if not chunks and (self.running or self.waiting) and not self.loading:
            self._admit_alone(chunks)
        self._prefetch()
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """The step has come about."""
        chunk.sequence.computed += chunk.tokens
        if chunk.sequence.lease is not None:
            self._cache.mark_computed(chunk.sequence.lease)

    def finish(self, sequence: Sequence) -> None:
        """It has ended, whatever it did: nothing is held for it any more."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def drop(self, sequence: Sequence) -> None:
        """It has ended, and what it computed last is not to be trusted."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if sequence.lease is not None:
            self._cache.discard(sequence.lease)
            sequence.lease = None
        self._full = False

    def fail(self, sequences: Many[Sequence]) -> None:
        """The step did not come about: what it would have computed is not cached, and its sequences have ended."""
        # Who waits may have found what this step was to compute.
        for sequence in self.waiting:
            self._release(sequence)
        for sequence in sequences:
            self.drop(sequence)

    def _schedule(self, sequence: Sequence, left: int, chunks: list[Chunk]) -> int:
        tokens = min(left, sequence.pending)
        assert sequence.lease is not None
        # The first commit also counts the use of what was found.
        if sequence.computed < sequence.path_tokens or not sequence.lease.counted:
            self._cache.commit(sequence.lease, sequence.computed + tokens)
        chunks.append(Chunk(sequence, tokens, tokens == sequence.pending))
        return tokens

    def _make_room(self, sequence: Sequence) -> bool:
        """Whether there are blocks for the tokens of a running sequence, after those who came later gave up theirs."""
        assert sequence.lease is not None
        if len(sequence.tokens) <= len(sequence.lease.block_table) * self._block_size:
            return True
        while True:
            try:
                self._cache.extend(sequence.lease, len(sequence.tokens))
            except OutOfBlocksError:
                if not self._take_back(sequence):
                    return False
            else:
                return True

    def _take_back(self, sequence: Sequence) -> bool:
        """Take the blocks of who came last: of one who waits, or else of one who runs and came after `sequence`."""
        holder = next((other for other in reversed(self.waiting) if other.lease is not None), None)
        if holder is not None:
            self._release(holder)
            return True
        last = self.running[-1]
        if last is sequence:
            # Who came before needs its blocks now, and will give them back.
            return False
        self._preempt(last)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=lambda other: other.request_id)
        self.preempted += 1

    def _admit(self, left: int, chunks: list[Chunk]) -> None:
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
                # Who comes after must not take what this one waits for.
                self._full = True
                return
            left -= self._start(sequence, left, chunks)

    def _start(self, sequence: Sequence, left: int, chunks: list[Chunk]) -> int:
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda other: other.request_id)
        sequence.begin()
        return self._schedule(sequence, left, chunks)

    def _admit_alone(self, chunks: list[Chunk]) -> None:
        """Nobody can be computed as others who wait hold blocks: the first one has the pool for itself."""
        if self.running:
            raise OutOfBlocksError("the pool has no room for the only one who runs")
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
