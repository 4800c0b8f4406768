"""The experiment of the suites of kind "pipelining"."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ragorder.common.files import cache_folder
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.prompts import SYSTEM_PROMPT
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.specs import EngineSpec
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.eval.suites.pipelining.record import ModesRecord

if TYPE_CHECKING:
    from ragorder.benchmarks.common.counted import CountedServer
    from ragorder.eval.suites.pipelining.server import ServerFacts

_NO_SERVER = "a pipeline needs a server that takes several requests at once: use --engine openai"
_Rows = dict[str, dict[str, list[Any]]]
PIPELINE_POLICIES = ("none", "warmup", "speculative")
"""The policies of a suite of pipelines; "none" is the sequential baseline."""


class PipeliningCell(SuiteCell):
    """`measure` is "cold" (warm-ups of a cold cache), "speculation" (one request at a time) or "throughput" (a closed
    loop of `clients`, or of enough for `overload`).

    cold: retrieval is a pause of `retrieval_ms`, or of `retrieval_of_system` times the system prompt's time. Otherwise
    `search_ratio` of an `index` is searched in `stages`, stretched to `search_ms` (0: not at all).
    """

    measure: Literal["cold", "speculation", "throughput"]
    corpus: str = "pydocs"
    top_k: int = Field(5, ge=1)
    system_tokens: int = Field(64, ge=1)
    output_tokens: int = Field(1, ge=1)
    retrieval_ms: float | None = Field(None, ge=0)
    retrieval_of_system: float | None = Field(None, ge=0)
    index: Literal["ivf", "hnsw"] = "ivf"
    search_ratio: float = Field(1.0, gt=0, le=1)
    search_ms: float = Field(0, ge=0)
    stages: int = Field(4, ge=1)
    growth: Literal["equal", "geometric"] = "equal"
    max_prefill_bs: int | None = Field(None, ge=1)
    cautious: bool = False
    clients: int | None = Field(None, ge=1)
    overload: float | None = Field(None, gt=0)
    segments: int = Field(10, ge=1)
    segment_requests: int = Field(40, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> PipeliningCell:
        if (self.measure == "cold") != (self.retrieval_ms is not None or self.retrieval_of_system is not None):
            raise ValueError('retrieval_ms or retrieval_of_system go with measure = "cold", and it needs one of them')
        if self.retrieval_ms is not None and self.retrieval_of_system is not None:
            raise ValueError("give retrieval_ms or retrieval_of_system, not both")
        if (self.measure == "throughput") != (self.clients is not None or self.overload is not None):
            raise ValueError('clients or overload go with measure = "throughput", and it needs one of them')
        if self.clients is not None and self.overload is not None:
            raise ValueError("give clients or overload, not both")
        return self


class PipeliningRecord(ModesRecord):
    """One cell with one seed."""

    system_tokens: int

    @property
    def requests(self) -> int:
        if len(self.figures("none", "requests")):
            return int(sum(self.figures(mode, "requests").sum() for mode in self.rows))
        return super().requests

    def entries(self, mode: str, name: str) -> Sequence[Any]:
        """Entries of a mode after the warm-up."""
        return self.rows.get(mode, {}).get(name, ())[self.warmup :]


class Pipelining(Experiment):
    kind = "pipelining"
    base = PipeliningRecord
    cell = PipeliningCell
    runs = True
    policies: ClassVar[Any] = PIPELINE_POLICIES

    def asked(self, suite: Suite) -> Sequence[str]:
        """Without the baseline, which each line has beside the other mode."""
        return [policy for policy in super().asked(suite) if policy != suite.baseline]

    def obstacle(self, suite: Suite, cell: PipeliningCell, policy: str) -> str | None:
        return _NO_SERVER if self.options.engine != "openai" else super().obstacle(suite, cell, policy)

    def missing(self, suite: Suite, cell: PipeliningCell, policy: str, reason: str) -> Missing:
        return Missing(suite.name, cell.fields if self.options.engine == "openai" else {}, policy, reason)

    def requests(self, suite: Suite, cell: PipeliningCell) -> int:
        count = suite.requests if cell.measure != "throughput" else cell.segments * cell.segment_requests
        return min(count, self.options.limit or count)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        options, cell, corpus = self.options, job.cell, job.corpus
        assert corpus is not None
        facts = self._server()
        requests = _requests(cell, corpus, job.seed, job.requests)
        try:
            measured = asyncio.run(_measure(cell, facts, corpus, requests, advance))
        except ValueError as error:
            yield Missing(job.suite.name, cell.fields, job.policies[0], " ".join(str(error).split()))
            return
        model = options.served_model or options.model or ("random weights" if not options.base_url else facts.model)
        yield {
            "policy": job.policies[0],
            "engine": facts.engine(str(model)),
            "warmup": min(job.suite.warmup, len(requests) // 2) if cell.measure != "throughput" else 0,
            **measured,
        }

    def _server(self) -> ServerFacts:
        from ragorder.eval.suites.pipelining.server import find_or_start

        options = self.options
        spec = EngineSpec(
            engine="openai",
            model=options.model,
            served_model=options.served_model,
            api_key=options.api_key,
            base_urls=() if options.base_url is None else (options.base_url,),
        )
        return self.kept("server", lambda: find_or_start(spec, self.resources))


async def _measure(
    cell: PipeliningCell,
    facts: ServerFacts,
    corpus: Corpus,
    requests: Sequence[tuple[int, TraceRequest]],
    advance: Callable[[], None],
) -> dict[str, Any]:
    from ragorder.benchmarks.common.counted import CountedServer, long_builder
    from ragorder.benchmarks.ragcache.pipelined.measuring import measure_cold, time_system

    builder = long_builder(SYSTEM_PROMPT, facts.tokenizer, cell.system_tokens)
    async with CountedServer(facts) as server:
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
    server: CountedServer,
    builder: Any,
    corpus: Corpus,
    requests: Sequence[tuple[int, TraceRequest]],
    advance: Callable[[], None],
) -> dict[str, Any]:
    from ragorder.benchmarks.common.vectors import embed
    from ragorder.benchmarks.ragcache.pipelined.measuring import (
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
    options: dict[str, Any] = {"output_tokens": cell.output_tokens}
    options |= {"max_prefill_bs": cell.max_prefill_bs, "cautious": cell.cautious}
    rows: _Rows
    if cell.measure == "throughput":
        # Both modes search equally long, so that only the cost of speculation is compared.
        searches = {"none": staged, "speculative": staged}
        load: dict[str, Any] = {"clients": cell.clients, "overload": cell.overload or 1.0, "segments": cell.segments}
        rows = await measure_throughput(server, builder, questions, searches, advance, **load, **options)
    else:
        searches = {"none": plain, "speculative": staged}
        rows = await measure_speculation(server, builder, questions, searches, advance, **options)
    return {"shares": [round(share, 4) for share in plan.shares], "rows": rows}


def _requests(cell: PipeliningCell, corpus: Corpus, seed: int, count: int) -> list[tuple[int, TraceRequest]]:
    start = random.Random(seed).randrange(len(corpus.questions))
    numbers = [(start + each) % len(corpus.questions) for each in range(count)]
    return [
        (
            number,
            TraceRequest(
                corpus.questions[number].text, [corpus.documents[d] for d in corpus.rankings[number][: cell.top_k]]
            ),
        )
        for number in numbers
    ]
