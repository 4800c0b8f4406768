"""Traces of workflows: what their pieces came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from pydantic import BaseModel
from rich.console import RenderableType
from rich.table import Table

from ragorder.common.jsonl import JSONLines

__all__ = ["TraceFigures", "TracedRequest", "WorkItem", "figures_of", "read_traces"]

_EXAMPLE = '{"graph": "irg", "started_s": 0.0, "total_s": 1.2, "pieces": […]}, from WorkflowTrace.as_record()'


class WorkItem(BaseModel):
    """In seconds from its request's start. See `ragorder.pipelining.workflow.result`."""

    node: str
    kind: Literal["due", "speculative"]
    worker: Literal["engine", "search", "step"]
    outcome: str
    planned_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    from_memory: bool = False

    @property
    def used(self) -> bool:
        return self.outcome == "used"


class TracedRequest(BaseModel):
    graph: str
    started_s: float
    total_s: float | None = None
    waited_s: float = 0.0
    outcome: str = "answered"
    pieces: list[WorkItem] = []


def read_traces(path: Path) -> list[TracedRequest]:
    """In the order of their starts. Raises JSONLinesError."""
    requests = [request for _, request in JSONLines(path, example=_EXAMPLE).read(TracedRequest)]
    return sorted(requests, key=lambda request: request.started_s)


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """`ahead`: speculative pieces. `generating`, `searching`, `both`: the share of the time, from the first start to
    the last end, with such a piece running, including paused speculative ones; None if unknown."""

    requests: int
    outcomes: dict[str, int]
    mean_s: float | None
    median_s: float | None
    slowest_s: float | None
    waited_s: float
    pieces: dict[str, int]
    ahead: dict[str, int]
    ahead_used: dict[str, int]
    from_memory: dict[str, int]
    generating: float | None
    searching: float | None
    both: float | None
    cached_share: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def show(self) -> RenderableType:
        table = Table(title="Workflows", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(justify="right", overflow="fold")
        ends = ", ".join(f"{count:,} {outcome}" for outcome, count in self.outcomes.items())
        table.add_row("requests", f"{self.requests:,} ({ends})" if ends else "0")
        table.add_row("time of an answered one: mean", _seconds(self.mean_s))
        table.add_row("median", _seconds(self.median_s))
        table.add_row("slowest", _seconds(self.slowest_s))
        table.add_row("waited for a turn, mean", _seconds(self.waited_s))
        for worker, count in self.pieces.items():
            used, ahead, known = (of.get(worker, 0) for of in (self.ahead_used, self.ahead, self.from_memory))
            text = f"{count:,}, {ahead:,} speculative, {used:,} of them used"
            table.add_row(f"pieces: {worker}", f"{text}; {known:,} from memory" if known else text)
        table.add_row("generations running", _percent(self.generating))
        table.add_row("searches running", _percent(self.searching))
        table.add_row("both", _percent(self.both))
        table.add_row("prompt tokens cached", _percent(self.cached_share))
        return table


def figures_of(requests: Sequence[TracedRequest]) -> TraceFigures:
    pieces = [piece for request in requests for piece in request.pieces if piece.started_s is not None]
    ahead = [piece for piece in pieces if piece.kind == "speculative"]
    total_s = [each.total_s for each in requests if each.outcome == "answered" and each.total_s is not None]
    engine, search = (_running(requests, worker) for worker in ("engine", "search"))
    span_s = _span_s(requests)
    prompts = [
        (piece.cached_tokens, piece.prompt_tokens)
        for piece in pieces
        if piece.cached_tokens is not None and piece.prompt_tokens
    ]
    return TraceFigures(
        requests=len(requests),
        outcomes=dict(Counter(request.outcome for request in requests)),
        mean_s=fmean(total_s) if total_s else None,
        median_s=median(total_s) if total_s else None,
        slowest_s=max(total_s, default=None),
        waited_s=fmean(request.waited_s for request in requests) if requests else 0.0,
        pieces=_by_worker(pieces),
        ahead=_by_worker(ahead),
        ahead_used=_by_worker(piece for piece in ahead if piece.used),
        from_memory=_by_worker(piece for piece in pieces if piece.from_memory),
        generating=_length_s(engine) / span_s if span_s else None,
        searching=_length_s(search) / span_s if span_s else None,
        both=_length_s(_common(engine, search)) / span_s if span_s else None,
        cached_share=sum(cached for cached, _ in prompts) / sum(prompt for _, prompt in prompts) if prompts else None,
    )


_Spans = list[tuple[float, float]]


def _running(requests: Iterable[TracedRequest], worker: str) -> _Spans:
    """Disjoint, ascending."""
    spans = sorted(
        (request.started_s + piece.started_s, request.started_s + piece.ended_s)
        for request in requests
        for piece in request.pieces
        if piece.worker == worker and piece.started_s is not None and piece.ended_s is not None
    )
    merged: _Spans = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _common(one: _Spans, other: _Spans) -> _Spans:
    common: _Spans = []
    left, right = iter(one), iter(other)
    here, there = next(left, None), next(right, None)
    while here is not None and there is not None:
        start, end = max(here[0], there[0]), min(here[1], there[1])
        if start < end:
            common.append((start, end))
        if here[1] < there[1]:
            here = next(left, None)
        else:
            there = next(right, None)
    return common


def _span_s(requests: Sequence[TracedRequest]) -> float:
    ends = [each.started_s + each.total_s for each in requests if each.total_s is not None]
    return max(ends) - min(each.started_s for each in requests) if ends else 0.0


def _length_s(spans: _Spans) -> float:
    return sum(end - start for start, end in spans)


def _by_worker(pieces: Iterable[WorkItem]) -> dict[str, int]:
    counts = Counter(piece.worker for piece in pieces)
    return {worker: counts[worker] for worker in ("engine", "search", "step") if counts[worker]}


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} s"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
