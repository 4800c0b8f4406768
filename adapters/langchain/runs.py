"""Which LLM call an ordering was made for: the runs of LangChain applications, and the orderings that wait in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

from ragorder.adapters._one_by_one import OneByOne
from ragorder.ordering import Ordering

__all__ = ["Runs", "Usage"]

_MAX_WAITING = 256

Path = tuple[UUID, ...]


class Usage(NamedTuple):
    """What the engine reported of one call, in tokens; None for what it did not report."""

    cached_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens: int | None = None


_NO_NUMBERS = Usage()


@dataclass(eq=False, slots=True)
class _Call:
    """An LLM call under way. `number` counts calls in the order of their start, `path` leads from the root to it.

    `claimed` are the orderings whose documents are in its prompt, foremost first. If there are none, `unclaimed` are
    all that waited when it began. `alone`: its model was asked nothing else with it.
    """

    number: int
    path: Path
    claimed: list[_Waiting]
    unclaimed: list[_Waiting]
    alone: bool
    computed: bool = False


@dataclass(eq=False, slots=True)
class _Waiting:
    """An ordering that waits for its LLM call.

    `streamed_silently` is called if its answer was streamed and nothing was reported of it.

    `calls` are those under way that claimed it. `answer` is what an engine reported of a claim, with its number;
    `others` are served calls that have nobody's documents in their prompts (two of them stand for any more).
    """

    ordering: Ordering[Any]
    texts: Sequence[str]
    path: Path
    streamed_silently: Callable[[], object]
    calls: list[_Call] = field(default_factory=list)
    answer: tuple[int, Usage] | None = None
    others: list[tuple[int, Usage]] = field(default_factory=list)
    claimed: bool = False
    failed: bool = False


@dataclass(eq=False, slots=True)
class _Root:
    """An outermost run, with the open runs in it (each with its path), its LLM calls and its orderings."""

    runs: dict[UUID, Path] = field(default_factory=dict)
    calls: dict[UUID, _Call] = field(default_factory=dict)
    waiting: list[_Waiting] = field(default_factory=list)


class Runs:
    """Follows runs from the outermost inwards, and finishes each ordering with its LLM call's outcome. Thread-safe.

    At most `limit` runs are open at a time: the oldest root beyond that is given up, its orderings count as served.
    Events may come from finalisers, as a stream that was dropped tells of its end: nothing here waits for a lock.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._one_by_one = OneByOne()
        self._numbers = count()
        # In the order of their start: the first of all is always an outermost run.
        self._roots: dict[UUID, _Root] = {}
        self._waiting = 0

    @property
    def open(self) -> int:
        """Runs that began and did not end."""
        return len(self._roots)

    @property
    def waiting(self) -> int:
        """Orderings that are not finished yet."""
        return self._waiting

    def begin(self, run: UUID, parent: UUID | None) -> None:
        """A run begins, within another one or as a new root."""
        self._one_by_one(partial(self._begin, run, parent))

    def expect(
        self, run: UUID, ordering: Ordering[Any], texts: Sequence[str], streamed_silently: Callable[[], object]
    ) -> bool:
        """An ordering was made in a run, for documents with these texts. If that run is not followed, it counts as
        served. `streamed_silently` is called if its answer is streamed without a report of its usage. True: it is in
        hand."""
        self._one_by_one(partial(self._expect, run, ordering, texts, streamed_silently))
        return True

    def call(self, run: UUID, parent: UUID | None, prompt: str, *, alone: bool) -> None:
        """An LLM call begins. One that is nobody's child is none of ours: what it answers was retrieved elsewhere."""
        self._one_by_one(partial(self._call, run, parent, prompt, alone))

    def token(self, run: UUID) -> None:
        """An LLM call has its first token: its prompt was computed, whatever becomes of the answer."""
        self._one_by_one(partial(self._token, run))

    def answered(self, run: UUID, read: Callable[[bool], Usage | None]) -> None:
        """An LLM call ended. `read` gives what was reported (None: no engine was asked), of an LLM call that was made
        alone or not."""
        self._one_by_one(partial(self._answered, run, read))

    def end(self, run: UUID, *, failed: bool) -> None:
        """A run ended. If it failed, so did the LLM calls that are still open in it, and whatever was ordered in it was
        never sent, or in vain."""
        self._one_by_one(partial(self._close, run, failed))

    def _begin(self, run: UUID, parent: UUID | None) -> None:
        root = None if parent is None else self._roots.get(parent)
        if run not in self._roots:
            self._open(root or _Root(), run, parent)
        while len(self._roots) > self.limit:
            self._close(next(iter(self._roots)), False)

    def _expect(
        self, run: UUID, ordering: Ordering[Any], texts: Sequence[str], streamed_silently: Callable[[], object]
    ) -> None:
        root = self._roots.get(run)
        if root is None:
            ordering.confirm()
            return
        texts = [text for text in map(str.strip, texts) if text]
        root.waiting.append(_Waiting(ordering, texts, root.runs[run], streamed_silently))
        self._waiting += 1
        if len(root.waiting) > _MAX_WAITING:
            self._conclude(root, root.waiting[0], False, {})

    def _call(self, run: UUID, parent: UUID | None, prompt: str, alone: bool) -> None:
        root = None if parent is None else self._roots.get(parent)
        if root is None or run in self._roots:
            return
        path = self._open(root, run, parent)
        claimed = _claims(root.waiting, path, prompt)
        call = _Call(next(self._numbers), path, claimed, [] if claimed else list(root.waiting), alone)
        root.calls[run] = call
        for waiting in claimed:
            waiting.claimed = True
            waiting.calls.append(call)

    def _token(self, run: UUID) -> None:
        root = self._roots.get(run)
        call = None if root is None else root.calls.get(run)
        if call is not None:
            call.computed = True

    def _answered(self, run: UUID, read: Callable[[bool], Usage | None]) -> None:
        root = self._roots.get(run)
        if root is None or run not in root.calls:
            return
        call = root.calls[run]
        try:
            usage = read(call.alone)
        except Exception:
            usage = _NO_NUMBERS
        if call.computed and usage == _NO_NUMBERS:
            for waiting in call.claimed:
                self._one_by_one(waiting.streamed_silently)
        self._finish(root, run, usage)
        self._forget(root, run)

    def _open(self, root: _Root, run: UUID, parent: UUID | None) -> Path:
        path = root.runs[run] = (*root.runs.get(parent, ()), run) if parent is not None else (run,)
        self._roots[run] = root
        return path

    def _forget(self, root: _Root, run: UUID) -> None:
        del self._roots[run], root.runs[run]

    def _close(self, run: UUID, failed: bool) -> None:
        root = self._roots.get(run)
        if root is None:
            return
        outermost = len(root.runs[run]) == 1
        if failed or outermost:
            for name, call in list(root.calls.items()):
                if run in call.path:
                    # One that nobody saw end: what it has computed stays in the engine's cache.
                    self._finish(root, name, _NO_NUMBERS if call.computed or not failed else None)
            sole = Counter(each.others[0][0] for each in root.waiting if len(each.others) == 1)
            for waiting in [waiting for waiting in root.waiting if run in waiting.path]:
                self._conclude(root, waiting, failed, sole)
        for name in [run] if not outermost else list(root.runs):
            self._forget(root, name)

    def _finish(self, root: _Root, run: UUID, usage: Usage | None) -> None:
        """A call ended: with this usage, or without anything computed."""
        call = root.calls.pop(run)
        for place, waiting in enumerate(call.claimed):
            waiting.calls.remove(call)
            if usage is None:
                waiting.failed = True
            elif waiting.answer is None or call.number < waiting.answer[0]:
                # The numbers are those of a prompt that begins with the foremost documents.
                waiting.answer = call.number, usage if place == 0 else _NO_NUMBERS
            # What an earlier call reports is the truth: a later one has found in the cache what that one computed.
            answered = waiting.answer is not None and all(waiting.answer[0] < other.number for other in waiting.calls)
            if answered and waiting in root.waiting:
                self._conclude(root, waiting, False, {})
        for waiting in call.unclaimed:
            if usage is None:
                waiting.failed = True
            elif len(waiting.others) < 2:
                waiting.others.append((call.number, usage))

    def _conclude(self, root: _Root, waiting: _Waiting, failed: bool, sole: dict[int, int]) -> None:
        """Decide what became of an ordering. `sole`: for how many orderings a call was the only one."""
        root.waiting.remove(waiting)
        self._waiting -= 1
        usage: Usage | None = _NO_NUMBERS
        if waiting.answer is not None:
            usage = waiting.answer[1]
        elif waiting.others and not waiting.claimed:
            number, reported = waiting.others[0]
            if len(waiting.others) == 1 == sole.get(number):
                usage = reported
        elif waiting.failed or failed:
            usage = None
        # Its turn comes once this event has been dealt with: what an observer of the ordering raises disturbs nothing.
        self._one_by_one(partial(_finish, waiting.ordering, usage))


def _claims(waiting: list[_Waiting], path: Path, prompt: str) -> list[_Waiting]:
    """The orderings whose documents are in a call's prompt, foremost first.

    Of several, those count that were made nearest to the call (in the same branch, in the same node); of those that
    share a place in the prompt, the longest, then one that no other call has claimed, then the one made first.
    """
    found = [(_shared(other.path, path), other, span) for other in waiting if (span := _span(other.texts, prompt))]
    nearest = max((shared for shared, *_ in found), default=0)
    found = [match for match in found if match[0] == nearest]
    found.sort(key=lambda match: (-sum(map(len, match[1].texts)), len(match[1].calls), match[1].failed))
    taken: list[tuple[tuple[int, int], _Waiting]] = []
    for _, other, (start, end) in found:
        if all(end <= first or last <= start for (first, last), _ in taken):
            taken.append(((start, end), other))
    return [other for _, other in sorted(taken, key=lambda place: place[0])]


def _span(texts: Sequence[str], prompt: str) -> tuple[int, int] | None:
    """From where to where the texts stand in a prompt, one after the other."""
    start, end = -1, 0
    for text in texts:
        place = prompt.find(text, end)
        if place < 0:
            return None
        start = place if start < 0 else start
        end = place + len(text)
    return None if start < 0 else (start, end)


def _shared(path: Path, other: Path) -> int:
    """How many runs two paths have in common."""
    shared = 0
    for one, two in zip(path, other, strict=False):
        if one != two:
            break
        shared += 1
    return shared


def _finish(ordering: Ordering[Any], usage: Usage | None) -> None:
    if usage is None:
        ordering.discard()
    else:
        ordering.confirm(usage.cached_tokens, usage.total_tokens, prompt_tokens=usage.prompt_tokens)
