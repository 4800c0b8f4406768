"""Continuous batching, most cached sequences first (RAGCache section 5.2)."""

from __future__ import annotations

from bisect import insort
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter, mul

from ragorder.kernels.cache import KnowledgeCache, Segment
from ragorder.kernels.engine.selecting import Fuser
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.paging import OutOfBlocksError
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, Ticket
from ragorder.trie.profile import LINEAR, PrefillProfile

# Waiting sequences whose cached prefix is prefetched.
_PREFETCHED = 8
# Time to load a token as a share of computing it, without measured load times. On a CPU: 0.01 and 0.03
# (docs/embedded.md); in RAGCache's Figure 7: 0.19 for a GPU's host memory.
_LOADS = {"host": 0.1, "disk": 0.2}
# Tokens of the prompt whose computation is compared with loads.
_COMPUTED_TOKENS = 1024
# Steps without a shortage before steps may double again.
_STEPS_TO_GROW = 256

_by_turn = attrgetter("turn")


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `tokens` of a sequence: the `last` before a choice, or part of its selection (`selects`)."""

    sequence: Sequence
    tokens: int
    last: bool
    selects: bool = False


class Scheduler:
    """The next turn goes to the waiting sequence with the largest cached / computation length, but none is overtaken by
    more than `window` later ones (0: in order of arrival). It runs once its prefix is loaded and all tokens have
    blocks. If blocks run out, the latest sequences are preempted; they keep their turns."""

    def __init__(
        self,
        cache: KnowledgeCache,
        max_batch_tokens: int,
        max_requests: int,
        window: int = 0,
        profile: PrefillProfile = LINEAR,
        fuser: Fuser | None = None,
    ) -> None:
        self.running: list[Sequence] = []
        self._fuser = fuser
        self.preempted = 0
        self._cache = cache
        self._block_size = cache.shape.block_size
        self._max_batch_tokens = self._step_tokens = max_batch_tokens
        self._max_requests = max_requests
        computing_s = profile.cost(0, _COMPUTED_TOKENS)
        loads = _LOADS | {tier: min(1.0, load_s / computing_s) for tier, load_s in profile.loads.items() if computing_s}
        self._worth = (1.0, 1 - loads["host"], 1 - loads["disk"])
        self._queue: CacheAwareQueue[Sequence] = CacheAwareQueue(window)
        self._tickets: dict[int, Ticket[Sequence]] = {}
        self._turns = count()
        # Sequences that have a turn but do not run.
        self._admitted: list[Sequence] = []
        # The first of them did not fit, and nothing has been freed since.
        self._full = False
        # A prefix was still loading during this plan.
        self._awaits_loads = False
        self._steps_since_shortage = 0

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for sequence in (*self._admitted, *self._queue) if sequence.owner is None]

    @property
    def _requests(self) -> int:
        return len({id(sequence.owner or sequence) for sequence in self.running})

    @property
    def with_turns(self) -> list[Sequence]:
        return [*self.running, *self._admitted]

    @property
    def loading(self) -> list[Sequence]:
        return [sequence for sequence in self._admitted if sequence.lease is not None and not sequence.lease.ready]

    def add(self, sequence: Sequence) -> None:
        sequence.expected = self._cache.expect(sequence.path, borrow=sequence.fusion is not None)
        self._tickets[sequence.request_id] = self._queue.enter(sequence, partial(self._lengths, sequence))

    def plan(self) -> list[ScheduledChunk]:
        """Return chunks of at most `max_batch_tokens`; none while all wait for prefixes. Raises OutOfBlocksError if the
        first sequence never fits."""
        chunks: list[ScheduledChunk] = []
        self._awaits_loads = False
        self._plan_suspect(chunks)
        if not chunks:
            self._plan_all(chunks)
        if not chunks and (self.running or self._admitted) and not self._awaits_loads and not self.loading:
            self._admit_alone(chunks)
        self._prefetch()
        return chunks

    def mark_computed(self, chunk: ScheduledChunk) -> None:
        sequence = chunk.sequence
        if not chunk.selects:
            sequence.advance(chunk.tokens)
        elif self._fuser is not None:
            self._fuser.advance(sequence)
        sequence.suspect = False
        if sequence.lease is not None:
            self._cache.mark_computed(sequence.lease)
        if sequence.owner is not None and not sequence.pending:
            self._finish_helper(sequence, sequence.owner)

    def finish(self, sequence: Sequence) -> None:
        for each in (*sequence.helpers, sequence):
            self._remove(each)
            self._release(each)

    def drop(self, sequence: Sequence) -> None:
        for each in (*sequence.helpers, sequence):
            self._remove(each)
            self._discard(each)

    def reject(self, sequence: Sequence) -> None:
        """Remove a sequence, its nodes, and found ones with NaN or inf."""
        self.drop(sequence)
        self._cache.purge(sequence.nodes, found=sequence.found)

    def fail(self, sequences: list[Sequence]) -> None:
        # Waiting sequences may have found nodes of this step.
        for sequence in self._admitted:
            self._release(sequence)
        for sequence in sequences:
            self.drop(sequence)

    def requeue(self) -> None:
        """Release all blocks after a failed step. Turns and tokens are kept."""
        turns = self.with_turns
        self._admitted = sorted((sequence for sequence in turns if sequence.owner is None), key=_by_turn)
        self.running.clear()
        for sequence in turns:
            self._discard(sequence)
            # The helpers' documents are computed in place.
            sequence.helpers.clear()

    @property
    def step_tokens(self) -> int:
        return self._step_tokens

    @property
    def max_requests(self) -> int:
        return self._max_requests

    def limit(self, step_tokens: int, max_requests: int) -> None:
        """Set the sizes of later steps. Running requests go on."""
        self._max_batch_tokens = self._step_tokens = step_tokens
        self._max_requests = max_requests
        self._full = False

    def shrink(self, tokens: int) -> bool:
        smaller = min(tokens, self._step_tokens) // 2
        if not smaller:
            return False
        self._step_tokens = smaller
        self._steps_since_shortage = 0
        return True

    def _lengths(self, sequence: Sequence) -> CachedLengths:
        cached = sum(map(mul, self._worth, self._cache.find(sequence.path)))
        if sequence.fusion is not None:
            copied = sum(map(mul, self._worth, self._cache.find_copies(sequence.path)))
            cached += copied * (1 - sequence.fusion.recompute)
        return CachedLengths(cached, len(sequence.tokens) - cached, sequence.request.prefix_tokens)

    def _limit(self) -> int:
        if self._step_tokens < self._max_batch_tokens:
            self._steps_since_shortage += 1
            if self._steps_since_shortage > _STEPS_TO_GROW:
                self._step_tokens = min(2 * self._step_tokens, self._max_batch_tokens)
                self._steps_since_shortage = 0
        return self._step_tokens

    def _plan_suspect(self, chunks: list[ScheduledChunk]) -> None:
        # Alone, to find out whether it was the cause.
        suspect = next((each for each in self.with_turns if each.suspect), None)
        if suspect is None:
            return
        if suspect in self.running:
            if self._make_room(suspect):
                self._schedule(suspect, self._step_tokens, chunks)
        elif len(self.running) < self._max_requests:
            with suppress(OutOfBlocksError):
                self._try_start(suspect, self._step_tokens, chunks)

    def _plan_all(self, chunks: list[ScheduledChunk]) -> None:
        left = self._limit()
        for sequence in list(self.running):
            # An earlier sequence may have preempted it meanwhile.
            if left > 0 and sequence.lease is not None and self._make_room(sequence):
                left -= self._schedule(sequence, left, chunks)
        self._admit(left, chunks)

    def _schedule(self, sequence: Sequence, left: int, chunks: list[ScheduledChunk]) -> int:
        assert sequence.lease is not None
        selecting = sequence.selecting
        if selecting is not None and not sequence.pending:
            chunks.append(ScheduledChunk(sequence, selecting.pending, last=False, selects=True))
            return selecting.pending
        tokens = min(left, sequence.pending)
        # The first commit also counts the use of found nodes.
        if sequence.computed < sequence.path_tokens or not sequence.lease.counted:
            self._cache.commit(sequence.lease, sequence.exact_after(tokens))
            sequence.nodes += [copy.node.key for copy in sequence.lease.pending]
        last = tokens == sequence.pending and sequence.owner is None and selecting is None
        chunks.append(ScheduledChunk(sequence, tokens, last))
        return tokens

    def _make_room(self, sequence: Sequence) -> bool:
        assert sequence.lease is not None
        # Nodes are committed within the lease's tokens; an answer has the whole last block.
        fused = sequence.scattered is not None
        held = sequence.lease.tokens if fused else len(sequence.lease.block_table) * self._block_size
        if sequence.room <= held:
            return True
        while True:
            try:
                self._cache.extend(sequence.lease, sequence.room)
            except OutOfBlocksError:
                if not self._preempt_for(sequence):
                    return False
            else:
                return True

    def _preempt_for(self, sequence: Sequence) -> bool:
        holder = next((other for other in reversed(self._admitted) if other.lease is not None), None)
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
        insort(self._admitted, sequence, key=_by_turn)
        self.preempted += 1

    def _admit(self, left: int, chunks: list[ScheduledChunk]) -> None:
        if self._full and self.running:
            return
        self._full = False
        loading = 0
        with_turns = iter(list(self._admitted))
        while left > 0 and self._requests + loading < self._max_requests:
            sequence = next(with_turns, None) or self._take_turn()
            if sequence is None:
                return
            try:
                tokens = self._try_start(sequence, left, chunks)
            except OutOfBlocksError:
                # Later sequences must not take the blocks that this one waits for.
                self._full = True
                return
            loading += not tokens and not sequence.helpers
            left -= tokens

    def _take_turn(self) -> Sequence | None:
        if not self._queue:
            return None
        sequence = self._queue.take().item
        del self._tickets[sequence.request_id]
        sequence.turn = next(self._turns)
        self._admitted.append(sequence)
        return sequence

    def _try_start(self, sequence: Sequence, left: int, chunks: list[ScheduledChunk]) -> int:
        """Return the tokens of its or its helpers' first chunks; 0 while its prefix loads."""
        if sequence.helpers:
            return 0
        if sequence.lease is None:
            fusion = sequence.fusion
            sequence.lease = self._cache.acquire(
                sequence.path,
                borrow=fusion is not None,
                tokens=len(sequence.tokens),
                recompute=0.0 if fusion is None else fusion.recompute,
            )
            if self._fuser is not None and sequence.standalone is None:
                helpers = self._fuser.helpers(sequence)
                sequence.standalone = frozenset(helper.path[-1].key for helper in helpers)
                if helpers:
                    return self._start_helpers(sequence, helpers, left, chunks)
        if not sequence.lease.ready:
            self._awaits_loads = True
            return 0
        room = len(sequence.tokens) if self._fuser is None else self._fuser.room(sequence)
        self._cache.extend(sequence.lease, room)
        return self._start(sequence, left, chunks)

    def _start_helpers(
        self, sequence: Sequence, helpers: list[Sequence], left: int, chunks: list[ScheduledChunk]
    ) -> int:
        # The helpers need blocks, and add to the sequence's cached KV.
        self._release(sequence)
        sequence.helpers = helpers
        place = self._admitted.index(sequence)
        self._admitted[place:place] = helpers
        tokens = 0
        for helper in list(helpers):
            helper.turn = sequence.turn
            if tokens < left:
                tokens += self._try_start(helper, left - tokens, chunks)
        return tokens

    def _finish_helper(self, helper: Sequence, owner: Sequence) -> None:
        self.finish(helper)
        owner.helpers.remove(helper)
        owner.nodes += helper.nodes

    def _start(self, sequence: Sequence, left: int, chunks: list[ScheduledChunk]) -> int:
        self._admitted.remove(sequence)
        self._settle(sequence)
        insort(self.running, sequence, key=_by_turn)
        sequence.begin()
        if sequence.owner is not None and not sequence.pending:
            # Another request has computed it meanwhile.
            self._finish_helper(sequence, sequence.owner)
            return 0
        if self._fuser is not None:
            self._fuser.begin(sequence, self._step_tokens)
        if sequence.scattered is not None and sequence.lease is not None:
            try:
                self._cache.extend(sequence.lease, sequence.room)
            except OutOfBlocksError:
                # More tokens are its own than were expected: the next step makes room.
                return 0
        return self._schedule(sequence, left, chunks)

    def _admit_alone(self, chunks: list[ScheduledChunk]) -> None:
        # Waiting sequences hold blocks that others need, or pin nodes found too early: give the first sequence the
        # whole pool, without borrowed documents.
        leases = [sequence.lease for sequence in self.running if sequence.lease is not None]
        if leases and not any(lease.pinned or lease.borrowed for lease in leases):
            raise OutOfBlocksError("the pool has no room for the only running sequence")
        for sequence in list(self.running):
            self._preempt(sequence)
        for sequence in self._admitted:
            self._release(sequence)
        first = self._admitted[0].owner or self._admitted[0]
        for helper in first.helpers:
            self._admitted.remove(helper)
        first.helpers = []
        # Found nodes may have blocks outside its table, such as the system prompt's last one.
        try:
            self._acquire_all(first, first.path)
        except OutOfBlocksError:
            self._acquire_all(first, ())
        self._start(first, self._step_tokens, chunks)

    def _acquire_all(self, sequence: Sequence, path: tuple[Segment, ...]) -> None:
        sequence.lease = self._cache.acquire(path)
        try:
            self._cache.extend(sequence.lease, len(sequence.tokens))
        except OutOfBlocksError:
            self._release(sequence)
            raise

    def _prefetch(self) -> None:
        for sequence in [*self._admitted, *self._queue.upcoming(_PREFETCHED)][:_PREFETCHED]:
            if sequence.lease is None and not sequence.prefetched:
                sequence.prefetched = True
                self._cache.prefetch(sequence.path, borrow=sequence.fusion is not None)

    def _settle(self, sequence: Sequence) -> None:
        self._cache.settle(sequence.expected)
        sequence.expected = ()

    def _remove(self, sequence: Sequence) -> None:
        self._settle(sequence)
        ticket = self._tickets.pop(sequence.request_id, None)
        if ticket is not None:
            self._queue.leave(ticket)
        else:
            (self.running if sequence in self.running else self._admitted).remove(sequence)

    def _discard(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            self._cache.discard(sequence.lease)
            sequence.lease = None
        self._full = False

    def _release(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            self._cache.release(sequence.lease)
            sequence.lease = None
            self._full = False
