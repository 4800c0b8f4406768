"""The command `ragorder bench`."""

from __future__ import annotations

from typing import IO, Any

import click

from ragorder.cli.options import Command, build, given, option, options_from, section
from ragorder.cli.values import Choice, Count, Duration, StreamFile
from ragorder.eval.cli.options import (
    SEEDS,
    arrival_rates,
    embedding_model,
    events_of,
    events_options,
    served_by,
    to_stdout,
    write_json,
)
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.running.specs import Bench

__all__ = ["bench"]

_DELAY_S = 0.05


@click.command(
    cls=Command,
    examples=[
        "ragorder bench --workload paper-shuf --limit 200",
        "ragorder bench --workload mix8 --capacity-tokens 5% --json -",
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
@option(
    "--json",
    "output",
    type=StreamFile("w", encoding="utf-8", lazy=False),
    metavar="FILE|-",
    help="Write the results as JSON; with - the table goes to standard error.",
)
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
    output: IO[str] | None,
    **options: Any,
) -> None:
    """Compare ordering policies on a trace of requests.

    The policies alternate with each request, each on its own new engine, and their cached tokens are compared. Policy
    earned is ragorder's default.

    The simulated engine counts cached tokens exactly and has no clock; the others also measure time to first token.
    With --concurrency or --arrivals a second table shows each tenth of the run.

    In the table, "moved" is the mean distance of a document from its retrieval rank; "predicted" is the share of
    requests whose cached tokens were predicted to within one block.
    """
    from ragorder.eval.data.arrivals import Arrivals
    from ragorder.eval.data.corpora import PYDOCS, CorpusError
    from ragorder.eval.data.retrieval import make_retriever
    from ragorder.eval.data.workloads import WorkloadError
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.report.console import print_results
    from ragorder.eval.running.bench import as_json, run_bench
    from ragorder.eval.running.load import ServiceTimes
    from ragorder.eval.running.policies import PolicyError

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
        if pipeline is not None:
            _bench_pipelines(wanted, pipeline, round(1e3 * (_DELAY_S if delay_s is None else delay_s), 6), output)
            return
        with progress_bar() as progress:
            results = run_bench(wanted, progress)
    except (PolicyError, WorkloadError) as error:
        raise click.UsageError(str(error)) from None
    except (CorpusError, EngineError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    print_results(results, stderr=to_stdout(output))
    write_json(as_json(wanted, results), output)


def _bench_pipelines(bench: Any, pipeline: str, delay_ms: float, output: IO[str] | None) -> None:
    from ragorder.eval.running.bench import as_json
    from ragorder.eval.suites.pipelining import run_pipelines
    from ragorder.eval.suites.pipelining.tables import print_pipelines

    with progress_bar() as progress:
        results = run_pipelines(bench, pipeline, delay_ms, progress)
    print_pipelines(results, stderr=to_stdout(output))
    write_json(as_json(bench, []) | {"runs": [result.as_json() for result in results]}, output)
