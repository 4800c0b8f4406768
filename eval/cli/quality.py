"""`ragorder eval quality`: does the order of the documents change the answers?"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ragorder.eval.cli.options import embedding_model, server_options
from ragorder.eval.cli.progress import progress_bar

__all__ = ["quality"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "dataset", type=click.Choice(["hotpotqa", "musique", "2wikimultihopqa", "triviaqa", "nq"], case_sensitive=False)
)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The data set's official file, plain or .gz. [default: loaded from the Hugging Face Hub]",
)
@click.option("--config", metavar="NAME", help="Hub: another configuration, such as unfiltered (TriviaQA).")
@click.option("--split", metavar="NAME", help="Hub: another split. [default: validation]")
@click.option(
    "--evidence",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="triviaqa: the folder with web/ and wikipedia/. [default: evidence/ beside FILE or its folder]",
)
@click.option(
    "--aliases",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="2wikimultihopqa: id_aliases.json. [default: the one beside --data, if there is one]",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N questions.")
@click.option(
    "--order",
    "question_order",
    type=click.Choice(["data", "random"]),
    default="data",
    show_default=True,
    help="Order of the questions.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the random order, and policy random.")
@click.option("--top-k", type=click.IntRange(min=1), help="Documents a question. [default: all; 10 with --retriever]")
@click.option("--document-words", type=click.IntRange(min=1), metavar="N", help="Cut documents to N words.")
@click.option(
    "--retriever",
    type=click.Choice(["bm25", "dense"]),
    help="Retrieve each question's documents from those of all questions, so that questions share them. [default: each "
    "question has its own, in the order of the data]",
)
@embedding_model
@click.option(
    "--policy",
    "orders",
    multiple=True,
    metavar="NAME[+GUARD…]",
    help="An order to ask in: none (no prefix cache), retrieval, sorted, recency, random, greedy, best, frequency, "
    "queue, auto, with +keep_first=N, +keep_last=N, +max_displacement=N, +keep_groups or +state_ranking. Repeatable. "
    "[default: retrieval, auto, greedy, sorted, auto+keep_first=2, auto+keep_last=2, auto+state_ranking]",
)
@click.option(
    "--engine",
    type=click.Choice(["vllm", "torch", "openai"]),
    default="vllm",
    show_default=True,
    help="vLLM or the embedded engine in this process, or an OpenAI-compatible server that is running.",
)
@click.option(
    "--model",
    metavar="FOLDER|NAME",
    help="vllm, torch: the model [default: random weights, with which quality is not measured]. openai: whose "
    "tokenizer counts tokens [default: four characters a token].",
)
@click.option("--base-url", metavar="URL", help="openai: the server, such as http://127.0.0.1:8000/v1.")
@server_options
@click.option(
    "--concurrency", type=click.IntRange(min=1), default=1, metavar="N", help="openai: N questions in flight."
)
@click.option(
    "--capacity-tokens",
    "capacity",
    metavar="TOKENS|PERCENT|unlimited",
    help="The engine's cache. [default: 100000; openai: what the server's /metrics say, else 262144]",
)
@click.option(
    "--block-size",
    type=click.IntRange(min=1),
    help="Tokens a KV block. [default: 32; torch: 16; openai: what the server's /metrics say, else 16]",
)
@click.option(
    "--output-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens an answer, at most."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Ask no model: check data, orders, prompts and scores with the accepted answer (100) and with none (0).",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder of the results: DIR/results.jsonl is appended to, and what it holds already is not asked again.",
)
def quality(
    output: Path,
    retriever: str | None,
    embedding_model: str | None,
    orders: tuple[str, ...],
    capacity: str | None,
    **options: Any,
) -> None:
    """Ask every question of DATASET once in every order, answer greedily, and compare exact match and F1 question by
    question: hotpotqa, musique, 2wikimultihopqa, triviaqa or nq, scored as their official scripts do.

    What is scored is the first line of the answer, without a label ("Answer:") and without what a reasoning model
    thinks. A model that is not capable does not measure quality: the result says so.
    """
    from ragorder.eval.data.corpora import CorpusError
    from ragorder.eval.data.machine import describe_environment
    from ragorder.eval.data.retrieval import make_retriever
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.engines.capacity import Capacity
    from ragorder.eval.experiments.quality import DEFAULT_ORDERS, QualityBench, QualityError, serve_quality
    from ragorder.eval.experiments.quality.kept import judge_kept
    from ragorder.eval.experiments.quality.tables import print_quality
    from ragorder.eval.running.policies import PolicyError
    from ragorder.eval.running.record import RESULTS, SCHEMA
    from ragorder.eval.running.store import Store, StoreError

    if embedding_model and retriever != "dense":
        raise click.UsageError("--embedding-model goes with --retriever dense")
    started = datetime.now(UTC)
    session = f"{started:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    given = click.get_current_context().params
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    arguments.pop("api_key")
    try:
        bench = QualityBench(
            orders=orders or DEFAULT_ORDERS,
            retriever=make_retriever(retriever, embedding_model) if retriever else None,
            capacity=Capacity.parse(capacity) if capacity else None,
            session=session,
            **options,
        )
        with Store(output) as store, progress_bar() as progress:

            def done(cell: Any, policy: str) -> bool:
                key = {"suite": bench.suite, "cell": cell, "seed": bench.seed, "policy": policy}
                return store.has("quality", **key, dry_run=bench.dry_run)

            store.append(
                {
                    "type": "session",
                    "schema": SCHEMA,
                    "session": session,
                    "started": started.isoformat(timespec="seconds"),
                    "arguments": {"command": "quality", **arguments},
                    "environment": describe_environment(),
                }
            )
            for line in serve_quality(bench, progress, done):
                store.append(line)
            lines, checks = judge_kept(output / RESULTS, bench.suite, session, progress)
            for line in checks:
                store.append(line)
    except (
        CorpusError,
        EngineError,
        PolicyError,
        QualityError,
        StoreError,
        ImportError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        raise click.ClickException(str(error)) from None
    if not lines:
        click.echo(f"{output} holds all of these orders already: nothing was asked")
    print_quality(lines, checks)
