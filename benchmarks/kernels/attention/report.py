"""Tables and pictures of the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragorder.benchmarks.kernels.attention.cells import TOLERANCE, AttentionCell, AttentionRecord
from ragorder.eval.report.canvas import LINE, Picture, draw, label_ends, style
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_Group = RecordGroup[AttentionRecord]

_OURS = ("triton", "triton unsplit")
_TIMED = (
    "triton: the kernel, keys split as its table says, or not split; torch: the kernel's reference, blocks gathered; "
    "sdpa + mask: SDPA's own choice of a backend, keys in one piece and a mask; "
    "flash: SDPA's flash backend, keys in one piece, or gathered in the measured time; cudnn: SDPA's cuDNN backend, "
    "keys in one piece and a mask; flex: FlexAttention compiled, keys in one piece and a mask, or the mask made in the "
    "measured time. Medians from a cold L2; TFLOP/s count what the causal mask leaves, GB/s each byte once."
)
_UNTIMED = "Nothing was timed: results were held against the reference, that is all."


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(AttentionRecord, suite.name))
    devices = dict.fromkeys(f"attention on {group.engine['device']}" for group in groups)
    cells = [group.runs()[0].setting for group in groups]
    setting = dict.fromkeys(f"{cell.dtype}, blocks of {cell.block_size} tokens in random order" for cell in cells)
    return Part(
        [_table(groups)] if groups else [],
        engine="; ".join(devices),
        setting="; ".join(setting),
        pictures=lambda: _pictures(groups),
    )


def _table(groups: Sequence[_Group]) -> Table:
    lines = [(group, line) for group in groups for line in group.runs()]
    timed = any(line.rows["ms"] for _, line in lines)
    headings = ["requests", "new", "cached", "heads × D", "contender"]
    headings += ["ms", "TFLOP/s", "GB/s", "of the fastest other"] if timed else []
    table = Table("Attention of new tokens to a paged prefix", [*headings, "error"], labels=5)
    for group, line in lines:
        cell = line.setting
        shape = (str(cell.batch), _rows(cell), f"{cell.context:,}", f"{cell.heads} × {cell.head_dim}")
        error = Entry(f"{line.facts['error']:.1e}{'' if line.right else ', wrong'}", tone="" if line.right else "bad")
        table.add(*shape, line.policy, *(_times(group, line) if timed else ()), error)
    bounds = ", ".join(f"{bound:g} ({dtype})" for dtype, bound in TOLERANCE.items())
    table.note = f"{_TIMED if timed else _UNTIMED} An error above {bounds} is wrong."
    return table


def _rows(cell: AttentionCell) -> str:
    return f"{cell.query:,} anywhere" if cell.scattered else f"{cell.query:,}"


def _times(group: _Group, line: AttentionRecord) -> list[str]:
    ms = line.median_ms
    if ms is None:
        return ["not timed", "", "", ""]
    speed = _speed(group, line)
    relative = "" if speed is None else f"{format_number(speed, 2)} ×"
    return [
        format_number(ms, 3),
        format_number(line.facts["flops"] / ms / 1e9, 0),
        format_number(line.facts["bytes"] / ms / 1e6, 0),
        relative,
    ]


def _speed(group: _Group, line: AttentionRecord) -> float | None:
    # Both variants of the kernel count as one contender.
    others = [
        other.median_ms
        for other in group.runs()
        if other.median_ms is not None
        and other.policy != line.policy
        and not (line.policy in _OURS and other.policy in _OURS)
    ]
    return min(others) / line.median_ms if others and line.median_ms else None


def _pictures(groups: Sequence[_Group]) -> list[Picture]:
    found: dict[int, dict[int, list[float]]] = {}
    for group in groups:
        for line in group.runs("triton"):
            speed = _speed(group, line)
            if speed is not None:
                found.setdefault(line.setting.context, {}).setdefault(line.setting.query, []).append(speed)
    means = {
        context: [(query, sum(each) / len(each)) for query, each in sorted(queries.items())]
        for context, queries in sorted(found.items())
    }
    if not means:
        return []

    def paint(axes: Any) -> None:
        axes.axhline(1, color=LINE, linewidth=1.2)
        ends = []
        for (context, points), name in zip(
            means.items(), ("earned", "greedy", "sorted", "prefix", "recency"), strict=False
        ):
            looks = style(name)
            axes.plot(*zip(*points, strict=True), looks.dashes, marker=looks.marker, color=looks.colour)
            ends.append((*points[-1], f"{context:,} cached", looks))
        axes.set_xscale("log", base=2)
        axes.set_xlabel("new tokens")
        axes.set_ylabel("times as fast")
        label_ends(axes, ends)

    alt = "; ".join(
        f"{context:,} cached: {', '.join(f'{format_number(speed, 2)} at {query:,}' for query, speed in points)}"
        for context, points in means.items()
    )
    return [
        draw(paint, title="The kernel against the fastest other", alt=alt, caption="Above 1: the kernel is faster.")
    ]
