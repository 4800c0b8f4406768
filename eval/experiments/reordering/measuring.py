"""Cache-aware reordering (RAGCache section 5.2, Fig. 21): mean time to first token under overload, against first come,
first served.

`python -m ragorder.eval.reordering` plays it on the simulated engine, on a virtual clock: its times are those of a
model (`ServiceTimes`), and no measurement. With `--base-url URL`, or with `--own-server`, it measures a server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean

import click

from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.trace import Trace, trace_of_workload
from ragorder.eval.data.workloads import WORKLOADS, make_workload
from ragorder.eval.experiments.reordering.queueing import DISCIPLINES, Discipline, Outcome, Serve, on_a_server, simulate
from ragorder.eval.running.load import ServiceTimes
from ragorder.eval.running.measures import percentile

__all__ = ["main"]

_WORKLOADS = ("zipf10", "mix8", "paper-shuf", "geo")


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the table: a discipline at a load, the mean of the seeds; TTFT in ms, `ratio` is that of the means of
    first come, first served and of this one, `range` its least and largest of a seed."""

    workload: str
    capacity_tokens: int | None
    load: float
    discipline: str
    ttft_ms: dict[str, float]
    ratio: float
    ratio_range: tuple[float, float]
    cached_ratio: float
    largest_overtaking: int


def _rows(
    workload: str,
    capacity_tokens: int | None,
    loads: Sequence[float],
    traces: Sequence[Trace],
    disciplines: Sequence[Discipline],
    serve: Serve,
) -> Iterator[_Row]:
    """All disciplines at each load; who is first changes with the seed."""
    rates = [
        len(trace.requests) / serve(trace, [0.0] * len(trace.requests), disciplines[0]).total_s for trace in traces
    ]
    for load in loads:
        outcomes: dict[str, list[Outcome]] = {discipline.name: [] for discipline in disciplines}
        for seed, (trace, rate) in enumerate(zip(traces, rates, strict=True)):
            at_s = [arrival.at_s for arrival in poisson_arrivals(rate * load, len(trace.requests), seed)]
            first = seed % len(disciplines)
            for discipline in [*disciplines[first:], *disciplines[:first]]:
                outcomes[discipline.name].append(serve(trace, at_s, discipline))
        baseline = [fmean(outcome.ttft_s) for outcome in outcomes[disciplines[0].name]]
        for name, served in outcomes.items():
            means = [fmean(outcome.ttft_s) for outcome in served]
            ratios = [plain / mean for plain, mean in zip(baseline, means, strict=True)]
            ttft_ms = {"mean": 1e3 * fmean(means)} | {
                f"p{percent}": 1e3 * fmean(percentile(outcome.ttft_s, percent) for outcome in served)
                for percent in (50, 95, 99)
            }
            yield _Row(
                workload,
                capacity_tokens,
                load,
                name,
                ttft_ms,
                fmean(ratios),
                (min(ratios), max(ratios)),
                fmean(outcome.cached_ratio for outcome in served),
                max(outcome.largest_overtaking for outcome in served),
            )


def _capacity(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> list[int | None]:
    try:
        return [None if value == "unlimited" else int(value.replace("_", "")) for value in values]
    except ValueError:
        raise click.BadParameter("give tokens, or unlimited") from None


@click.command()
@click.option(
    "--workload", "workloads", multiple=True, type=click.Choice(WORKLOADS), help=f"[default: {' '.join(_WORKLOADS)}]"
)
@click.option(
    "--capacity-tokens",
    "capacities",
    multiple=True,
    default=("16000", "64000"),
    callback=_capacity,
    show_default=True,
    help="The simulated cache.",
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    default=(1.0, 1.5, 2.0, 3.0),
    show_default=True,
    help="Arrivals, as multiples of the rate at which first come, first served serves a full queue.",
)
@click.option("--requests", type=click.IntRange(min=1), default=600, show_default=True, help="Of each run.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each.")
@click.option("--window", type=click.IntRange(min=0), default=32, show_default=True, help="Of the reordered ones.")
@click.option("--max-in-flight", type=click.IntRange(min=1), default=4, show_default=True, help="The paper has 4.")
@click.option(
    "--output-tokens", type=click.IntRange(min=1), default=1, show_default=True, help="MMLU's answers have 1."
)
@click.option("--prefill-rate", type=float, default=20_000.0, show_default=True, help="Tokens a second, simulated.")
@click.option("--base-url", help="A server to measure.")
@click.option("--own-server", is_flag=True, help="Start a vLLM to measure, with random weights and the first capacity.")
@click.option("--model", help="The tokenizer of the server's model, by folder or name. [default: as the server says]")
@click.option("--json", "as_json", is_flag=True, help="Rows as JSON lines instead of a table.")
def main(
    workloads: Sequence[str],
    capacities: Sequence[int | None],
    loads: Sequence[float],
    requests: int,
    seeds: int,
    window: int,
    max_in_flight: int,
    output_tokens: int,
    prefill_rate: float,
    base_url: str | None,
    own_server: bool,
    model: str | None,
    as_json: bool,
) -> None:
    """Mean TTFT of a queue that is reordered, against first come, first served, under overload."""
    disciplines = [replace(each, window=window) if each.window else each for each in DISCIPLINES]
    engines: Sequence[tuple[int | None, Serve]]
    with ExitStack() as stack:
        if base_url or own_server:
            shape = {"output_tokens": output_tokens, "max_in_flight": max_in_flight}
            served = on_a_server(base_url, model=model, capacity_tokens=capacities[0], **shape)
            engines = [stack.enter_context(served)]
        else:
            times = ServiceTimes(prefill_rate)
            play = partial(simulate, max_in_flight=max_in_flight, output_tokens=output_tokens, times=times)
            engines = [(capacity, partial(play, capacity_tokens=capacity)) for capacity in capacities]
        for workload, (capacity, serve) in product(workloads or _WORKLOADS, engines):
            drawn = [make_workload(workload, seed, requests=requests) for seed in range(seeds)]
            traces = [trace_of_workload(each, requests) for each in drawn]
            rows = _rows(workload, capacity, loads, traces, disciplines, serve)
            if as_json:
                for row in rows:
                    click.echo(json.dumps(asdict(row)))
            else:
                _print(rows, f"{workload}, {requests:,} requests, {seeds} seeds", capacity)


def _print(rows: Iterator[_Row], what: str, capacity_tokens: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    held = "unlimited" if capacity_tokens is None else f"{capacity_tokens:,} tokens"
    table = Table(title=f"{what}, cache {held}: TTFT in ms")
    for heading in ("load", "queue", "mean", "p50", "p95", "p99", "ratio of means", "cached", "overtaken"):
        table.add_column(heading, justify="left" if heading == "queue" else "right")
    for row in rows:
        times = [f"{value:,.0f}" for value in row.ttft_ms.values()]
        low, high = row.ratio_range
        ratio = f"{row.ratio:.2f} ({low:.2f} to {high:.2f})"
        cells = [f"{row.load:g}", row.discipline, *times, ratio, f"{100 * row.cached_ratio:.1f} %"]
        table.add_row(*cells, str(row.largest_overtaking))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
