"""Traces of workflows: what their pieces came to, and their picture (HedraRAG Figure 12)."""

from __future__ import annotations

import io
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
from ragorder.eval.report.canvas import COLOURS, need_matplotlib

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


FORMATS = (".png", ".svg", ".html")
_COLOUR = {"engine": COLOURS["earned"][0], "search": COLOURS["sorted"][0], "step": COLOURS["retrieval"][0]}
_WORDS = {"engine": "generation", "search": "search", "step": "step"}
# Of a request's row: engine above, search below it, steps between the two.
_LANES = {"engine": (0.06, 0.42), "step": (0.47, 0.06), "search": (0.53, 0.42)}
_LABEL_SHARE = 0.035
_WIDTH, _ROW, _FRAME = 11.0, 0.42, 1.3


def draw_wavefront(requests: Sequence[TracedRequest], out: Path, *, first: int = 1) -> None:
    """One row a request, in the order given and numbered from `first`. Raises ImportError naming the extra,
    ValueError for another format or no requests."""
    if out.suffix not in FORMATS:
        raise ValueError(f"{out.name}: a picture ends in {', '.join(FORMATS)}")
    if not requests:
        raise ValueError("there is no request to draw")
    matplotlib = need_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "ragorder", "text.parse_math": False}):
        figure = Figure(figsize=(_WIDTH, _ROW * len(requests) + _FRAME), dpi=110, layout="constrained")
        _paint(figure.subplots(), requests, first)
        if out.suffix == ".html":
            out.write_text(_page(figure), "utf-8")
        else:
            figure.savefig(out, metadata={"Date": None, "Creator": None} if out.suffix == ".svg" else None)


def _paint(axes: Any, requests: Sequence[TracedRequest], first: int) -> None:
    zero_s = min(request.started_s - request.waited_s for request in requests)
    end_s = max(request.started_s - zero_s + _end_s(request) for request in requests) or 1.0
    for row, request in enumerate(requests):
        offset_s = request.started_s - zero_s
        if request.waited_s > 0:
            axes.plot([offset_s - request.waited_s, offset_s], [row + 0.5] * 2, ":", color="#888888", linewidth=1)
        for worker in _LANES:
            drawn = [piece for piece in request.pieces if piece.worker == worker and piece.started_s is not None]
            for piece, low, height in _stacked(drawn, *_LANES[worker], _end_s(request)):
                _paint_piece(axes, piece, offset_s, row + low, height, _end_s(request), end_s)
        axes.axhline(row, color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_xlim(0, end_s * 1.005)
    axes.set_ylim(len(requests), 0)
    axes.set_yticks([row + 0.5 for row in range(len(requests))])
    axes.set_yticklabels([f"{request.graph} {number}" for number, request in enumerate(requests, first)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("Pieces of work, a row a request: above on the engine, below in the search", loc="left", fontsize=10)
    axes.figure.legend(handles=_legend(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _paint_piece(
    axes: Any, piece: WorkItem, offset_s: float, low: float, height: float, total_s: float, end_s: float
) -> None:
    assert piece.started_s is not None
    ended_s = total_s if piece.ended_s is None else piece.ended_s
    start_s, width_s = offset_s + piece.started_s, max(ended_s - piece.started_s, end_s * 1e-3)
    if piece.planned_s is not None and piece.planned_s < piece.started_s:
        waited = [offset_s + piece.planned_s, start_s]
        axes.plot(waited, [low + height / 2] * 2, "-", color=_COLOUR[piece.worker], linewidth=0.7)
    axes.barh(low, width_s, height, start_s, align="edge", **_look(piece))
    if width_s > _LABEL_SHARE * end_s and piece.worker != "step":
        solid = piece.kind == "due" and piece.used
        axes.text(
            start_s + width_s / 2,
            low + height / 2,
            piece.node,
            ha="center",
            va="center",
            fontsize=6.5,
            color="white" if solid else "black",
            bbox=None if piece.used else {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            clip_on=True,
        )


def _look(piece: WorkItem) -> dict[str, Any]:
    colour = _COLOUR[piece.worker]
    if not piece.used:
        return {"facecolor": "white", "edgecolor": colour, "linewidth": 0.8, "hatch": "////"}
    if piece.kind == "speculative":
        return {"facecolor": f"{colour}55", "edgecolor": colour, "linewidth": 0.8}
    return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4}


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    handles = []
    for worker in ("engine", "search"):
        for kind, outcome, words in (
            ("due", "used", "when due"),
            ("speculative", "used", "speculative, used"),
            ("speculative", "rolled back", "not used"),
        ):
            piece = WorkItem(node="", kind=kind, worker=worker, outcome=outcome)  # type: ignore[arg-type]
            handles.append(Patch(label=f"{_WORDS[worker]}: {words}", **_look(piece)))
    return [*handles, Patch(label="step", color=_COLOUR["step"])]


def _stacked(
    pieces: Sequence[WorkItem], low: float, height: float, total_s: float
) -> list[tuple[WorkItem, float, float]]:
    """(piece, its low edge, its height): those that run side by side share the lane."""
    ends: list[float] = []
    places = []
    for piece in sorted(pieces, key=lambda piece: piece.started_s or 0.0):
        assert piece.started_s is not None
        level = next((level for level, end_s in enumerate(ends) if end_s <= piece.started_s), len(ends))
        ends[level : level + 1] = [total_s if piece.ended_s is None else piece.ended_s]
        places.append((piece, level))
    share = height / max(1, len(ends))
    return [(piece, low + level * share, share) for piece, level in places]


def _end_s(request: TracedRequest) -> float:
    ends = (piece.ended_s for piece in request.pieces if piece.ended_s is not None)
    return max(request.total_s or 0.0, *ends, 0.0)


def _page(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = file.getvalue().decode()
    style = "body{margin:1rem;background:#fff}svg{max-width:100%;height:auto}"
    head = f'<meta charset="utf-8"><title>Wavefront of workflows</title><style>{style}</style>'
    return f'<!doctype html><html lang="en">{head}{svg[svg.index("<svg") :]}\n'
