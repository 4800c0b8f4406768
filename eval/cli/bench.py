"""The command `ragorder bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import click

from ragorder.cli.options import Choice, Command, Count, ParamType, api_key, option, section
from ragorder.cli.output import StreamFile
from ragorder.eval.cli.options import (
    arrival_rates,
    block_size,
    embedding_model,
    events_options,
    limit,
    question_order,
    seeds,
    served_model,
    top_k,
    waiting,
)
from ragorder.eval.cli.progress import progress_bar

__all__ = ["bench"]

_DELAY_MS = 50.0


class _Capacity(ParamType[Any]):
    name = "tokens|percent|unlimited"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ragorder.eval.engines.capacity import Capacity

        try:
            return value if isinstance(value, Capacity) else Capacity.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(cls=Command)
@section(
    "Requests",
    option(
        "--workload",
        "workloads",
        multiple=True,
        metavar="NAME",
        help="Synthetic trace: paper (RAGCache++'s: neighbours share documents, in their places), paper-shuf (the "
        "same, with shuffled ranks), ov0.0 to ov0.8 (neighbours share this additional part), mix8 (eight streams at "
        "once), zipf10 (ten documents by popularity), zipf10-X (popularity exponent X), geo (documents near a "
        "moving place), disjoint and unique (no two neighbours, or no two requests, share a document); or pydocs. "
        "Repeatable. [default: paper-shuf]",
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
    question_order("order"),
    option(
        "--retriever",
        type=Choice(["run", "bm25", "dense"]),
        default="run",
        show_default=True,
        help="Source of a corpus' documents: its own run (pydocs: bm25), or a new retrieval.",
    ),
    embedding_model,
    top_k("Documents a request. [default: the workload's own; 5 for a corpus]"),
    limit(
        "Only the first N requests; a synthetic workload is extended to N. [default: all, or the length of the "
        "trace of --arrivals]"
    ),
    seeds("0"),
)
@section(
    "Ordering",
    option(
        "--policy",
        "policies",
        multiple=True,
        metavar="NAME",
        help="none (no prefix cache), retrieval, sorted, recency, random, greedy (the paper's), best, frequency, "
        "queue, auto, events (auto, with the server's KV events), oracle, contextpilot (in its own environment). "
        "Repeatable. [default: retrieval, greedy, best, auto]",
    ),
    waiting(),
    option("--batch", is_flag=True, help="Plan the whole run at once, reordering requests as well."),
    option(
        "--max-wait",
        type=Count(0),
        metavar="PLACES",
        help="With --batch: a request is served at most this many places late. [default: any number]",
    ),
)
@section(
    "Engine",
    option(
        "--engine",
        type=Choice(["sim", "vllm", "torch", "openai"]),
        default="sim",
        show_default=True,
        help="sim: a simulated cache; vllm: real vLLM in this process; torch: ragorder's embedded engine, whose cache "
        "holds documents; openai: a running OpenAI-compatible server.",
    ),
    option(
        "--model",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="vllm, torch: the model's folder [default: random weights, made on the spot]. openai: folder or Hub name "
        "of the served model, for its tokenizer [default: the one that the server names].",
    ),
    option(
        "--base-url",
        "base_urls",
        multiple=True,
        metavar="URL",
        help="openai: the server, such as http://127.0.0.1:8000/v1. The policies take turns on it, each with a cache "
        "of its own (cache_salt). Repeated once for each policy: a server for each, all at the same time. [default: a "
        "vLLM server is started for the benchmark]",
    ),
    served_model,
    api_key("OPENAI_API_KEY"),
    option(
        "--capacity-tokens",
        "capacity",
        type=_Capacity(),
        help="The engine's cache: tokens (10k is 10,000), a share of the corpus (5%), or unlimited. [default: 100000; "
        "openai: the server's /metrics]",
    ),
    block_size("[default: 16 for sim and torch, 32 for vllm; openai: the server's /metrics]"),
    option(
        "--host-tokens",
        type=Count(0),
        metavar="TOKENS",
        help="torch: host memory for documents evicted from the device, in tokens. [default: 0]",
    ),
    option(
        "--output-tokens",
        type=Count(1),
        metavar="TOKENS",
        help="Tokens an answer. [default: as the arrivals say, else 32 for sim, 1 for vllm, torch and openai]",
    ),
)
@events_options
@section(
    "Load",
    option(
        "--concurrency",
        type=Count(1),
        metavar="N",
        help="Keep N requests in flight; with --arrivals at most N.",
    ),
    option(
        "--arrivals",
        metavar="poisson:RATE|FILE",
        help="RATE requests a second at random, or the times of a trace: CSV with TIMESTAMP, ContextTokens and "
        "GeneratedTokens (Azure) or JSON lines with timestamp in ms (Mooncake), plain or .gz. The trace also says how "
        "many requests there are and how long the answers; a corpus with fewer questions starts again from its first.",
    ),
    option("--time-scale", type=float, metavar="X", help="Play the trace of --arrivals X times as fast. [default: 1]"),
    option(
        "--replicas",
        type=Count(1),
        metavar="N",
        help="Each arrival of the trace stands for N requests, spread at random over the time to the next. "
        "[default: 1]",
    ),
    arrival_rates(
        "sim: uncached prompt tokens that the model computes a second, one request after another. [default: 20000]",
        "sim: answer tokens that the model generates a second for each request. [default: 50]",
    ),
)
@section(
    "Retrieval in front of the server (--engine openai)",
    option(
        "--pipeline",
        type=Choice(["none", "warmup", "speculative"]),
        help="Every request retrieves first, and the time to the first token counts from the question. Compare 'none' "
        "with a warm-up of the system prompt during retrieval, or with warm-up and speculation. Retrieval has 4 "
        "stages; the result becomes final after a stage drawn uniformly at random; the result of the stage before "
        "differs in its last document, earlier results in the last two.",
    ),
    option(
        "--retrieval-delay",
        "delay_ms",
        type=click.FloatRange(min=0),
        metavar="MS",
        help="With --pipeline: duration of a retrieval. [default: 50]",
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
    events_endpoint: str | None,
    replay_endpoint: str | None,
    events_topic: str | None,
    pipeline: str | None,
    delay_ms: float | None,
    output: IO[str] | None,
    **options: Any,
) -> None:
    """Compare ordering policies on a trace of requests.

    The policies alternate, request by request, each on a fresh engine, and their cached tokens are compared. Policy
    auto is ragorder's default.

    The simulated engine counts cached tokens exactly and has no clock; the others measure time to first token as well.
    With --concurrency or --arrivals a second table shows each tenth of the run.

    In the table, "moved" is the mean distance of a document from its retrieval rank, in places; "predicted" is the
    share of requests whose cached tokens were predicted to within one block.
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
    from ragorder.eval.running.specs import DEFAULT_POLICIES, Bench, EventsAddress

    if embedding_model and retriever != "dense":
        raise click.UsageError("--embedding-model requires --retriever dense")
    if not workloads and not corpora:
        workloads = ("paper-shuf",)
    if not corpora and PYDOCS not in workloads and (retriever != "run" or options["order"] != "data"):
        raise click.UsageError("--retriever and --order are about a corpus: give --corpus, or --workload pydocs")
    if arrivals is None and (time_scale, replicas) != (None, None):
        raise click.UsageError("--time-scale and --replicas play a trace: give --arrivals FILE")
    if events_endpoint is None and (replay_endpoint, events_topic) != (None, None):
        raise click.UsageError("--replay-endpoint and --events-topic require --events-endpoint")
    if pipeline is None and delay_ms is not None:
        raise click.UsageError("--retrieval-delay is how long a request retrieves: give --pipeline")
    modelled = options["engine"] == "sim" and (arrivals or options["concurrency"])
    if (prefill_rate or decode_rate) and not modelled:
        raise click.UsageError(
            "--prefill-rate and --decode-rate model the simulated engine under load: "
            "give --engine sim and --concurrency or --arrivals"
        )
    scaling = {"time_scale": time_scale, "replicas": replicas}
    rates = {"prefill_tokens_per_s": prefill_rate, "decode_tokens_per_s": decode_rate}
    try:
        wanted = Bench(
            workloads=workloads,
            corpora=corpora,
            retriever=None if retriever == "run" else make_retriever(retriever, embedding_model),
            policies=policies or DEFAULT_POLICIES,
            arrivals=None if arrivals is None else Arrivals.parse(arrivals, **_given(scaling)),
            events=EventsAddress(events_endpoint, replay_endpoint, events_topic or "") if events_endpoint else None,
            service_times=ServiceTimes(**_given(rates)),
            **_given(options),
        )
        if pipeline is not None:
            _bench_pipelines(wanted, pipeline, _DELAY_MS if delay_ms is None else delay_ms, output)
            return
        with progress_bar() as progress:
            results = run_bench(wanted, progress)
    except (PolicyError, WorkloadError) as error:
        raise click.UsageError(str(error)) from None
    except (CorpusError, EngineError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    to_stdout = output is not None and output.name == "<stdout>"
    print_results(results, stderr=to_stdout)
    if output is not None:
        json.dump(as_json(wanted, results), output, indent=1)
        output.write("\n")
        output.flush()  # click closes the file without a word if the disk is full


def _bench_pipelines(bench: Any, pipeline: str, delay_ms: float, output: IO[str] | None) -> None:
    """Raises as `run_pipelines` does."""
    from ragorder.eval.experiments.pipelining import run_pipelines
    from ragorder.eval.experiments.pipelining.tables import print_pipelines
    from ragorder.eval.running.bench import as_json

    with progress_bar() as progress:
        results = run_pipelines(bench, pipeline, delay_ms, progress)
    print_pipelines(results, stderr=output is not None and output.name == "<stdout>")
    if output is not None:
        json.dump(as_json(bench, []) | {"runs": [result.as_json() for result in results]}, output, indent=1)
        output.write("\n")
        output.flush()  # click closes the file without a word if the disk is full


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
