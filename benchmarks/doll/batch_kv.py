"""Batches that a KV cache holds: the suites of kind "batch-kv"."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder import Orderer
from ragorder.document import Document
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = [
    "ANSWER_TOKENS",
    "POLICIES",
    "SUFFIX_TOKENS",
    "BatchKV",
    "BatchKVCell",
    "BatchKVRecord",
    "Served",
    "fill",
    "make_part",
    "measure",
]

ANSWER_TOKENS = 32
SUFFIX_TOKENS = 32 + ANSWER_TOKENS
"""Question and answer."""


class BatchKVCell(SuiteCell):
    """`waiting` requests with `top_k` documents of a `corpus`, in its order or `shuffled`. The cache has room for
    `batch` of them if nothing is shared; each step streams `streamed_gb` of weights (90 % of Llama 3.1 70B in
    bfloat16)."""

    corpus: str = "covidqa"
    waiting: int = Field(800, ge=1)
    top_k: int = Field(5, ge=1, le=20)
    batch: int = Field(48, ge=1)
    shuffled: bool = True
    streamed_gb: float = Field(127.0, gt=0)

    @property
    def varies_with_seed(self) -> bool:
        return self.shuffled


class BatchKVRecord(Record):
    """`rows["batch"]`: requests in each batch. See `measuring` for the facts."""

    called: ClassVar[str] = "a measurement of batches"
    is_run: ClassVar[bool] = False

    type: Literal["batch-kv"] = "batch-kv"
    cell: dict[str, Any]
    rows: dict[str, list[int]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("batch") or not {"served_tokens", "kv_tokens", "steps"} <= self.facts.keys():
            raise ValueError("batches or their tokens are missing")
        return self

    @property
    def requests(self) -> int:
        return sum(self.rows["batch"])

    def tokens_per_gb(self, streamed_gb: float) -> float:
        """Prompt and answer tokens served by a streamed gigabyte."""
        return float(self.facts["served_tokens"] / (self.facts["steps"] * streamed_gb))


Served = Sequence[Sequence[Document]]
"""Documents of each request in the prompt's order, in serving order."""


def fill(requests: Iterable[Sequence[Document]], capacity_tokens: int, *, shared: bool) -> tuple[list[int], int]:
    """Sizes of the batches, and tokens of KV in all of them. A batch's KV is its trie if `shared`: a document behind
    the same documents counts once; else the sum of its prompts. A request that is larger than the cache has a batch of
    its own."""
    sizes: list[int] = []
    nodes: dict[tuple[int, str], int] = {}
    held = total = 0
    for documents in requests:
        added, path = _added(nodes, documents, shared=shared)
        if sizes and held + added > capacity_tokens:
            nodes, held = {}, 0
            added, path = _added(nodes, documents, shared=shared)
            sizes.append(0)
        if not sizes:
            sizes.append(0)
        for step in path:
            nodes.setdefault(step, len(nodes) + 1)
        sizes[-1] += 1
        held += added
        total += added
    return sizes, total


def _added(
    nodes: dict[tuple[int, str], int], documents: Sequence[Document], *, shared: bool
) -> tuple[int, list[tuple[int, str]]]:
    """Tokens that a request adds to a batch, and the steps of its path. The root is 0."""
    tokens, here, known = SUFFIX_TOKENS, 0, shared
    path: list[tuple[int, str]] = []
    fresh = len(nodes)
    for document in documents:
        step = (here, document.key)
        found = nodes.get(step) if known else None
        if found is None:
            known = False
            tokens += document.token_count
            fresh += 1
            found = fresh
        if shared:
            path.append(step)
        here = found
    return tokens, path


def measure(policy: str, requests: Served, capacity_tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Sizes of the batches, and facts: tokens of prompts and answers served, and KV tokens held for them."""
    order, shared = POLICIES[policy]
    sizes, kv_tokens = fill(order(requests, capacity_tokens), capacity_tokens, shared=shared)
    served = sum(each.token_count for request in requests for each in request) + len(requests) * SUFFIX_TOKENS
    return sizes, {
        "served_tokens": served,
        "kv_tokens": kv_tokens,
        "capacity_tokens": capacity_tokens,
        "steps": len(sizes) * ANSWER_TOKENS,
    }


def _by_rank(requests: Served, capacity_tokens: int) -> Iterable[Sequence[Document]]:
    return requests


def _one_by_one(requests: Served, capacity_tokens: int) -> Iterable[Sequence[Document]]:
    orderer = Orderer(capacity_tokens=capacity_tokens, suffix_tokens=SUFFIX_TOKENS)
    for documents in requests:
        ordering = orderer.order(documents)
        yield ordering.documents
        ordering.confirm()


def _as_batch(requests: Served, capacity_tokens: int) -> Iterable[Sequence[Document]]:
    orderer = Orderer(capacity_tokens=capacity_tokens, suffix_tokens=SUFFIX_TOKENS)
    for ordering in orderer.order_batch(requests):
        yield ordering.documents
        ordering.confirm()


POLICIES: dict[str, tuple[Callable[[Served, int], Iterable[Sequence[Document]]], bool]] = {
    "sum": (_by_rank, False),
    "retrieval": (_by_rank, True),
    "order": (_one_by_one, True),
    "order_batch": (_as_batch, True),
}
"""The order of documents and requests, and whether KV is shared."""


class BatchKV(Experiment):
    kind = "batch-kv"
    record = BatchKVRecord
    cell = BatchKVCell
    policies: ClassVar[Any] = tuple(POLICIES)

    def requests(self, suite: Suite, cell: BatchKVCell) -> int:
        return min(cell.waiting, self.options.limit or cell.waiting)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: BatchKVCell = job.cell
        corpus = job.corpus
        assert corpus is not None, "a cell has a corpus"
        chosen = list(range(job.requests))
        if cell.shuffled:
            chosen = random.Random(f"batches {job.seed}").sample(range(len(corpus.rankings)), job.requests)
        requests = [[corpus.documents[place] for place in corpus.rankings[each][: cell.top_k]] for each in chosen]
        tokens = sum(each.token_count for request in requests for each in request)
        capacity = round(cell.batch * (tokens / len(requests) + SUFFIX_TOKENS))
        for policy in job.policies:
            sizes, facts = measure(policy, requests, capacity)
            yield {"policy": policy, "engine": {"name": "none"}, "rows": {"batch": sizes}, "facts": facts}
            for _ in requests:
                advance()


_WORDS = {
    "sum": "retrieval order, KV of each request by itself",
    "retrieval": "retrieval order, prefixes shared",
    "order": "ordered one by one",
    "order_batch": "ordered as a batch",
}


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(BatchKVRecord, suite.name))
    return Part([_table(group) for group in groups])


def _table(group: RecordGroup[BatchKVRecord]) -> Table:
    cell = BatchKVCell.read(group.cell, "doll-ordering")
    order = "shuffled" if cell.shuffled else "in the corpus's order"
    title = (
        f"{cell.corpus}, {cell.waiting:,} requests that wait, {order}, room for {cell.batch} prompts of {cell.top_k}"
    )
    headings = ["", "tokens a streamed GB", "times retrieval order", "requests in a batch", "KV, % of the sum"]
    table = Table(f"What a streamed gigabyte serves: {title}", headings)
    base = {each.seed: each.tokens_per_gb(cell.streamed_gb) for each in group.runs("retrieval")}
    for policy in POLICIES:
        runs = group.runs(policy)
        if runs:
            table.add(_WORDS[policy], *_row(runs, base, cell.streamed_gb))
    table.note = (
        f"Each of the {_steps(group)} steps of a batch streams {cell.streamed_gb:g} GB. Tokens are those of prompts "
        "and answers; least to most of the seeds below it. Whole batches, none joined: the last one may be small."
    )
    return table


def _steps(group: RecordGroup[BatchKVRecord]) -> int:
    """Steps of a batch."""
    first = group.runs()[0]
    return int(first.facts["steps"]) // len(first.rows["batch"])


def _row(runs: Sequence[BatchKVRecord], base: dict[int, float], streamed_gb: float) -> list[str | Entry]:
    ratios = [each.tokens_per_gb(streamed_gb) / base[each.seed] for each in runs if each.seed in base]
    sizes = [fmean(each.rows["batch"]) for each in runs]
    return [
        format_number(fmean(each.tokens_per_gb(streamed_gb) for each in runs), 2),
        Entry(format_number(fmean(ratios), 2), range_words(ratios, 2)) if ratios else "–",
        format_number(fmean(sizes)),
        format_number(100 * fmean(each.facts["kv_tokens"] / each.facts["served_tokens"] for each in runs)),
    ]
