"""Successive searches of one request: the suites of kind "locality"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.hedra.locality.record import LocalityCell, LocalityRecord
from ragorder.common.files import cache_folder
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["Locality"]

_PATIENCE = (1, 2, 4, 8, 16)
_GENERATED = (0.1, 0.3, 0.5, 0.7, 0.9)
_HELD = (0.05, 0.1, 0.2, 0.4)
_NEIGHBOURS = 5
_EMBEDDED = 300
"""Answers in the making that are embedded, and compared with the whole answer."""


class Locality(Experiment):
    kind = "locality"
    record = LocalityRecord
    cell = LocalityCell
    policies: ClassVar[Any] = ("nearest", "history")
    unit = "searches"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True

    def requests(self, suite: Suite, cell: LocalityCell) -> int:
        return min(cell.questions, self.options.limit or cell.questions)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        import numpy as np

        from ragorder.benchmarks.hedra.locality import measuring
        from ragorder.eval.suites.pipelining.search import embed

        cell: LocalityCell = job.cell
        corpus = job.corpus
        assert corpus is not None, "a cell has a corpus"
        cache = cache_folder()
        documents = embed([each.text for each in corpus.documents], cache)
        questions = [each.text for each in corpus.questions[: job.requests]]
        passages = [corpus.documents[ranking[0]].text for ranking in corpus.rankings[: job.requests]]
        first = embed(questions, cache)
        second = embed(measuring.partial_texts(questions, passages, cell.generated), cache)
        index = measuring.build_index(documents, cell.nprobe)
        distances, _ = index.search(second, _NEIGHBOURS)
        facts: dict[str, Any] = {
            "as_faiss": measuring.as_faiss(index, list(zip(first, second, strict=True)), cell.top_k),
            "clusters": index.nlist,
            "nprobe": index.nprobe,
            "observations": measuring.observations(index, first, second, cell.top_k),
            "skew": measuring.skew(index, np.concatenate((first, second)), _HELD),
            # Of vectors of length 1.
            "to_first_query": float(np.linalg.norm(second - first, axis=1).mean()),
            "to_neighbours": float(np.sqrt(np.maximum(0, 2 - 2 * distances)).mean()),
            "to_nearest": float(np.sqrt(np.maximum(0, 2 - 2 * distances[:, 0])).mean()),
        }
        some = questions[:_EMBEDDED], passages[:_EMBEDDED]
        whole = embed(measuring.partial_texts(*some, 1.0), cache)
        facts["to_whole"] = {
            f"{share:g}": float(
                np.linalg.norm(embed(measuring.partial_texts(*some, share), cache) - whole, axis=1).mean()
            )
            for share in _GENERATED
        }
        for policy in job.policies:
            pairs = zip(first, second, strict=True)
            found = measuring.trace(index, pairs, cell.top_k, history=policy == "history")
            ends = {str(patience): measuring.early_ends(found, patience) for patience in _PATIENCE}
            yield {
                "policy": policy,
                "engine": {"name": "faiss"},
                "facts": {**facts, "patience": ends},
                "rows": {"final_at": measuring.final_at(found)},
            }
            advance()
