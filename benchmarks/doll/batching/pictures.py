"""Pictures of requests within a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ragorder.benchmarks.doll.batching.record import BatchingRecord
from ragorder.eval.report.canvas import Picture, draw, style
from ragorder.eval.report.words import format_number

__all__ = ["latency_picture", "trace_pictures"]

# The page's colours by system.
_LOOKS = {
    "accrag": "none",
    "vllmrag": "retrieval",
    "flexgen": "greedy",
    "ragdoll": "prefix",
    "joined": "sorted",
    "kept": "recency",
    "ours": "earned",
    "ours+passes": "oracle",
}


def latency_picture(setting: str, records: Mapping[str, BatchingRecord]) -> Picture:
    """Latency of each request in the order of arrival (Figure 7)."""

    def paint(axes: Any) -> None:
        for policy, record in records.items():
            looks = style(_LOOKS.get(policy, policy))
            axes.plot(record.rows["latency_s"], looks.dashes, color=looks.colour, label=policy, linewidth=1.2)
        axes.set_yscale("log")
        axes.set_xlabel("request")
        axes.set_ylabel("latency, s")
        axes.legend(fontsize=7.5, frameon=False, ncols=2)

    said = (
        f"{policy} {format_number(fmean(record.rows['latency_s']), 0)} s on average"
        for policy, record in records.items()
    )
    return draw(paint, title=f"Latency of each request: {setting}", alt="; ".join(said), caption="One seed.")


def trace_pictures(system: str, record: BatchingRecord) -> list[Picture]:
    """Batches and backlog; KV on the device and partitions (Figure 9)."""
    moments: Sequence[Sequence[float]] = record.facts["trace"]
    minutes = [each[0] / 60 for each in moments]

    def steps(axes: Any, place: int, look: str, label: str, scale: float = 1.0) -> None:
        looks = style(look)
        values = [scale * each[place] for each in moments]
        axes.step(minutes, values, where="post", color=looks.colour, linestyle=looks.dashes, label=label)

    def sizes(axes: Any) -> None:
        steps(axes, 2, "retrieval", "requests behind it")
        steps(axes, 1, "earned", "requests in a batch")
        axes.set_xlabel("minutes")
        axes.legend(fontsize=8, frameon=False)

    def memory(axes: Any) -> None:
        steps(axes, 3, "earned", "KV on the device, %", 100)
        axes.set_xlabel("minutes")
        axes.set_ylabel("%")
        other = axes.twinx()
        other.grid(False)
        steps(other, 4, "greedy", "partitions")
        other.set_ylim(bottom=0)
        handles = [line for each in (axes, other) for line in each.get_lines()]
        axes.legend(handles, [line.get_label() for line in handles], fontsize=8, frameon=False)

    batches = [each[1] for each in moments]
    behind = max(each[2] for each in moments)
    shares = [100 * each[3] for each in moments]
    partitions = [each[4] for each in moments]
    return [
        draw(
            sizes,
            title=f"Batches and backlog: {system}",
            alt=f"batches of {min(batches)} to {max(batches)} requests, at most {behind} behind",
        ),
        draw(
            memory,
            title=f"KV and partitions: {system}",
            alt=f"{format_number(min(shares), 0)} to {format_number(max(shares), 0)} % of the KV on the device, "
            f"{min(partitions)} to {max(partitions)} partitions",
        ),
    ]
