"""The command `ragorder eval quality`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ragorder.cli.options import Command, build, option, options_from, section
from ragorder.cli.values import Choice, Model
from ragorder.eval.cli.options import Shares, embedding_model, served_by
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.suites.quality.specs import ANSWERS, TOP_K, AnswererSpec, QuestionsSpec

_DATASETS = ["corpus", "hotpotqa", "musique", "2wikimultihopqa"]
_DATA = {"type": click.Path(exists=True, path_type=Path), "metavar": "FOLDER"}


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=["ragorder eval quality corpus --data my-corpus --model smollm2 -o results"],
)
@click.argument("dataset", required=False, type=Choice(_DATASETS, case_sensitive=False))
@section(
    "Data",
    options_from(
        QuestionsSpec,
        "data",
        "limit",
        "question_order",
        data=_DATA,
        question_order={"flag": "--order"},
    ),
    options_from(
        QuestionsSpec,
        "seed",
        "top_k",
        "document_words",
        "retriever",
        top_k={"metavar": "K"},
        retriever={"type": Choice(["bm25", "dense"]), "metavar": None},
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
        help="An order to compare: none (no prefix cache), retrieval, reversed (best last), sorted, recency, random, "
        "greedy, prefix, frequency, queue, earned, free, with +keep_first=N, +keep_last=N, +max_displacement=N, "
        "+best=last, +keep_groups or +state_ranking. Repeatable.",
        unset="retrieval, earned, free, greedy, sorted, free+keep_first=2, free+keep_last=2, free+state_ranking",
    ),
)
@section(
    "Places",
    option(
        "--places",
        is_flag=True,
        help="Ask with the best document at each position instead, the others as ranked, and recommend a setting "
        "for your model: five answers for each question, 600 with the sample.",
    ),
)
@section(
    "Fusion",
    option(
        "--fusion",
        type=Shares(),
        metavar="SHARE,...",
        help="Answer in each order also with KV computed for each document alone, with these shares "
        "recomputed, such as 0,.05,.15 (see docs/fusion.md); requires --engine torch. Without --policy only in "
        "retrieval order.",
    ),
    option(
        "--select",
        metavar="NAME,...",
        help="Which tokens --fusion recomputes: query, deviation.",
        unset="query",
    ),
)
@section(
    "Engine",
    served_by(
        AnswererSpec,
        "engine",
        "model",
        "base_url",
        "served_model",
        "concurrency",
        "capacity_tokens",
        "block_size",
        "output_tokens",
        model={"type": Model(path=False), "metavar": "FOLDER|NAME|smollm2"},
        capacity_tokens={"type": str},
    ),
)
@section(
    "Results",
    option(
        "--dry-run",
        is_flag=True,
        help="Check data, orders, prompts and scores without a model: the accepted answer must score 100, an "
        "empty one 0.",
    ),
    option(
        "-o",
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        required=True,
        metavar="DIR",
        help="Folder of the results. New lines are appended to DIR/results.jsonl; questions in it are not repeated.",
    ),
)
def quality(
    output: Path,
    orders: tuple[str, ...],
    places: bool,
    fusion: list[float] | None,
    select: str | None,
    dry_run: bool,
    retriever: str | None,
    embedding_model: str | None,
    **options: Any,
) -> None:
    """Measure whether the order of the documents changes the answers.

    Each question of DATASET is answered greedily once in each order. Exact match and F1, scored as in the official
    scripts, and whether the answer contains an accepted one, are compared question by question. DATASET corpus, the
    default, is your own folder (--data) or a sample, with documents as retrieved; the others come from the Hugging
    Face Hub (extra retrieval). A question counts even if no document answers it. Only the first line of the answer
    counts, without a label ("Answer:") and without the thoughts of a reasoning model. If the model is not capable
    enough, the result says that quality was not measured.
    """
    from ragorder.eval.data.corpora import CorpusError
    from ragorder.eval.data.retrieval import make_retriever
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.running.policies import PolicyError
    from ragorder.eval.running.record import RESULTS
    from ragorder.eval.running.session import begin_session
    from ragorder.eval.running.store import Store, StoreError
    from ragorder.eval.suites.quality.asking import done_in, serve_quality
    from ragorder.eval.suites.quality.compare import judge_previous
    from ragorder.eval.suites.quality.orders import DEFAULT_ORDERS, QualityError, fused_orders, place_orders
    from ragorder.eval.suites.quality.report import print_quality
    from ragorder.eval.suites.quality.specs import QualityBench

    if places and (orders or fusion):
        raise click.UsageError("--places uses its own orders: leave out --policy and --fusion")
    if select is not None and fusion is None:
        raise click.UsageError("--select requires --fusion")
    if embedding_model and retriever != "dense":
        raise click.UsageError("--embedding-model requires --retriever dense")
    try:
        made = make_retriever(retriever, embedding_model) if retriever else None
        if places:
            options["top_k"] = options["top_k"] or TOP_K
            orders = place_orders(options["top_k"])
        questions = {name: value for name, value in options.items() if name in QuestionsSpec.model_fields}
        engine = {name: value for name, value in options.items() if name in AnswererSpec.model_fields}
        orders = orders or (DEFAULT_ORDERS if fusion is None else DEFAULT_ORDERS[:1])
        orders += fused_orders(orders, fusion or (), (select or "query").split(","))
        bench = QualityBench(
            build(QuestionsSpec, questions | {"retriever": made}),
            build(AnswererSpec, engine),
            orders=orders,
            dry_run=dry_run,
        )
        used = {**click.get_current_context().params}
        for spec in (bench.questions, bench.engine):
            used |= {name: getattr(spec, name) for name in options if options[name] is None and hasattr(spec, name)}
        arguments = {name: _jsonable(value) for name, value in used.items() if name != "api_key"}
        with Store(output) as store, progress_bar() as progress:
            session = begin_session(store.append, {"command": "quality", **arguments})
            bench = replace(bench, session=session, answers=output / ANSWERS)
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
        click.echo(f"{output} already has results for all of these orders: nothing was asked")
    print_quality(lines, checks)


def _jsonable(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | tuple) else str(value)
