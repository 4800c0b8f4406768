"""The command `ragorder replay`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import click

from ragorder.cli.options import Command, build, option, options_from, section
from ragorder.cli.values import Choice, Count, StreamFile
from ragorder.eval.cli.options import arguments_given, arrival_rates, kept, output_option
from ragorder.eval.cli.progress import QUIET_S, progress_bar
from ragorder.eval.replay.example import EXAMPLE_LOG
from ragorder.eval.replay.formats import FORMATS
from ragorder.eval.replay.reading import DefaultLengths
from ragorder.eval.running.specs import Bench

_PROCESSES_FROM = 5_000


@click.command(
    cls=Command, examples=["ragorder replay --example", "ragorder replay log.jsonl --policy earned -o results"]
)
@click.argument("log", type=StreamFile("rb"), required=False)
@section(
    "Replay",
    option(
        "--example",
        is_flag=True,
        help="Replay a sample log instead of LOG: 400 invented requests of two tenants.",
    ),
    option(
        "--format",
        type=Choice([*FORMATS]),
        default="ragorder",
        show_default=True,
        help="Source of LOG: your application (above), Mooncake's traces, or an export of Langfuse's "
        "observations, LangSmith's runs, OpenTelemetry's traces (OTLP JSON lines: OpenInference, GenAI, OpenLLMetry), "
        "MLflow's traces or LiteLLM's spend logs.",
    ),
    option(
        "--policy",
        "policies",
        multiple=True,
        metavar="NAME",
        help="retrieval (always replayed), greedy (RAGCache++), prefix, frequency, earned, free. Repeatable.",
        unset="retrieval, greedy, earned, free",
    ),
    option(
        "--capacity-tokens",
        "capacities",
        multiple=True,
        metavar="TOKENS|PERCENT|unlimited",
        help="Your engine's cache: tokens (10k is 10,000), a share of the length of all distinct documents (5%), or "
        "unlimited. Repeatable.",
    ),
    option(
        "--sweep/--no-sweep",
        default=True,
        show_default=True,
        help="Also replay caches of 5, 10, 25, 50 and 100 % of the length of all documents, and an unlimited one.",
    ),
    options_from(
        Bench,
        "block_size",
        "top_k",
        "limit",
        block_size={"unset": "16"},
        top_k={"metavar": "K", "help": "Only the first K documents of each request", "unset": "all"},
        limit={"help": "Only the first N requests of the log", "unset": "all"},
    ),
    arrival_rates(
        "Replay at the recorded times, on an engine that prefills this many uncached tokens a second, one request "
        "after another; also gives the saving in seconds.",
        "Replay at the recorded times, on an engine that decodes this many tokens a second for each request, side by "
        "side.",
        unset=("20000 with --decode-rate", "50 with --prefill-rate"),
    ),
    option(
        "--processes",
        type=Count(1),
        metavar="N",
        help="Policies and capacities replayed at the same time.",
        unset="one for each core; 1 for a small log",
    ),
)
@section("Lengths that the log does not give", options_from(DefaultLengths, *DefaultLengths.model_fields))
@section(
    "Output",
    output_option,
    option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE.png",
        help="Draw cached tokens by capacity and along the log (needs the extra eval).",
    ),
)
def replay(
    log: IO[bytes] | None,
    example: bool,
    format: str,
    policies: tuple[str, ...],
    capacities: tuple[str, ...],
    sweep: bool,
    block_size: int | None,
    top_k: int | None,
    limit: int | None,
    prefill_rate: float | None,
    decode_rate: float | None,
    processes: int | None,
    output: Path | None,
    plot: Path | None,
    **lengths: int | None,
) -> None:
    """Replay a log of past requests on a simulated cache.

    Would ordering help? The report shows cached tokens by policy and capacity, exact to the block, the saving, and its
    causes. No engine, model or text is needed, and with --example no log.

    LOG (or - for standard input) holds JSON lines, plain or gzipped. An application writes one after each retrieval:

    \b
      line = {"time": time.time(), "tenant": customer,
              "documents": [d.id for d in documents],
              "tokens": [len(tokenizer.encode(d.text)) for d in documents]}
      log.write(json.dumps(line) + "\\n")

    "time" is in seconds, from any origin, or ISO 8601; lines may be out of order. "documents" are ids, best first, or
    objects {"id", "tokens"}; without "tokens" the length is that of "text". Only "time" and "documents" are required.
    "tokens" may also be one number for all documents; the same id with another text or length is another document.
    "tenant": tenants share the cache, but none of its blocks. Optional fields are "prefix_tokens", "suffix_tokens" and
    "output_tokens", as in the options below, and "prompt_tokens" instead of "suffix_tokens". Other fields are ignored,
    with one warning. `ragorder order` and `ragorder plan` read the same lines.

    In exports (--format) each retrieval with documents is a request, of retrievals inside one another the outermost;
    other lines are skipped. A document is identified by its id or, without one, by its text, from which its length is
    estimated.

    Requests are served one at a time, in order of time. With --prefill-rate or --decode-rate they arrive at their
    recorded times at a simulated engine: prompts are prefilled one after another, answers are decoded concurrently, and
    requests in flight keep their blocks. Settings of the orderer in the environment apply: RAGORDER_KEEP_FIRST=2 shows
    the cost of that guard.
    """
    from ragorder.eval.engines.capacity import Capacity
    from ragorder.eval.replay import DEFAULT_POLICIES, SWEEP, LogError, ReplayError, read_log
    from ragorder.eval.replay import replay as replay_log
    from ragorder.eval.replay.plot import plot_report
    from ragorder.eval.replay.tables import Replay, replay_line
    from ragorder.eval.report.canvas import need_matplotlib
    from ragorder.eval.running.policies import PolicyError
    from ragorder.eval.running.session import begin_session
    from ragorder.eval.running.store import StoreError

    if plot is not None and not (plot.suffix == ".png" and os.access(plot.parent, os.W_OK)):
        raise click.UsageError(
            "--plot draws a PNG: give FILE.png in a writable folder; for a page use -o DIR, then "
            "ragorder report DIR --html PAGE"
        )
    if example and (log is not None or format != "ragorder"):
        raise click.UsageError("--example replays its own log: leave out LOG and --format")
    if log is None and not example:
        raise click.UsageError("LOG is missing: name a file, - for standard input, or give --example for a sample log")
    source: IO[bytes] | Path = log or EXAMPLE_LOG
    block_size = block_size or 16
    unlogged = build(DefaultLengths, lengths)
    try:
        wanted = [Capacity.parse(capacity) for capacity in capacities]
        if plot is not None:
            need_matplotlib("a plot")
        with kept(output) as lines:
            with progress_bar(quiet_s=QUIET_S) as progress:
                requests = read_log(
                    source, format=format, lengths=unlogged, top_k=top_k, limit=limit, progress=progress
                )
                report = replay_log(
                    requests,
                    policies=policies or DEFAULT_POLICIES,
                    capacities=wanted,
                    sweep=SWEEP if sweep else (),
                    block_size=block_size,
                    prefill_tokens_per_s=prefill_rate,
                    decode_tokens_per_s=decode_rate,
                    processes=processes or (_cores() if len(requests) >= _PROCESSES_FROM else 1),
                    progress=progress,
                )
            lines.append(replay_line(report, begin_session(lines.append, arguments_given("replay"))))
        if plot is not None:
            plot_report(report, plot)
        lines.show(Replay)
    except PolicyError as error:
        raise click.UsageError(str(error)) from None
    except (LogError, ReplayError, StoreError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"Replayed at {report.requests_per_s:,.0f} requests/s.", err=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
