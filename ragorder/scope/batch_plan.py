"""Batch plan, chosen by dry runs on copies of its scope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from ragorder.scope.moves import BestPlace
from ragorder.scope.request import OrderRequest
from ragorder.scope.scope import Scope
from ragorder.trie.plan import CachedPath, Planned, plan_backlog, shared_tokens
from ragorder.trie.tree import Key

_MOST_CANDIDATES = 64


class Step(NamedTuple):
    """A request of the batch and the permutation of its ranks (None: that of `order`)."""

    number: int
    permutation: list[int] | None = None


_Requests = Sequence[OrderRequest[Any]]
_Plan = Callable[["_DryRun", _Requests], None]


def plan_batch(
    copy_scope: Callable[[], Scope], requests: _Requests, max_wait: int | None, suffix_tokens: int | None = None
) -> list[Step]:
    """Return the steps of the plan with most cached tokens, in serving order, at most `max_wait` places late."""
    as_they_come = [Step(number) for number in range(len(requests))]
    if max_wait == 0 or len(requests) < 2:
        return as_they_come
    scope = copy_scope()

    def dry_run(plan: _Plan, copy: Scope) -> _DryRun:
        run = _DryRun(copy, suffix_tokens)
        plan(run, requests)
        return run

    window = len(requests) if max_wait is None else min(max_wait + 1, len(requests))
    # A single window is planned before anything is served: there is nothing to learn.
    copy = scope.copy(learns=window < len(requests))
    best = dry_run(lambda run, requests: _in_windows(run, requests, window), copy)
    if window < len(requests):
        # With a single window the windowed plan is better.
        nearest = dry_run(lambda run, requests: _nearest_first(run, requests, window), scope.copy())
        best = max(best, nearest, key=attrgetter("cached_tokens"))
    # With equal hits the plan is better: its shared prefixes are adjacent, so other cache users cannot separate them.
    return best.steps if best.cached_tokens >= dry_run(_one_by_one, scope).cached_tokens else as_they_come


class _DryRun:
    def __init__(self, scope: Scope, suffix_tokens: int | None) -> None:
        self.scope = scope
        self.steps: list[Step] = []
        self.cached_tokens = 0
        self._suffix_tokens = suffix_tokens

    def order(self, number: int, request: OrderRequest[Any], waiting: Sequence[frozenset[Any]] = ()) -> None:
        self._serve(number, self.scope.order(request, waiting, self._suffix_tokens))

    def start(self, number: int, request: OrderRequest[Any], permutation: list[int]) -> None:
        self._serve(number, self.scope.start(request, permutation, self._suffix_tokens))

    def _serve(self, number: int, ordering: Any) -> None:
        self.steps.append(Step(number, list(ordering.permutation)))
        self.cached_tokens += ordering.cached_tokens
        ordering.confirm()


def _one_by_one(run: _DryRun, requests: _Requests) -> None:
    for number, request in enumerate(requests):
        run.order(number, request)


def _in_windows(run: _DryRun, requests: _Requests, window: int) -> None:
    scope = run.scope
    for first in range(0, len(requests), window):
        batch = requests[first : first + window]
        cached = [scope.cached_path(request) for request in batch]
        tokens = {key: length for request in batch for key, length in zip(request.keys, request.tokens, strict=True)}
        # Documents that are not shared are placed as for a single request.
        alone = [[request.keys[rank] for rank in scope.preview(request, ())] for request in batch]
        planned = _with_best(
            scope.best, plan_backlog(alone, tokens, cached), [request.keys for request in batch], cached, tokens
        )
        for number, order in planned:
            request = batch[number]
            run.start(first + number, request, [request.ranks[key] for key in order])


def _nearest_first(run: _DryRun, requests: _Requests, window: int) -> None:
    coming: Iterator[tuple[int, OrderRequest[Any], frozenset[Any]]] = (
        (number, request, frozenset(request.keys)) for number, request in enumerate(requests)
    )
    candidates = list(islice(coming, min(window, _MOST_CANDIDATES)))
    for place in range(len(requests)):
        late = place - candidates[0][0] >= window - 1
        held = [run.scope.predict_cached_tokens(request)[0] for _, request, _ in candidates[: 1 if late else None]]
        number, request, _ = candidates.pop(held.index(max(held)))
        run.order(number, request, [keys for _, _, keys in candidates])
        candidates += islice(coming, 1)


def _with_best(
    best: BestPlace,
    planned: Sequence[Planned],
    requests: Sequence[Sequence[Key]],
    cached: Sequence[CachedPath],
    tokens: Mapping[Key, int],
) -> Sequence[Planned]:
    if best.end == "any":
        return planned
    improved: list[Planned] = []
    for place, (number, order) in enumerate(planned):
        first = requests[number][:1]
        others = [key for key in order if key not in first]
        moved = [*first, *others] if best.end == "first" else [*others, *first]
        before = [cached[number].keys, *(other for _, other in improved[-1:])]
        after = [other for _, other in planned[place + 1 : place + 2]]
        lost = _saved(order, before, after, tokens) - _saved(moved, before, after, tokens)
        improved.append((number, moved if lost <= best.price else order))
    return improved


def _saved(
    order: Sequence[Key], before: Sequence[Sequence[Key]], after: Sequence[Sequence[Key]], tokens: Mapping[Key, int]
) -> int:
    found = max(shared_tokens(order, other, tokens) for other in before)
    return found + sum(shared_tokens(order, other, tokens) for other in after)
