"""vLLM's offloading connector, in which a copy between device and host may fail.

This is what vLLM loads first of us, so the version is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ragorder.adapters.vllm_tiers.versions import check_vllm

# Before anything that another version of vLLM may have elsewhere.
check_vllm()

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402

from ragorder.adapters.vllm_tiers.cpu_worker import HostCopyWorker  # noqa: E402
from ragorder.adapters.vllm_tiers.disk_identity import note_model  # noqa: E402
from ragorder.adapters.vllm_tiers.manager import TierManager  # noqa: E402

__all__ = ["RecomputesFailedLoads", "TierConnector", "TierWorkerMetadata"]


@dataclass
class TierWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler: with vLLM's own, the host's chunks that a failed store should have filled."""

    failed_chunks: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> TierWorkerMetadata:
        merged = super().aggregate(other)
        failed = self.failed_chunks | getattr(other, "failed_chunks", set())
        return TierWorkerMetadata(merged.completed_jobs, merged.transfer_stats, failed)


class RecomputesFailedLoads:
    """Mixed into an offloading connector: what a copy did not bring is computed, what it did not store is not held.

    vLLM's half in the worker knows only copies that succeed. So our worker reports all of them as finished, tells which
    failed, and this passes it on: a load as one that vLLM's scheduler recomputes (`failed_recving`), a store as chunks
    that the manager must not believe in. A request whose load failed takes nothing more from the tiers.
    """

    connector_scheduler: Any
    connector_worker: Any

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # What a spec is told of the model is its name and dtype, too little to know its chunks on a disk by.
        note_model(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._failed_chunks: set[int] = set()
        self._computed_anew: set[str] = set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        worker = self.connector_worker.worker
        copies = isinstance(worker, HostCopyWorker)
        loads = dict(self.connector_worker._load_jobs) if copies else {}
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        if copies:
            for failure in worker.take_failures():
                if failure.job_id in loads:
                    results.failed_recving.add(loads[failure.job_id])
                else:
                    self._failed_chunks |= failure.chunk_ids
        return results

    def build_connector_worker_meta(self) -> TierWorkerMetadata | None:
        meta = super().build_connector_worker_meta()  # type: ignore[misc]
        if meta is None:
            return None
        failed, self._failed_chunks = self._failed_chunks, set()
        return TierWorkerMetadata(meta.completed_jobs, meta.transfer_stats, failed)

    def update_connector_output(self, connector_output: Any) -> None:
        meta, manager = connector_output.kv_connector_worker_meta, self.connector_scheduler.manager
        if isinstance(manager, TierManager):
            if connector_output.failed_recving:
                self._computed_anew |= connector_output.failed_recving
                manager.loads_failed(len(connector_output.failed_recving))
            if isinstance(meta, TierWorkerMetadata) and meta.failed_chunks:
                manager.stores_failed(meta.failed_chunks)
        super().update_connector_output(connector_output)  # type: ignore[misc]

    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        if request.request_id in self._computed_anew:
            return 0
        most: int | None = super()._max_loadable_tokens(request, num_computed_tokens)  # type: ignore[misc]
        return most

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._computed_anew.discard(request.request_id)
        return super().request_finished(request, block_ids)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._computed_anew.discard(request.request_id)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]


class TierConnector(RecomputesFailedLoads, OffloadingConnector):  # type: ignore[misc]
    """Host and disk behind a device that gives up blocks in vLLM's own order."""
