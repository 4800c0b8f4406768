"""vLLM's offloading connector with fallible copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ragorder.adapters.vllm_tiers.versions import check_vllm

# Before imports that another version of vLLM may have elsewhere.
check_vllm()

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402

from ragorder.adapters.vllm_tiers.awaited_profile import note_profile  # noqa: E402
from ragorder.adapters.vllm_tiers.cpu_worker import HostCopyWorker  # noqa: E402
from ragorder.adapters.vllm_tiers.disk_identity import note_model  # noqa: E402
from ragorder.adapters.vllm_tiers.spec import TierManager  # noqa: E402


@dataclass
class TierWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    failed_chunks: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> TierWorkerMetadata:
        merged = super().aggregate(other)
        failed = self.failed_chunks | getattr(other, "failed_chunks", set())
        return TierWorkerMetadata(merged.completed_jobs, merged.transfer_stats, failed)


class RecomputesFailedLoads:
    """Mixin: prompts of failed loads are computed, chunks of failed stores dropped."""

    connector_scheduler: Any
    connector_worker: Any

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # A spec gets only the model's name and dtype: too little to identify its chunks on a disk.
        note_model(vllm_config)
        note_profile(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._failed_chunks: set[int] = set()
        self._computed_anew: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)  # type: ignore[misc]
        scheduler = self.connector_scheduler
        if isinstance(scheduler.manager, TierManager):
            state = scheduler._req_status.get(request.request_id)
            if state is not None and hasattr(state, "update_offload_keys"):
                # vLLM itself reads a request's chunks when it first tries to schedule it.
                state.update_offload_keys()
                scheduler.manager.expect(state.req_context)

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
    """Host and disk tiers; device blocks stay in vLLM's own order."""
