"""LangChain runs in progress, and the LLM call of each ordering."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, Concatenate, ParamSpec
from uuid import UUID

from ragorder.adapters.usage import ReportedUsage
from ragorder.ordering import Ordering

P = ParamSpec("P")

_MAX_WAITING = 256
Path = tuple[UUID, ...]
_NO_NUMBERS = ReportedUsage()


@dataclass(eq=False, slots=True)
class _LLMCall:
    """`claimed`: orderings whose documents the prompt has, in its order; without any, `unclaimed` are all pending."""

    number: int
    path: Path
    claimed: list[_PendingOrdering]
    unclaimed: list[_PendingOrdering]
    alone: bool
    computed: bool = False


@dataclass(eq=False, slots=True)
class _PendingOrdering:
    """`calls`: those in progress; `others`: at most two served calls without any ordering's documents."""

    ordering: Ordering[Any]
    texts: Sequence[str]
    path: Path
    streamed_silently: Callable[[], object]
    calls: list[_LLMCall] = field(default_factory=list)
    answer: tuple[int, ReportedUsage] | None = None
    others: list[tuple[int, ReportedUsage]] = field(default_factory=list)
    claimed: bool = False
    failed: bool = False


@dataclass(eq=False, slots=True)
class _OutermostRun:
    runs: dict[UUID, Path] = field(default_factory=dict)
    calls: dict[UUID, _LLMCall] = field(default_factory=dict)
    waiting: list[_PendingOrdering] = field(default_factory=list)


def _in_turn(method: Callable[Concatenate[Runs, P], None]) -> Callable[Concatenate[Runs, P], bool]:
    def call(self: Runs, /, *args: P.args, **kwargs: P.kwargs) -> bool:
        self._one_by_one(partial(method, self, *args, **kwargs))
        return True

    return call


class Runs:
    """At most `limit` open runs; each ordering is finished with its LLM call's outcome. Thread-safe without waiting for
    locks: events may come from finalisers."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._calls: deque[Callable[[], object]] = deque()
        self._running = Lock()
        self._numbers = count()
        # By order of start: the first one is always an outermost run.
        self.roots: dict[UUID, _OutermostRun] = {}
        self.waiting = 0

    @_in_turn
    def begin(self, run: UUID, parent: UUID | None) -> None:
        root = None if parent is None else self.roots.get(parent)
        if run not in self.roots:
            self._open(root or _OutermostRun(), run, parent)
        while len(self.roots) > self.limit:
            self._close(next(iter(self.roots)), False)

    @_in_turn
    def expect(
        self, run: UUID, ordering: Ordering[Any], texts: Sequence[str], streamed_silently: Callable[[], object]
    ) -> None:
        root = self.roots.get(run)
        if root is None:
            ordering.confirm()
            return
        texts = [text for text in map(str.strip, texts) if text]
        root.waiting.append(_PendingOrdering(ordering, texts, root.runs[run], streamed_silently))
        self.waiting += 1
        if len(root.waiting) > _MAX_WAITING:
            self._conclude(root, root.waiting[0], False, {})

    @_in_turn
    def call(self, run: UUID, parent: UUID | None, prompt: str, alone: bool) -> None:
        """Open a call; ignore one without a parent: its documents were retrieved elsewhere."""
        root = None if parent is None else self.roots.get(parent)
        if root is None or run in self.roots:
            return
        path = self._open(root, run, parent)
        claimed = _claims(root.waiting, path, prompt)
        call = _LLMCall(next(self._numbers), path, claimed, [] if claimed else list(root.waiting), alone)
        root.calls[run] = call
        for waiting in claimed:
            waiting.claimed = True
            waiting.calls.append(call)

    @_in_turn
    def token(self, run: UUID) -> None:
        root = self.roots.get(run)
        call = None if root is None else root.calls.get(run)
        if call is not None:
            call.computed = True

    @_in_turn
    def answered(self, run: UUID, read: Callable[[bool], ReportedUsage | None]) -> None:
        """`read(alone)` returns the call's usage (None: no engine answered)."""
        root = self.roots.get(run)
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

    @_in_turn
    def end(self, run: UUID, failed: bool) -> None:
        self._close(run, failed)

    def _one_by_one(self, call: Callable[[], object]) -> None:
        """Run a call after those before it, without waiting for a lock: a finaliser may interrupt its holder."""
        self._calls.append(call)
        failure: Exception | None = None
        # Checked again after the release: calls that arrived meanwhile were left to this thread.
        while self._calls and self._running.acquire(blocking=False):
            try:
                while self._calls:
                    self._calls.popleft()()
            except Exception as error:
                failure = error
            finally:
                self._running.release()
        if failure is not None:
            raise failure

    def _open(self, root: _OutermostRun, run: UUID, parent: UUID | None) -> Path:
        path = root.runs[run] = (*root.runs.get(parent, ()), run) if parent is not None else (run,)
        self.roots[run] = root
        return path

    def _forget(self, root: _OutermostRun, run: UUID) -> None:
        del self.roots[run], root.runs[run]

    def _close(self, run: UUID, failed: bool) -> None:
        root = self.roots.get(run)
        if root is None:
            return
        outermost = len(root.runs[run]) == 1
        if failed or outermost:
            for name, call in list(root.calls.items()):
                if run in call.path:
                    # Its end was not reported: its computed prompt stays cached.
                    self._finish(root, name, _NO_NUMBERS if call.computed or not failed else None)
            # By call, the number of orderings for which it is the only candidate.
            sole = Counter(each.others[0][0] for each in root.waiting if len(each.others) == 1)
            for waiting in [waiting for waiting in root.waiting if run in waiting.path]:
                self._conclude(root, waiting, failed, sole)
        for name in [run] if not outermost else list(root.runs):
            self._forget(root, name)

    def _finish(self, root: _OutermostRun, run: UUID, usage: ReportedUsage | None) -> None:
        call = root.calls.pop(run)
        for place, waiting in enumerate(call.claimed):
            waiting.calls.remove(call)
            if usage is None:
                waiting.failed = True
            elif waiting.answer is None or call.number < waiting.answer[0]:
                # The usage belongs to a prompt that begins with the first claimed documents.
                waiting.answer = call.number, usage if place == 0 else _NO_NUMBERS
            # The earliest call counts: a later one reads the cache that it filled.
            answered = waiting.answer is not None and all(waiting.answer[0] < other.number for other in waiting.calls)
            if answered and waiting in root.waiting:
                self._conclude(root, waiting, False, {})
        for waiting in call.unclaimed:
            if usage is None:
                waiting.failed = True
            elif len(waiting.others) < 2:
                waiting.others.append((call.number, usage))

    def _conclude(self, root: _OutermostRun, waiting: _PendingOrdering, failed: bool, sole: dict[int, int]) -> None:
        root.waiting.remove(waiting)
        self.waiting -= 1
        usage: ReportedUsage | None = _NO_NUMBERS
        if waiting.answer is not None:
            usage = waiting.answer[1]
        elif waiting.others and not waiting.claimed:
            number, reported = waiting.others[0]
            if len(waiting.others) == 1 == sole.get(number):
                usage = reported
        elif waiting.failed or failed:
            usage = None
        # After this event: an error in a callback of the ordering must not interrupt it.
        self._one_by_one(partial(_finish_ordering, waiting.ordering, usage))


def _claims(waiting: list[_PendingOrdering], path: Path, prompt: str) -> list[_PendingOrdering]:
    """Return the orderings nearest to a call whose documents its prompt has, in prompt order, without overlaps."""
    found = [(_shared(other.path, path), other, span) for other in waiting if (span := _span(other.texts, prompt))]
    nearest = max((shared for shared, *_ in found), default=0)
    found = [match for match in found if match[0] == nearest]
    found.sort(key=lambda match: (-sum(map(len, match[1].texts)), len(match[1].calls), match[1].failed))
    taken: list[tuple[tuple[int, int], _PendingOrdering]] = []
    for _, other, (start, end) in found:
        if all(end <= first or last <= start for (first, last), _ in taken):
            taken.append(((start, end), other))
    return [other for _, other in sorted(taken, key=lambda place: place[0])]


def _span(texts: Sequence[str], prompt: str) -> tuple[int, int] | None:
    start, end = -1, 0
    for text in texts:
        place = prompt.find(text, end)
        if place < 0:
            return None
        start = place if start < 0 else start
        end = place + len(text)
    return None if start < 0 else (start, end)


def _shared(path: Path, other: Path) -> int:
    shared = 0
    for one, two in zip(path, other, strict=False):
        if one != two:
            break
        shared += 1
    return shared


def _finish_ordering(ordering: Ordering[Any], usage: ReportedUsage | None) -> None:
    if usage is None:
        ordering.discard()
    else:
        usage.confirm(ordering)
