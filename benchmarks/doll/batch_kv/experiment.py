"""Batches that a KV cache holds: the suites of kind "batch-kv"."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.doll.batch_kv.measuring import POLICIES, measure
from ragorder.benchmarks.doll.batch_kv.record import SUFFIX_TOKENS, BatchKVCell, BatchKVRecord
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["BatchKV"]


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
