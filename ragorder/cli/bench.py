"""`ragorder bench`: what ordering saves, on synthetic workloads and on real corpora."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import click

from ragorder.cli.progress import progress_bar

__all__ = ["bench"]


class _Seeds(click.ParamType[list[int]]):
    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return [int(seed) for seed in value.split(",")]
        except ValueError:
            self.fail(f"{value!r}: give integers with commas between them, such as 0,1,2", param, ctx)


class _Capacity(click.ParamType[Any]):
    name = "tokens|percent|unlimited"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ragorder.eval.bench import Capacity

        try:
            return value if isinstance(value, Capacity) else Capacity.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="Synthetic trace: paper, paper-shuf, ov0.0 to ov0.8, mix8, zipf10, geo; or pydocs. Repeatable. "
    "[default: paper-shuf]",
)
@click.option(
    "--corpus",
    "corpora",
    multiple=True,
    metavar="DIR",
    help="Folder with documents, questions and a retrieval run; or pydocs. Repeatable.",
)
@click.option(
    "--order",
    type=click.Choice(["data", "random"]),
    default="data",
    show_default=True,
    help="Order of a corpus' questions.",
)
@click.option(
    "--retriever",
    type=click.Choice(["run", "bm25", "dense"]),
    default="run",
    show_default=True,
    help="Where a corpus' documents come from: its own run (pydocs: bm25), or retrieved afresh.",
)
@click.option("--embedding-model", metavar="NAME", help="sentence-transformers model of the dense retriever.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="none (no prefix cache), retrieval, sorted, recency, random, greedy (the paper's), best, frequency, queue, "
    "auto, oracle. Repeatable. [default: retrieval, greedy, best, auto]",
)
@click.option(
    "--engine",
    type=click.Choice(["sim", "vllm"]),
    default="sim",
    show_default=True,
    help="Simulated cache, or real vLLM in this process.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Model folder for vllm. [default: random weights, made on the spot]",
)
@click.option(
    "--top-k", type=click.IntRange(min=1), help="Documents a request. [default: the workload's own; 5 for a corpus]"
)
@click.option(
    "--capacity-tokens",
    "capacity",
    type=_Capacity(),
    default="100000",
    show_default=True,
    help="The engine's cache: tokens, a share of the corpus (5%), or unlimited.",
)
@click.option("--block-size", type=click.IntRange(min=1), help="Tokens a KV block. [default: 16 for sim, 32 for vllm]")
@click.option(
    "--waiting",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="So many of the next requests already wait when one is ordered.",
)
@click.option("--batch", is_flag=True, help="Plan the whole run at once: requests are reordered, too.")
@click.option(
    "--seeds", type=_Seeds(), default="0", show_default=True, help="Seeds of workloads and random orders, with commas."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the first N requests; a synthetic workload goes on to N.",
)
@click.option(
    "--json",
    "output",
    type=click.File("w", encoding="utf-8", lazy=False),
    metavar="FILE|-",
    help="Write the results as JSON; with - the table goes to standard error.",
)
def bench(
    workloads: tuple[str, ...],
    corpora: tuple[str, ...],
    policies: tuple[str, ...],
    retriever: str,
    embedding_model: str | None,
    output: IO[str] | None,
    **options: Any,
) -> None:
    """Serve a trace under several ordering policies, interleaved, each on a fresh engine, and compare what the prefix
    cache saved.

    The simulated engine counts cached tokens exactly and has no clock; vllm measures time to first token as well.
    """
    from ragorder.eval.bench import DEFAULT_POLICIES, PYDOCS, Bench, as_json, run_bench
    from ragorder.eval.corpora import CorpusError
    from ragorder.eval.policies import PolicyError
    from ragorder.eval.retrieval import make_retriever
    from ragorder.eval.tables import print_results
    from ragorder.eval.workloads import WorkloadError

    if embedding_model and retriever != "dense":
        raise click.UsageError("--embedding-model goes with --retriever dense")
    if not workloads and not corpora:
        workloads = ("paper-shuf",)
    if not corpora and PYDOCS not in workloads and (retriever != "run" or options["order"] != "data"):
        raise click.UsageError("--retriever and --order are about a corpus: give --corpus, or --workload pydocs")
    try:
        wanted = Bench(
            workloads=workloads,
            corpora=corpora,
            retriever=None if retriever == "run" else make_retriever(retriever, embedding_model),
            policies=policies or DEFAULT_POLICIES,
            **{name: value for name, value in options.items() if value is not None},
        )
        with progress_bar() as progress:
            results = run_bench(wanted, progress)
    except (CorpusError, PolicyError, WorkloadError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    to_stdout = output is not None and output.name == "<stdout>"
    print_results(results, stderr=to_stdout)
    if output is not None:
        json.dump(as_json(wanted, results), output, indent=1)
        output.write("\n")
