"""The command `ragorder bench`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

import click

from ragorder.cli.options import Command, build, given, option, options_from, section
from ragorder.cli.values import Choice, Count, Duration
from ragorder.eval.cli.options import (
    SEEDS,
    Kept,
    arguments_given,
    arrival_rates,
    embedding_model,
    events_of,
    events_options,
    kept,
    output_option,
    served_by,
)
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.report.words import policy_words
from ragorder.eval.running.specs import Bench

_DELAY_S = 0.05
_COLUMNS = (
    "moved: places between a document and its retrieval rank, on average.",
    "predicted: requests whose cached tokens the policy predicted to within one block.",
)
_POLICIES = {
    "none": "no prefix cache",
    "retrieval": "documents as retrieval ranked them",
    "greedy": "Algorithm 1 of RAGCache++: at each node of the tree the cached child with the best retrieval rank",
    "prefix": "the longest cached prefix, the rest as ranked",
    "earned": "the default: the longest cached prefix, the rest as free while that has paid, else as ranked",
    "free": "the longest cached prefix, the rest in the order that later requests are expected to share",
    "events": "free, told by the server's KV events what is cached",
    "oracle": "reads the engine's cache, and does not look ahead",
}


@click.command(
    cls=Command,
    examples=[
        "ragorder bench --workload paper-shuf --limit 200",
        "ragorder bench --workload mix8 --capacity-tokens 5% -o results",
    ],
)
@section(
    "Requests",
    option(
        "--workload",
        "workloads",
        multiple=True,
        metavar="NAME",
        help="Synthetic trace: paper (RAGCache++'s: neighbours share documents, in their places), paper-shuf (the "
        "same, with shuffled ranks), ov0.0 to ov0.8 (neighbours share this additional part, ranks shuffled), "
        "ov0.0-kept to ov0.8-kept (the same, in their places), mix8 (eight streams at once), zipf10 (ten documents by "
        "popularity), zipf10-X (popularity exponent X), geo (documents near a moving place), disjoint and unique (no "
        "two neighbours, or no two requests, share a document); or pydocs. "
        "Repeatable.",
        unset="paper-shuf",
    ),
    option(
        "--corpus",
        "corpora",
        multiple=True,
        metavar="DIR",
        help="Folder with documents.jsonl (id, text, optionally title), questions.jsonl (id, question) and "
        "run_NAME.jsonl "
        "(id of a question, chunks: ids of documents, best first), each plain or .gz (docs/corpora.md); or pydocs. "
        "Repeatable.",
    ),
    options_from(Bench, "order"),
    option(
        "--retriever",
        type=Choice(["run", "bm25", "dense"]),
        default="run",
        show_default=True,
        help="Source of a corpus' documents: its own run (pydocs: bm25), or a new retrieval.",
    ),
    embedding_model,
    options_from(Bench, "top_k", "limit", "seeds", top_k={"metavar": "K"}, seeds=SEEDS),
)
@section(
    "Ordering",
    option(
        "--policy",
        "policies",
        multiple=True,
        metavar="NAME",
        help="none (no prefix cache), retrieval, reversed, sorted, recency, random, greedy (the paper's), prefix, "
        "frequency, queue, earned, free, events (free, with the server's KV events), oracle, "
        "contextpilot (in its own environment). Repeatable.",
        unset="retrieval, greedy, prefix, earned, free",
    ),
    options_from(Bench, "waiting", "batch", "max_wait", max_wait={"metavar": "PLACES"}),
)
@section(
    "Engine",
    served_by(
        Bench,
        "engine",
        "model",
        "base_urls",
        "served_model",
        "capacity",
        "block_size",
        "host_tokens",
        "output_tokens",
        base_urls={"flag": "--base-url", "multiple": True, "metavar": "URL"},
    ),
)
@events_options
@section(
    "Load",
    options_from(Bench, "concurrency"),
    option(
        "--arrivals",
        metavar="poisson:RATE|steps:RATE@TIME,…|FILE",
        help="poisson: RATE requests a second at random. steps: RATE requests a minute for TIME (20m; s, m or h), then "
        "the next; steps:4@20m,8@20m are 240 requests. FILE: the times of a trace, CSV with TIMESTAMP, ContextTokens "
        "and GeneratedTokens (Azure) or JSON lines with timestamp in ms (Mooncake), plain or .gz. Steps and traces set "
        "the number of requests, a trace also the lengths of answers; a corpus with fewer questions is repeated.",
    ),
    option(
        "--time-scale",
        type=float,
        metavar="X",
        help="Play the steps or trace of --arrivals X times as fast.",
        unset="1",
    ),
    option(
        "--replicas",
        type=Count(1),
        metavar="N",
        help="Each arrival of the trace stands for N requests, spread at random over the time to the next.",
        unset="1",
    ),
    arrival_rates(
        "sim: uncached prompt tokens that the model computes a second, one request after another.",
        "sim: answer tokens that the model generates a second for each request.",
        unset=("20000", "50"),
    ),
)
@section(
    "Retrieval before the server (--engine openai)",
    option(
        "--pipeline",
        type=Choice(["none", "warmup", "speculative"]),
        help="Retrieve before every request, and measure time to first token from the question. Compares 'none' with "
        "a warm-up of the system prompt during retrieval, or with warm-up and speculation. Retrieval has 4 stages; the "
        "result is final after a stage drawn uniformly at random; one stage before, its last document differs, and "
        "earlier its last two.",
    ),
    option(
        "--retrieval-delay",
        "delay_s",
        type=Duration(unit="ms"),
        metavar="TIME",
        help="With --pipeline: duration of a retrieval, such as 50ms; a plain number is in milliseconds.",
        unset="50ms",
    ),
)
@output_option
def bench(
    workloads: tuple[str, ...],
    corpora: tuple[str, ...],
    policies: tuple[str, ...],
    retriever: str,
    embedding_model: str | None,
    arrivals: str | None,
    time_scale: float | None,
    replicas: int | None,
    prefill_rate: float | None,
    decode_rate: float | None,
    pipeline: str | None,
    delay_s: float | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Compare ordering policies on a trace of requests.

    The policies alternate with each request, each on its own new engine, and their cached tokens are compared. Policy
    earned is ragorder's default.

    The simulated engine counts cached tokens exactly and has no clock; the others also measure time to first token.
    With --concurrency or --arrivals a table shows each tenth of the run. Differences are to retrieval order, paired
    request by request, with 95 % intervals. With -o the runs are kept, and `ragorder report` makes a page of them.

    In the tables, "moved" is the mean distance of a document from its retrieval rank; "predicted" is the share of
    requests whose cached tokens were predicted to within one block.
    """
    from ragorder.eval.data.arrivals import Arrivals
    from ragorder.eval.data.corpora import PYDOCS, CorpusError
    from ragorder.eval.data.retrieval import make_retriever
    from ragorder.eval.data.workloads import WorkloadError
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.running.bench import bench_lines
    from ragorder.eval.running.load import ServiceTimes
    from ragorder.eval.running.policies import PolicyError
    from ragorder.eval.running.session import begin_session
    from ragorder.eval.running.store import StoreError

    events = events_of(options)
    options = given(options)
    if embedding_model and retriever != "dense":
        raise click.UsageError("--embedding-model requires --retriever dense")
    if not workloads and not corpora:
        workloads = ("paper-shuf",)
    if not corpora and PYDOCS not in workloads and (retriever != "run" or options.get("order", "data") != "data"):
        raise click.UsageError("--retriever and --order need a corpus: give --corpus, or --workload pydocs")
    if arrivals is None and (time_scale, replicas) != (None, None):
        raise click.UsageError("--time-scale and --replicas need a trace: give --arrivals FILE")
    if pipeline is None and delay_s is not None:
        raise click.UsageError("--retrieval-delay needs --pipeline")
    modelled = options.get("engine", "sim") == "sim" and (arrivals or "concurrency" in options)
    if (prefill_rate or decode_rate) and not modelled:
        raise click.UsageError(
            "--prefill-rate and --decode-rate are for the simulated engine under load: "
            "give --engine sim and --concurrency or --arrivals"
        )
    scaling = {"time_scale": time_scale, "replicas": replicas}
    rates = {"prefill_tokens_per_s": prefill_rate, "decode_tokens_per_s": decode_rate}
    try:
        wanted = build(
            Bench,
            options
            | {
                "workloads": workloads,
                "corpora": corpora,
                "retriever": None if retriever == "run" else make_retriever(retriever, embedding_model),
                "policies": policies,
                "arrivals": None if arrivals is None else Arrivals.parse(arrivals, **given(scaling)),
                "events": events,
                "service_times": ServiceTimes(**given(rates)),
            },
        )
        with kept(output) as lines:
            session = begin_session(lines.append, arguments_given("bench"))
            with progress_bar() as progress:
                measured: Iterable[Mapping[str, Any]]
                if pipeline is None:
                    measured = bench_lines(wanted, session, progress)
                else:
                    from ragorder.eval.suites.pipelining.bench import pipeline_lines

                    delay_ms = round(1e3 * (_DELAY_S if delay_s is None else delay_s), 6)
                    measured = pipeline_lines(wanted, pipeline, delay_ms, session, progress)
                for line in measured:
                    lines.append(line)
        _show(lines, pipelines=pipeline is not None)
        if pipeline is None:
            names = dict.fromkeys(line["policy"] for line in lines.lines[1:])
            said = [f"{policy_words(name)}: {_POLICIES[name]}." for name in names if name in _POLICIES]
            click.secho(fill(" ".join([*_COLUMNS, *said]), get_terminal_size().columns), dim=True, err=lines.to_stdout)
    except (PolicyError, WorkloadError) as error:
        raise click.UsageError(str(error)) from None
    except (CorpusError, EngineError, StoreError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _show(lines: Kept, *, pipelines: bool) -> None:
    """Print the report's tables, or without what they need the shares of cached tokens."""
    from ragorder.eval.suites.pipelining.record import Pipelines
    from ragorder.eval.suites.serving.experiment import Serving

    try:
        lines.show(Pipelines if pipelines else Serving)
    except ImportError as error:
        for line in lines.lines[1:]:
            names = ("cached_tokens", "prompt_tokens")
            cached, prompts = (sum(filter(None, line["rows"].get(name, ()))) for name in names)
            where = f"{line['cell'].get('workload') or line['cell'].get('corpus')}, seed {line['seed']}"
            share = f"{100 * cached / max(1, prompts):.1f} %"
            click.echo(f"{where}, {policy_words(line['policy'])}: {share} cached", err=lines.to_stdout)
        click.echo(f"For intervals and tables: {error}", err=True)
