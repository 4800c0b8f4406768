"""The command `ragorder eval quality`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ragorder.cli.options import Choice, Command, Count, api_key, build, option, section
from ragorder.eval.cli.options import block_size, embedding_model, limit, question_order, served_model, top_k
from ragorder.eval.cli.progress import progress_bar

__all__ = ["quality"]


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "dataset", type=Choice(["hotpotqa", "musique", "2wikimultihopqa", "triviaqa", "nq"], case_sensitive=False)
)
@section(
    "Data",
    option(
        "--data",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The data set's official file, plain or .gz. [default: loaded from the Hugging Face Hub]",
    ),
    option("--config", metavar="NAME", help="Hub: another configuration, such as unfiltered (TriviaQA)."),
    option("--split", metavar="NAME", help="Hub: another split. [default: validation]"),
    option(
        "--evidence",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="triviaqa: the folder with web/ and wikipedia/. [default: evidence/ beside FILE or its folder]",
    ),
    option(
        "--aliases",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="2wikimultihopqa: id_aliases.json. [default: the one beside --data, if there is one]",
    ),
    limit("Only the first N questions."),
    question_order("question_order"),
    option(
        "--seed",
        formerly=["--seeds"],
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Seed of the random order and of policy random.",
    ),
    top_k("Documents a question. [default: all; 10 with --retriever]"),
    option("--document-words", type=Count(1), metavar="N", help="Cut documents to N words."),
    option(
        "--retriever",
        type=Choice(["bm25", "dense"]),
        help="Retrieve each question's documents from those of all questions, so that questions share them. [default: "
        "each question has its own, in the order of the data]",
    ),
    embedding_model,
)
@section(
    "Ordering",
    option(
        "--policy",
        "orders",
        multiple=True,
        metavar="NAME[+GUARD…]",
        help="An order to compare: none (no prefix cache), retrieval, sorted, recency, random, greedy, best, "
        "frequency, "
        "queue, auto, with +keep_first=N, +keep_last=N, +max_displacement=N, +keep_groups or +state_ranking. "
        "Repeatable. [default: retrieval, auto, greedy, sorted, auto+keep_first=2, auto+keep_last=2, "
        "auto+state_ranking]",
    ),
)
@section(
    "Engine",
    option(
        "--engine",
        type=Choice(["vllm", "torch", "openai"]),
        default="vllm",
        show_default=True,
        help="vllm, torch: vLLM or the embedded engine in this process; openai: a running OpenAI-compatible server.",
    ),
    option(
        "--model",
        metavar="FOLDER|NAME",
        help="vllm, torch: the model [default: random weights, with which quality is not measured]. openai: the "
        "model of the tokenizer [default: four characters a token].",
    ),
    option("--base-url", metavar="URL", help="openai: the server, such as http://127.0.0.1:8000/v1."),
    served_model,
    api_key("OPENAI_API_KEY"),
    option("--concurrency", type=Count(1), default=1, metavar="N", help="openai: N questions in flight."),
    option(
        "--capacity-tokens",
        metavar="TOKENS|PERCENT|unlimited",
        help="The engine's cache. [default: 100000; openai: the server's /metrics, else 262144]",
    ),
    block_size("[default: 32; torch: 16; openai: the server's /metrics, else 16]"),
    option(
        "--output-tokens",
        type=Count(1),
        default=32,
        show_default=True,
        metavar="TOKENS",
        help="Tokens an answer, at most.",
    ),
)
@section(
    "Results",
    option(
        "--dry-run",
        is_flag=True,
        help="Check data, orders, prompts and scores without a model, with the accepted answer (100) and with no "
        "answer (0).",
    ),
    option(
        "-o",
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        required=True,
        metavar="DIR",
        help="Folder of the results: DIR/results.jsonl is appended to, and questions that it has already are not "
        "repeated.",
    ),
)
def quality(
    output: Path,
    orders: tuple[str, ...],
    dry_run: bool,
    retriever: str | None,
    embedding_model: str | None,
    **options: Any,
) -> None:
    """Measure whether the order of the documents changes the answers.

    Each question of DATASET is answered greedily once in each order; exact match and F1, scored as in the official
    scripts, are compared question by question. The first line of the answer counts, without a label ("Answer:") and
    without the thoughts of a reasoning model. With a model that is not capable, the result says that quality was not
    measured.
    """
    from ragorder.eval.data.corpora import CorpusError
    from ragorder.eval.data.retrieval import make_retriever
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.experiments.quality import (
        DEFAULT_ORDERS,
        AnswererSpec,
        QualityBench,
        QualityError,
        QuestionsSpec,
        done_in,
        serve_quality,
    )
    from ragorder.eval.experiments.quality.previous import judge_previous
    from ragorder.eval.experiments.quality.report import print_quality
    from ragorder.eval.running.policies import PolicyError
    from ragorder.eval.running.record import RESULTS
    from ragorder.eval.running.session import begin_session
    from ragorder.eval.running.store import Store, StoreError

    if embedding_model and retriever != "dense":
        raise click.UsageError("--embedding-model requires --retriever dense")
    given = click.get_current_context().params
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    arguments.pop("api_key")
    try:
        made = make_retriever(retriever, embedding_model) if retriever else None
        questions = {name: value for name, value in options.items() if name in QuestionsSpec.model_fields}
        engine = {name: value for name, value in options.items() if name in AnswererSpec.model_fields}
        bench = QualityBench(
            build(QuestionsSpec, questions | {"retriever": made}),
            build(AnswererSpec, engine),
            orders=orders or DEFAULT_ORDERS,
            dry_run=dry_run,
        )
        with Store(output) as store, progress_bar() as progress:
            session = begin_session(store, {"command": "quality", **arguments})
            bench = replace(bench, session=session)
            for line in serve_quality(bench, progress, done_in(store, bench)):
                store.append(line)
            lines, checks = judge_previous(output / RESULTS, bench.suite, session, progress)
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
