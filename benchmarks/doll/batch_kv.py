"""Batches that a bounded KV cache holds, and what a streamed gigabyte of weights serves (suite doll-ordering)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field

from ragorder import Orderer
from ragorder.document import Document
from ragorder.eval.report.declared import Block, Column, Row, TableForm, figure, policy_column
from ragorder.eval.report.tables import Entry
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

Served = Sequence[Sequence[Document]]
"""Documents of each request in the prompt's order, in serving order."""
ANSWER_TOKENS = 32
SUFFIX_TOKENS = 32 + ANSWER_TOKENS
"""Question and answer."""


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
_WORDS = {
    "sum": "retrieval order, KV of each request by itself",
    "retrieval": "retrieval order, prefixes shared",
    "order": "ordered one by one",
    "order_batch": "ordered as a batch",
}


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


def tokens_per_gb(run: Record) -> float:
    """Return prompt and answer tokens served by a streamed gigabyte."""
    streamed_gb = BatchKVCell.read(run.cell, "doll-ordering").streamed_gb
    return float(run.facts["served_tokens"] / (run.facts["steps"] * streamed_gb))


def _title(block: Block) -> str:
    cell: BatchKVCell = block.cell
    order = "shuffled" if cell.shuffled else "in the corpus's order"
    title = (
        f"{cell.corpus}, {cell.waiting:,} requests that wait, {order}, room for {cell.batch} prompts of {cell.top_k}"
    )
    return f"What a streamed gigabyte serves: {title}"


def _times_retrieval(row: Row) -> Entry:
    base = {each.seed: tokens_per_gb(each) for each in row.group.runs("retrieval")}
    ratios = [tokens_per_gb(each) / base[each.seed] for each in row.runs if each.seed in base]
    return Entry(format_number(fmean(ratios), 2), range_words(ratios, 2)) if ratios else Entry("–")


class BatchKV(Experiment):
    """Column `batch`: requests in each. Facts: tokens of prompts and answers served, and KV tokens held for them."""

    kind = "batch-kv"
    cell = BatchKVCell
    columns = ("batch",)
    facts = ("served_tokens", "kv_tokens", "steps")
    policies: ClassVar[Any] = tuple(POLICIES)
    tables = (
        TableForm(
            _title,
            [
                policy_column("", _WORDS),
                figure("tokens a streamed GB", tokens_per_gb, 2),
                Column("times retrieval order", _times_retrieval),
                figure("requests in a batch", lambda run: fmean(run.rows["batch"])),
                figure("KV, % of the sum", lambda run: 100 * run.facts["kv_tokens"] / run.facts["served_tokens"]),
            ],
            note=lambda block: (
                f"Each of the {int(block.first.facts['steps']) // len(block.first.rows['batch'])} steps of a batch "
                f"streams {block.cell.streamed_gb:g} GB. Tokens are those of prompts and answers; least to most of the "
                "seeds below it. Whole batches, none joined: the last one may be small."
            ),
            policies=tuple(POLICIES),
        ),
    )

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


def measure(policy: str, requests: Served, capacity_tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Return sizes of the batches, and facts: tokens of prompts and answers served, and KV tokens held for them."""
    order, shared = POLICIES[policy]
    sizes, kv_tokens = fill(order(requests, capacity_tokens), capacity_tokens, shared=shared)
    served = sum(each.token_count for request in requests for each in request) + len(requests) * SUFFIX_TOKENS
    return sizes, {
        "served_tokens": served,
        "kv_tokens": kv_tokens,
        "capacity_tokens": capacity_tokens,
        "steps": len(sizes) * ANSWER_TOKENS,
    }


def fill(requests: Iterable[Sequence[Document]], capacity_tokens: int, *, shared: bool) -> tuple[list[int], int]:
    """Return the sizes of batches and the tokens of their KV: tries if `shared`, else sums of prompts."""
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
