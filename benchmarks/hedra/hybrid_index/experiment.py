"""Index clusters in two tiers of a CPU: the suites of kind "hybrid-index"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ragorder.benchmarks.hedra.hybrid_index.record import HybridCell, HybridRecord
from ragorder.common.files import cache_folder
from ragorder.eval.data.machine import load_average
from ragorder.eval.running.suite import Experiment, Job, Line

__all__ = ["HybridIndex"]

_EVERY = 50
_WARMUP = 0.5


class HybridIndex(Experiment):
    kind = "hybrid-index"
    record = HybridRecord
    cell = HybridCell
    policies: ClassVar[Any] = ("file", "file and memory")
    unit = "searches"
    packages: ClassVar[Any] = {"faiss": "retrieval", "torch": "torch"}
    one_job = True

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        import torch

        from ragorder.benchmarks.hedra.hybrid_index import measuring
        from ragorder.benchmarks.hedra.locality.measuring import build_index, skew
        from ragorder.benchmarks.hedra.staging.measuring import clustered
        from ragorder.eval.suites.pipelining.search import embed
        from ragorder.kernels.vectors import TorchClusterScan
        from ragorder.pipelining.search import IndexTiers

        cell: HybridCell = job.cell
        if job.corpus is None:

            def start() -> Any:
                vectors = clustered(cell.vectors, cell.dimensions, clusters=cell.vectors // 50, seed=0)
                return build_index(vectors, cell.nprobe)

            index = self.kept((cell.vectors, cell.dimensions, cell.nprobe), start)
            queries = measuring.skewed_queries(index, job.requests, cell.skew, job.seed)
        else:
            texts = [each.text for each in job.corpus.documents], [each.text for each in job.corpus.questions]
            documents, asked = (embed(each, cache_folder()) for each in texts)
            index = self.kept((cell.corpus, cell.nprobe), lambda: build_index(documents, cell.nprobe))
            queries = asked[: job.requests]
        warmup = int(_WARMUP * len(queries))
        facts: dict[str, Any] = {
            "clusters": index.nlist,
            "nprobe": index.nprobe,
            "skew": skew(index, queries, [cell.held, 0.2]),
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with TemporaryDirectory() as folder, closing(measuring.ColdIndex(index, Path(folder, "index"))) as cold:
                for policy in job.policies:
                    tiers = None
                    if policy == "file and memory":
                        fast = TorchClusterScan("inner product")
                        capacity = int(cell.held * fast.bytes_of(index.ntotal, index.d))
                        tiers = IndexTiers(fast, max(1, capacity), every=_EVERY)
                    before = load_average()
                    times, hit_share = measuring.latencies(cold.index, queries, index.nprobe, tiers, cold.cool, warmup)
                    yield {
                        "policy": policy,
                        "engine": {"name": "faiss"},
                        "load_average": before,
                        "warmup": warmup,
                        "facts": {**facts, "hit_share": hit_share},
                        "rows": {"latency_ms": [round(each, 4) for each in times]},
                    }
                    for _ in times:
                        advance()
        finally:
            torch.set_num_threads(threads)
