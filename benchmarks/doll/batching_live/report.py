"""Tables and pictures of batches on real parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, quantiles
from typing import Any

from ragorder.benchmarks.common.served import faster, mean_s, seed_by_seed, share_column
from ragorder.benchmarks.doll.batching_live.cells import POLICIES, SERIAL, BatchingLiveCell
from ragorder.benchmarks.doll.batching_live.experiment import BatchingLive
from ragorder.eval.report.canvas import Picture, draw, style
from ragorder.eval.report.declared import Block, Column, Row, TableForm, figure, policy_column
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Suite

_WORDS = {name: system.words for name, system in POLICIES.items()}
_LOOKS = {
    SERIAL: "retrieval",
    "no prefetch": "none",
    "one ahead": "greedy",
    "decoupled": "prefix",
    "decoupled+order": "earned",
}
_MOMENTS = {
    "searched": "requests that are searched for",
    "most": "most requests at once",
    "running": "requests that are generated",
    "waiting": "requests that wait for generation",
    "kv_tokens": "KV that these use, tokens",
    "kv_room": "KV that has room, tokens",
    "kv_host": "KV in host memory, %",
    "partitions": "partitions in memory",
    "device": "layers on the device",
    "host": "layers in host memory",
    "disk": "layers that stream",
}
"""The state of queues and placement, in words; a run shows those that it has."""


def make_part(suite: Suite, results: Results) -> Part:
    blocks = list(TableForm("", []).blocks(BatchingLive, suite, results))
    chart = suite.report.chart
    tables: list[Table] = []
    if chart in _ALONG:
        name, words = _ALONG[chart]
        form = TableForm(
            _title,
            [
                Column(words, lambda row: str(getattr(row.cell, name))),
                *_columns(("recall",) if chart == "index" else ()),
            ],
            labels=2,
            note=_NOTE,
            by=("steps", "scale"),
        )
        tables += [form.table(block) for block in form.blocks(BatchingLive, suite, results)]
    else:
        for block in blocks:
            tables += [
                TableForm(_title, _columns(), note=_NOTE).table(block),
                _FIGURE_8.table(block),
                _PARTS.table(block),
            ]
            tables += [table for table in _figure_9(block) if table is not None]
    return Part(tables, pictures=lambda: _pictures(chart, blocks))


_ALONG = {"topk": ("top_k", "documents"), "index": ("index", "index")}
"""By chart what is swept, and in words."""


def _title(block: Block) -> str:
    return f"Mean latency, {block.cell.requests:,} requests, {block.cell.scale:g} times as fast"


_NOTE = (
    "Seconds as measured; times the scale, seconds of the paper's (Table 1). Means of {seeds} seeds, whose range is in "
    "brackets; beside a ratio Student's 95 % interval over the seeds' ratios."
)


def _columns(more: Sequence[str] = ()) -> list[Column]:
    return [
        policy_column("", _WORDS),
        *(figure(f"{part}, s", _mean_of(part)) for part in ("waiting", "retrieval", "generation")),
        figure("mean, s", mean_s, spread=True),
        Column("times shorter", _shorter),
        figure("longest, s", lambda run: max(run.rows["latency_s"]), over=max),
        share_column("cached, %", "cached_tokens", "prompt_tokens"),
        *(figure("found, %", name, scale=100) for name in more),
    ]


def _mean_of(part: str) -> Callable[[Record], float]:
    return lambda run: fmean(run.rows[f"{part}_s"])


def _shorter(row: Row) -> Entry:
    compared = seed_by_seed(row.group, SERIAL, row.policy)
    if row.policy == SERIAL or compared is None:
        return Entry("–")
    note = range_words(map(faster, (compared.low, compared.high)), 2) if compared.known else ""
    return Entry(format_number(faster(compared.difference), 2), note)


def _quartile(place: int) -> Callable[[Record], float]:
    return lambda run: quantiles(run.rows["latency_s"], n=4)[place]


_FIGURE_8 = TableForm(
    "Latency, s: quartiles and most",
    [
        policy_column("", _WORDS),
        figure("shortest", lambda run: min(run.rows["latency_s"]), over=min),
        figure("25 %", _quartile(0)),
        figure("50 %", _quartile(1)),
        figure("75 %", _quartile(2)),
        figure("longest", lambda run: max(run.rows["latency_s"]), over=max),
    ],
    note="Figure 8. Quartiles are means of {seeds} seeds.",
)

# All systems are to have the same cores, engine and disk: facts that show it.
_PARTS = TableForm(
    "What was read, and how fast",
    [
        policy_column("", _WORDS),
        figure("layers read a step", "streamed", 2),
        figure("a pass as read, s", "pass_s", 3),
        figure("a step, s", "step_s", 3),
        figure("beside reading, s", "beside_s", 3),
        figure("moves", "moves"),
    ],
    note=lambda block: (
        f"All {block.cell.layers} layers stream in {format_number(block.cell.step_s / block.cell.scale, 3)} s, all "
        f"partitions are read in {format_number(block.cell.pass_s / block.cell.scale, 2)} s: the paper's times with "
        "70B on PF-High, by the scale. Layers are a share of all; steps are medians. A move is another placement."
    ),
)


def _figure_9(block: Block) -> Iterator[Table | None]:
    """Means of the moments in each step of arrivals."""
    cell: BatchingLiveCell = block.cell
    ends: list[float] = []
    rates: list[str] = []
    for step in cell.arrivals.steps:
        ends.append((ends[-1] if ends else 0.0) + step.seconds / cell.scale)
        rates.append(f"{60 * step.requests / step.seconds:g}/min")
    for policy in block.groups[0].policies:
        moments = [moment for run in block.groups[0].runs(policy) for moment in run.facts["trace"]]
        if not moments:
            continue
        table = Table(f"Over time: {_WORDS[policy]}", ["", *rates, "afterwards"])
        begins = [0.0, *ends]
        for name, words in _MOMENTS.items():
            if name in moments[0]:
                parts = [
                    [moment[name] for moment in moments if begin <= moment["at_s"] < end]
                    for begin, end in zip(begins, [*ends, float("inf")], strict=True)
                ]
                table.add(words, *(format_number(fmean(part) if part else None) for part in parts))
        table.note = "Means over time, of all seeds. The paper's: batches of 16 to 48, 3 to 2 partitions (Figure 9)."
        yield table


def _pictures(chart: str, blocks: Sequence[Block]) -> list[Picture]:
    if chart in _ALONG:
        return [_bars(chart, blocks)] if blocks else []
    return [
        picture
        for block in blocks
        for runs in [{policy: block.groups[0].runs(policy) for policy in block.groups[0].policies}]
        for picture in [_figure_7(runs), _boxes(runs), *_over_time(runs)]
    ]


def _figure_7(runs: Mapping[str, Sequence[Record]]) -> Picture:
    def paint(axes: Any) -> None:
        for policy, records in runs.items():
            looks = style(_LOOKS[policy])
            axes.plot(records[0].rows["latency_s"], looks.dashes, color=looks.colour, label=policy, linewidth=1.2)
        axes.set_xlabel("request, by arrival")
        axes.set_ylabel("latency, s")
        axes.set_ylim(bottom=0)
        _legend(axes)

    said = (f"{policy} {format_number(mean_s(records[0]))} s on average" for policy, records in runs.items())
    return draw(paint, title="Latency of each request", alt="; ".join(said), caption="One seed (Figure 7).")


def _boxes(runs: Mapping[str, Sequence[Record]]) -> Picture:
    values = {policy: [value for run in records for value in run.rows["latency_s"]] for policy, records in runs.items()}

    def paint(axes: Any) -> None:
        boxes = axes.boxplot(
            list(values.values()), orientation="horizontal", whis=(0, 100), patch_artist=True, widths=0.6
        )
        for policy, box, median in zip(values, boxes["boxes"], boxes["medians"], strict=True):
            looks = style(_LOOKS[policy])
            box.set(facecolor="none", edgecolor=looks.colour, linewidth=1.6)
            median.set(color=looks.colour, linewidth=2)
        for line in (*boxes["whiskers"], *boxes["caps"]):
            line.set(color=style("none").colour)
        axes.set_yticks(range(1, len(values) + 1), list(values))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("latency, s")

    said = (f"{policy} {format_number(quantiles(each, n=2)[0])} s" for policy, each in values.items())
    return draw(
        paint,
        title="Latencies: least, quartiles and most",
        alt=f"medians: {'; '.join(said)}",
        caption="Of all seeds (Figure 8).",
    )


def _over_time(runs: Mapping[str, Sequence[Record]]) -> Iterator[Picture]:
    """Of the last policy that has a placement of its own."""
    placed = [policy for policy, records in runs.items() if records[0].facts["trace"]]
    if not placed:
        return
    moments = runs[placed[-1]][0].facts["trace"]
    words = _WORDS[placed[-1]]
    yield _steps(
        moments,
        f"Batches and backlog: {words}",
        {"most": "oracle", "waiting": "retrieval", "running": "earned"},
        "requests",
    )
    yield _steps(
        moments,
        f"Layers and partitions in memory: {words}",
        {"partitions": "greedy", "device": "prefix", "host": "recency"},
        "number",
    )
    yield _steps(moments, f"KV: {words}", {"kv_room": "oracle", "kv_tokens": "earned"}, "tokens")


def _steps(moments: Sequence[Mapping[str, float]], title: str, looks: Mapping[str, str], unit: str) -> Picture:
    def paint(axes: Any) -> None:
        for name, look in looks.items():
            values = [moment[name] for moment in moments]
            if any(values):
                chosen = style(look)
                at_s = [moment["at_s"] for moment in moments]
                axes.step(
                    at_s, values, where="post", color=chosen.colour, linestyle=chosen.dashes, label=_MOMENTS[name]
                )
        axes.set_xlabel("seconds")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        _legend(axes, columns=1)

    ranges = (
        f"{_MOMENTS[name]} {format_number(min(found), 0)} to {format_number(max(found), 0)}"
        for name in looks
        for found in [[moment[name] for moment in moments]]
    )
    return draw(paint, title=title, alt="; ".join(ranges), caption="One seed (Figure 9).")


def _legend(axes: Any, columns: int = 2) -> None:
    axes.figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _bars(chart: str, blocks: Sequence[Block]) -> Picture:
    name, words = _ALONG[chart]
    policies = list(dict.fromkeys(policy for block in blocks for policy in block.groups[0].policies))
    places, width = range(len(blocks)), 0.8 / max(1, len(policies))

    def mean(block: Block, policy: str) -> float:
        return fmean(map(mean_s, block.groups[0].runs(policy)))

    def paint(axes: Any) -> None:
        for number, policy in enumerate(policies):
            at = [place + (number - (len(policies) - 1) / 2) * width for place in places]
            heights = [mean(block, policy) for block in blocks]
            axes.bar(at, heights, 0.9 * width, color=style(_LOOKS[policy]).colour, label=policy)
        axes.set_xticks(places, [str(getattr(block.cell, name)) for block in blocks])
        axes.set_xlabel(words)
        axes.set_ylabel("mean latency, s")
        axes.grid(False, axis="x")
        _legend(axes)

    said = (
        f"{getattr(block.cell, name)}: "
        + ", ".join(f"{policy} {format_number(mean(block, policy))} s" for policy in policies)
        for block in blocks
    )
    return draw(paint, title=f"Mean latency by {words}", alt="; ".join(said), caption="Mean of all seeds.")
