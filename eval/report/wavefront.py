"""Picture of a wavefront: what ran on which worker (HedraRAG Figure 12)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragorder.eval.report.canvas import COLOURS, need_matplotlib
from ragorder.eval.report.workflow_traces import TracedRequest, WorkItem

__all__ = ["FORMATS", "draw_wavefront"]

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
