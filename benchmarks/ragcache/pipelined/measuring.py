"""Searches with and without speculation (RAGCache Figure 22, Table 3)."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from ragorder.adapters.openai.pipelined import OrderedPrompts, PromptRequest
from ragorder.benchmarks.common.counted import CountedServer, Counters
from ragorder.benchmarks.common.vectors import index_of
from ragorder.common.extras import needs
from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.report.statistics import known_mean
from ragorder.eval.running.load import closed_loop, rotated
from ragorder.eval.suites.pipelining.search import played
from ragorder.eval.suites.pipelining.server import (
    Asked,
    ask,
    make_pipeline,
    milliseconds,
)
from ragorder.pipelining import (
    Pipeline,
    PipelinedStream,
    Provisional,
    Retrieval,
    StagedHNSW,
    StagedIVF,
    StagedSearch,
    staged_retrieval,
)
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ragorder.benchmarks.common.vectors import Vectors

_CLUSTERS = 128
_LINKS = 32
_EF_FULL = 512
_EF_FACTOR = 4


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """`shares` are each stage's part of the unstaged search; their sum exceeds 1 if stages repeat work."""

    search: StagedSearch
    unstaged: StagedSearch
    shares: tuple[float, ...]


def plan_search(
    kind: Literal["ivf", "hnsw"], vectors: Vectors, *, ratio: float, stages: int, growth: str, top_k: int
) -> SearchPlan:
    """A search by inner product. "ivf": `ratio` of at most 128 clusters, in stages of `growth` "equal" or "geometric".
    "hnsw": `ratio` is efSearch / 512; each stage has four times the last one's, and starts over. Raises ImportError."""
    if kind == "hnsw":
        target = max(top_k, round(ratio * _EF_FULL))
        schedule = sorted({max(top_k, target // _EF_FACTOR**left) for left in range(stages)})
        with needs("retrieval", "a real index"):
            import faiss
        index = faiss.IndexHNSWFlat(vectors.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
        index.add(vectors)
        shares = tuple(each / target for each in schedule)
        return SearchPlan(StagedHNSW(index, schedule=schedule), StagedHNSW(index, target, stages=1), shares)
    clusters = min(_CLUSTERS, len(vectors))
    index = index_of([vectors], clusters, vectors, ratio, seed=1)
    probes = index.nprobe
    counts = _counts(probes, stages, growth)
    plain = StagedIVF(index, growth=[probes])
    return SearchPlan(StagedIVF(index, growth=counts), plain, tuple(count / probes for count in counts))


def _counts(probes: int, stages: int, growth: str) -> list[int]:
    if growth == "geometric":
        ends = sorted({max(1, probes >> left) for left in range(stages)})
    else:
        ends = sorted({max(1, probes * number // stages) for number in range(1, stages + 1)})
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def real_retrieval(search: StagedSearch, corpus: Corpus, queries: Vectors, top_k: int) -> Retrieval[Asked, Document]:
    """Documents of a corpus for its questions, embedded in advance as `queries`."""
    return staged_retrieval(
        search,
        lambda question: queries[question.number : question.number + 1],
        corpus.documents.__getitem__,
        top_k=top_k,
    )


def paced(
    retrieval: Retrieval[Asked, Document], shares: Sequence[float], search_s: float
) -> Retrieval[Asked, Document]:
    """Return the search stretched to `search_s` seconds, each stage to its share."""
    ends_s = [search_s * share for share in accumulate(shares)]

    async def search(question: Asked) -> AsyncGenerator[Provisional[Document], None]:
        now = asyncio.get_running_loop().time
        start_s, number = now(), 0
        async with aclosing(retrieval(question)) as stages:
            async for stage in stages:
                end_s = ends_s[-1] if stage.final else ends_s[number]
                await asyncio.sleep(max(0.0, start_s + end_s - now()))
                yield stage
                number += 1

    return search


MODES = ("none", "speculative")
_ALONE = 5
_MANY_CLIENTS = 16
Advance = Callable[[], None]


async def measure_speculation(
    server: CountedServer,
    builder: PromptBuilder,
    questions: Sequence[str],
    searches: Mapping[str, Retrieval[Any, Document]],
    advance: Advance,
    *,
    output_tokens: int = 1,
    **pipeline: Any,
) -> dict[str, dict[str, list[Any]]]:
    """Each question in both `MODES` in turn, one at a time; each mode is a tenant. `pipeline`: see `make_pipeline`.

    `exposed_ms` is T1 of Table 3 with speculation, T2 without. `computed_tokens` includes wrong speculations.
    `started_stages` had new documents; since `settled_stage` they are final. Raises EngineError for a server that does
    not answer or has other clients.
    """
    salts = {mode: secrets.token_hex(16) for mode in MODES}
    watched = {mode: _Watched(searches[mode]) for mode in MODES}
    pipelines = _pipelines(server, builder, watched, pipeline)
    rows: dict[str, dict[str, list[Any]]] = {mode: defaultdict(list) for mode in MODES}
    before = await server.quiet()
    for number, question in enumerate(questions):
        for mode in rotated(MODES, number):
            stream = await pipelines[mode].answer(ask(number, question, salts[mode], output_tokens))
            after = await server.quiet()
            trace, usage = stream.trace, stream.usage
            started, settled = watched[mode].stages()
            found = {
                "ttft_ms": milliseconds(trace.first_token_s),
                "tbt_ms": milliseconds(stream.tbt_s),
                "search_ms": milliseconds(trace.retrieval_s),
                "exposed_ms": milliseconds(trace.exposed_search_s),
                "prompt_tokens": usage and usage.prompt_tokens,
                "cached_tokens": usage and usage.cached_tokens,
                "computed_tokens": _computed(before, after),
                "speculations": trace.speculations,
                "refused": trace.refused,
                "right": trace.right,
                "speculated_stage": trace.speculated_stage,
                "started_stages": started,
                "settled_stage": settled,
            }
            for name, value in found.items():
                rows[mode][name].append(value)
            before = after
        advance()
    for each in pipelines.values():
        await each.close()
    return rows


async def measure_throughput(
    server: CountedServer,
    builder: PromptBuilder,
    questions: Sequence[str],
    searches: Mapping[str, Retrieval[Any, Document]],
    advance: Advance,
    *,
    clients: int | None,
    segments: int,
    overload: float = 2.0,
    output_tokens: int = 1,
    **pipeline: Any,
) -> dict[str, dict[str, list[Any]]]:
    """The questions in `segments`, each in both `MODES` in turn, by `clients` in a closed loop (None: enough for
    `overload`). `requests_per_s` leaves out both ends of a segment, where the engine is not saturated; `tbt_ms` is the
    mean of all its answers. Raises as `measure_speculation`."""
    salts = {mode: secrets.token_hex(16) for mode in MODES}
    pipelines = _pipelines(server, builder, searches, pipeline)
    rows: dict[str, dict[str, list[Any]]] = {mode: defaultdict(list) for mode in MODES}
    parts = _split(len(questions), segments)
    if clients is None:
        clients = await _clients(pipelines["none"], [questions[number] for number in parts[0]], overload, output_tokens)
    for segment, numbers in enumerate(parts):
        for mode in rotated(MODES, segment):
            asked = [ask(number, questions[number], salts[mode], output_tokens) for number in numbers]
            first = ask(numbers[0], questions[numbers[0]], secrets.token_hex(16), output_tokens)
            alone = await pipelines[mode].answer(first)
            before = await server.quiet()
            start = time.perf_counter()
            streams, ends_s = await _closed_loop(pipelines[mode], asked, clients, advance)
            seconds = time.perf_counter() - start
            traces = [stream.trace for stream in streams]
            tbt_s = known_mean(stream.tbt_s for stream in streams)
            found = {
                "requests": len(asked),
                "clients": clients,
                "seconds": round(seconds, 3),
                "requests_per_s": round(saturated_rate(ends_s, clients) or len(asked) / seconds, 4),
                "computed_tokens": _computed(before, await server.quiet()),
                "speculations": sum(trace.speculations for trace in traces),
                "refused": sum(trace.refused for trace in traces),
                "right": sum(trace.right for trace in traces),
                "tbt_ms": milliseconds(tbt_s),
                "alone_s": alone.trace.total_s and round(alone.trace.total_s, 4),
            }
            for name, value in found.items():
                rows[mode][name].append(value)
    for each in pipelines.values():
        await each.close()
    return rows


class _Watched:
    def __init__(self, retrieval: Retrieval[Any, Document]) -> None:
        self._retrieval = retrieval
        self._shown: list[tuple[str, ...]] = []

    async def __call__(self, question: Asked) -> AsyncGenerator[Provisional[Document], None]:
        self._shown = []
        async with aclosing(self._retrieval(question)) as stages:
            async for stage in stages:
                self._shown.append(tuple(document.key for document in stage.documents))
                yield stage

    def stages(self) -> tuple[list[int], int]:
        """The stages before the last (from 1) with new documents, and the one since which they are final."""
        shown = self._shown
        new = [number for number in range(1, len(shown)) if number == 1 or shown[number - 1] != shown[number - 2]]
        settled = next(number for number in range(len(shown), 0, -1) if number == 1 or shown[number - 2] != shown[-1])
        return new, settled


async def _clients(
    pipeline: Pipeline[Any, Document, Any], questions: Sequence[str], overload: float, output_tokens: int
) -> int:
    salt = secrets.token_hex(16)
    asked = [ask(number, question, salt, output_tokens) for number, question in enumerate(questions)]
    await pipeline.answer(asked[0])
    times_s = [(await pipeline.answer(each)).trace.total_s or 0.0 for each in asked[: min(len(asked), _ALONE)]]
    start = time.perf_counter()
    await _closed_loop(pipeline, asked, _MANY_CLIENTS, lambda: None)
    rate = len(asked) / (time.perf_counter() - start)
    return max(2, math.ceil(overload * rate * median(times_s)))


async def _closed_loop(
    pipeline: Pipeline[Any, Document, Any], questions: Iterable[Asked], clients: int, advance: Advance
) -> tuple[list[PipelinedStream], list[float]]:
    streams, ends_s = [], []

    async def ask_one(question: Asked) -> None:
        stream = await pipeline.answer(question)
        ends_s.append(time.perf_counter())
        streams.append(stream)
        advance()

    await closed_loop(ask_one, questions, clients)
    return streams, ends_s


def saturated_rate(ends_s: Sequence[float], clients: int) -> float | None:
    middle = ends_s[clients - 1 : len(ends_s) - clients]
    return (len(middle) - 1) / (middle[-1] - middle[0]) if len(middle) > clients else None


def _pipelines(
    server: CountedServer,
    builder: PromptBuilder,
    searches: Mapping[str, Retrieval[Any, Document]],
    options: Mapping[str, Any],
) -> dict[str, Pipeline[Any, Document, Any]]:
    return {
        mode: make_pipeline(
            server,
            mode,
            searches[mode],
            orderer=server.orderer(builder, tenants=len(MODES)),
            builder=builder,
            **{"cautious": False, **options},
        )
        for mode in MODES
    }


def _split(count: int, parts: int) -> list[range]:
    parts = max(1, min(parts, count))
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def _computed(before: Counters | None, after: Counters | None) -> int | None:
    return None if before is None or after is None else after.computed - before.computed


ALONE = "alone"
_MODES = ("none", "warmup")
_CALIBRATING = 5


async def measure_cold(
    server: CountedServer,
    builder: PromptBuilder,
    requests: Sequence[TraceRequest],
    retrieval_s: float,
    advance: Callable[[], None],
) -> dict[str, dict[str, list[Any]]]:
    """Each request in each mode in turn, with its own salt: the system prompt is never cached.

    Rows of "alone": `system_ms` (T_sys) is the system prompt's time, `documents_ms` (T_docs) that of the whole prompt
    after it. Raises EngineError for a server that does not answer or has other clients.
    """
    rankings = [request.documents for request in requests]
    orderers = {mode: server.orderer(builder) for mode in _MODES}
    retrieval = played(rankings, retrieval_s)
    pipelines = {
        mode: make_pipeline(server, mode, retrieval, orderer=orderers[mode], builder=builder) for mode in _MODES
    }
    rows: dict[str, dict[str, list[Any]]] = {mode: defaultdict(list) for mode in (*_MODES, ALONE)}
    for number, request in enumerate(requests):
        for mode in rotated((*_MODES, ALONE), number):
            await server.quiet()
            salt = secrets.token_hex(16)
            asked = ask(number, request.question, salt)
            if mode == ALONE:
                prompts = OrderedPrompts(server.orderer(builder), builder, "token_ids")
                whole = prompts.preview(asked, request.documents)
                rows[ALONE]["system_ms"].append(milliseconds(await _time(server, _system(builder, salt))))
                rows[ALONE]["documents_ms"].append(milliseconds(await _time(server, whole)))
            else:
                stream = await pipelines[mode].answer(asked)
                trace, usage = stream.trace, stream.usage
                row = rows[mode]
                row["ttft_ms"].append(milliseconds(trace.first_token_s))
                row["retrieval_ms"].append(milliseconds(trace.retrieval_s))
                row["cached_tokens"].append(usage and usage.cached_tokens)
                row["prompt_tokens"].append(usage and usage.prompt_tokens)
                row["warmed_up"].append(trace.warmed_up)
        advance()
    for each in pipelines.values():
        await each.close()
    return rows


async def time_system(server: CountedServer, builder: PromptBuilder) -> float:
    """Median seconds of the system prompt alone."""
    times = []
    for _ in range(_CALIBRATING):
        await server.quiet()
        times.append(await _time(server, _system(builder, secrets.token_hex(16))))
    return median(times)


def _system(builder: PromptBuilder, salt: str) -> PromptRequest:
    return PromptRequest(None, builder.prefix_ids, salt, {"max_tokens": 1, "temperature": 0.0})


async def _time(server: CountedServer, request: PromptRequest) -> float:
    start, first_s = time.perf_counter(), 0.0
    async with aclosing(server.streams.stream(request)) as chunks:
        async for _ in chunks:
            first_s = first_s or time.perf_counter() - start
    return first_s
