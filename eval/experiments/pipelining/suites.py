"""Suites about pipelines: the harness has them measured on one server, and keeps what comes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ragorder.eval.data.cache import cache_folder
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.corpora.loader import CorpusLoader
from ragorder.eval.data.trace import Request
from ragorder.eval.engines.prompts import SYSTEM_PROMPT
from ragorder.eval.experiments.pipelining.cells import PipeliningCell
from ragorder.eval.running.options import Options
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.specs import Bench
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Suite

if TYPE_CHECKING:
    from ragorder.eval.experiments.pipelining import MeasuredServer, ServerFacts

__all__ = ["run_pipelining_suites"]

_NO_SERVER = "a pipeline needs a server that takes several requests at once: use --engine openai"
_Rows = dict[str, dict[str, list[Any]]]


def run_pipelining_suites(
    suites: Sequence[Suite], options: Options, store: Store, session: str, progress: Progress
) -> Iterator[Mapping[str, Any]]:
    """Lines of type "pipelining", and of type "unavailable" where nothing could be measured. Each is to be in the store
    before the next one is asked for.

    Raises EngineError for an engine that does not answer, CorpusError for a corpus that cannot be read, ImportError
    naming what to install.
    """
    shelf, todo = CorpusLoader(options.corpora), []
    for suite in suites:
        policies = [policy for policy in suite.policies if policy != suite.baseline]
        asked = [policy for policy in policies if options.policies is None or policy in options.policies]
        for point in suite.points:
            cell = PipeliningCell.read(point, f"{suite.name}.toml")
            corpus = _NO_SERVER if options.engine != "openai" else shelf.take(cell.corpus)
            for policy in asked:
                if isinstance(corpus, str):
                    named: dict[str, Any] = {} if options.engine != "openai" else cell.fields
                    yield _unavailable(session, suite, named, policy, corpus)
                    continue
                for seed in options.seeds:
                    key = {"suite": suite.name, "cell": cell.fields, "seed": seed, "policy": policy}
                    if not store.has("pipelining", **key):
                        todo.append((suite, cell, seed, policy, corpus))
    if not todo or options.dry_run:
        return
    advance = progress("requests", sum(_count(suite, cell, corpus, options) for suite, cell, _, _, corpus in todo))
    with ExitStack() as stack:
        facts = _server(options, stack)
        for suite, cell, seed, policy, corpus in todo:
            requests = _requests(cell, corpus, seed, _count(suite, cell, corpus, options))
            try:
                measured = asyncio.run(_measure(cell, facts, corpus, requests, advance))
            except ValueError as error:
                yield _unavailable(session, suite, cell.fields, policy, " ".join(str(error).split()))
                continue
            model = options.served_model or options.model or ("random weights" if not options.base_url else facts.model)
            yield {
                "type": "pipelining",
                "session": session,
                "suite": suite.name,
                "cell": cell.fields,
                "seed": seed,
                "policy": policy,
                "engine": {
                    "name": "openai",
                    "model": str(model),
                    "block_size": facts.block_size,
                    "capacity_tokens": facts.capacity_tokens,
                },
                "warmup": min(suite.warmup, len(requests) // 2) if cell.measure != "throughput" else 0,
                "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
                **measured,
            }


async def _measure(
    cell: PipeliningCell,
    facts: ServerFacts,
    corpus: Corpus,
    requests: Sequence[tuple[int, Request]],
    advance: Callable[[], None],
) -> dict[str, Any]:
    from ragorder.eval.experiments.pipelining import MeasuredServer, long_builder, measure_cold, time_system

    builder = long_builder(SYSTEM_PROMPT, facts.tokenizer, cell.system_tokens)
    async with MeasuredServer(facts) as server:
        await server.check(builder)
        system = {"system_tokens": builder.prefix_tokens}
        if cell.measure != "cold":
            return system | await _search(cell, server, builder, corpus, requests, advance)
        asked_s = (cell.retrieval_ms or 0) / 1e3
        if cell.retrieval_of_system is not None:
            asked_s = cell.retrieval_of_system * await time_system(server, builder)
        rows: _Rows = await measure_cold(server, builder, [request for _, request in requests], asked_s, advance)
        return system | {"retrieval_ms": round(1e3 * asked_s, 3), "rows": rows}


async def _search(
    cell: PipeliningCell,
    server: MeasuredServer,
    builder: Any,
    corpus: Corpus,
    requests: Sequence[tuple[int, Request]],
    advance: Callable[[], None],
) -> dict[str, Any]:
    from ragorder.eval.experiments.pipelining import (
        embed,
        measure_speculation,
        measure_throughput,
        paced,
        plan_search,
        real_retrieval,
    )

    vectors = embed([document.text for document in corpus.documents], cache_folder())
    every = embed([question.text for question in corpus.questions], cache_folder())
    queries = every[[number for number, _ in requests]]
    plan = plan_search(
        cell.index, vectors, ratio=cell.search_ratio, stages=cell.stages, growth=cell.growth, top_k=cell.top_k
    )
    plain = real_retrieval(plan.unstaged, corpus, queries, cell.top_k)
    staged = real_retrieval(plan.search, corpus, queries, cell.top_k)
    if cell.search_ms:
        plain = paced(plain, (1.0,), cell.search_ms / 1e3)
        staged = paced(staged, plan.shares, cell.search_ms / 1e3)
    questions = [request.question for _, request in requests]
    options: dict[str, Any] = {"max_prefill_bs": cell.max_prefill_bs, "cautious": cell.cautious}
    options["output_tokens"] = cell.output_tokens
    rows: _Rows
    if cell.measure == "throughput":
        # In both modes the search takes the same: what is compared is what speculation costs.
        searches = {"none": staged, "speculative": staged}
        load: dict[str, Any] = {"clients": cell.clients, "overload": cell.overload or 1.0, "segments": cell.segments}
        rows = await measure_throughput(server, builder, questions, searches, advance, **load, **options)
    else:
        searches = {"none": plain, "speculative": staged}
        rows = await measure_speculation(server, builder, questions, searches, advance, **options)
    return {"shares": [round(share, 4) for share in plan.shares], "rows": rows}


def _count(suite: Suite, cell: PipeliningCell, corpus: Corpus, options: Options) -> int:
    count = suite.requests if cell.measure != "throughput" else cell.segments * cell.segment_requests
    return min(count, options.limit or count, len(corpus.questions))


def _requests(cell: PipeliningCell, corpus: Corpus, seed: int, count: int) -> list[tuple[int, Request]]:
    """Questions of the corpus with their numbers, from somewhere: neighbours stay together, as they share documents."""
    start = random.Random(seed).randrange(len(corpus.questions))
    numbers = [(start + each) % len(corpus.questions) for each in range(count)]
    return [
        (
            number,
            Request(
                corpus.questions[number].text, [corpus.documents[d] for d in corpus.rankings[number][: cell.top_k]]
            ),
        )
        for number in numbers
    ]


def _server(options: Options, stack: ExitStack) -> ServerFacts:
    """The server that was named, or one that is started."""
    from ragorder.eval.experiments.pipelining import find_server

    base_url = options.base_url
    if base_url is None:
        from ragorder.eval.running.live import start_server

        base_url = stack.enter_context(start_server(Bench(engine="openai", model=options.model))).base_url
    return find_server(base_url, model=options.model, served_model=options.served_model, api_key=options.api_key)


def _unavailable(session: str, suite: Suite, cell: dict[str, Any], policy: str, reason: str) -> dict[str, Any]:
    return {
        "type": "unavailable",
        "session": session,
        "suite": suite.name,
        "cell": cell,
        "policy": policy,
        "reason": reason,
    }
