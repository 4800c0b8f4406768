"""Chunks of vLLM's host tier in a bounded folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ragorder.adapters.vllm_tiers.disk_identity import UnknownWeightsError, disk_identity
from ragorder.adapters.vllm_tiers.disk_jobs import ChunkJob, JobThreads
from ragorder.adapters.vllm_tiers.metrics import TierCounts, metric_definitions
from ragorder.adapters.vllm_tiers.policy import path_of, state_of
from ragorder.kernels.store import ChunkStore, StoreRefusedError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

# A child of vLLM's logger: an engine's process does not configure ours.
_logger = init_logger("vllm.ragorder.disk")

_SHUTDOWN_PATIENCE_S = 5.0


@dataclass(slots=True)
class _DiskTransfer:
    keys: Sequence[OffloadKey]
    places: Sequence[int]
    is_load: bool


class _Written(set[OffloadKey]): ...


class DiskTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not typed for us
    """`ChunkStore` after vLLM's host tier. Corrupt chunks are dropped, and recomputed by vLLM. With an unusable folder
    (another engine's or model's) the tier stays empty, which is logged and counted."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        bytes: int,
        policy: str = "pgdsf",
        history: int = 65536,
        io_threads: int = 2,
        enable_kv_events: bool = False,
        locality: str = Locality.LOCAL.value,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality)
        self._counts = TierCounts("disk", capacity_bytes=bytes)
        self._refused = ""
        self._wants_events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: deque[OffloadingEvent] = deque()
        self._transfers: dict[int, _DiskTransfer] = {}
        self._failed_jobs: list[JobResult] = []
        parallel = offloading_spec.config.parallel
        folder = Path(path)
        if parallel.data_parallel_size > 1:
            folder /= f"dp{parallel.data_parallel_index}"
        self._store = self._open(
            lambda: ChunkStore(
                folder,
                bytes,
                disk_identity(offloading_spec, self.block_size_bytes, Path(path)),
                policy=policy,
                history=history,
                removed=self._removed if self._wants_events else None,
                logger=_logger,
            )
        )
        self._bytes = primary_kv_view.cast("B")
        self._threads = JobThreads(io_threads if self._store is not None else 0, "ragorder-disk", _logger)

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._store is not None and key in self._store
        return LookupResult.HIT if found else LookupResult.MISS

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        store = self._store
        if store is None:
            self._refuse(job_metadata)
            return
        request = job_metadata.req_context
        path = path_of(request)
        parents = {key: path.parent_of(key) for key in job_metadata.keys}
        transfer = self._transfer(job_metadata, path.places)
        last, cost = len(path.keys) if path.last is None else path.last, path.cost
        expected = path.expected
        used = {key for key in transfer.keys if path.places.get(key, last) < last}
        protected = frozenset(path.keys)
        state_of(request, _Written, _Written).update(key for key in transfer.keys if key not in store)

        def write(step: int) -> bool:
            key = transfer.keys[step]
            with self._chunk(transfer.places[step]) as chunk:
                return store.write(
                    key, chunk, parents[key], cost=cost, used=key in used, expected=expected, protected=protected
                )

        self._start(job_metadata.job_id, transfer, write)

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        store = self._store
        if store is None:
            self._refuse(job_metadata)
            return
        transfer = self._transfer(job_metadata)
        store.pin(transfer.keys)

        def read(step: int) -> bool:
            with self._chunk(transfer.places[step]) as chunk:
                return store.read(transfer.keys[step], chunk)

        self._start(job_metadata.job_id, transfer, read)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._failed_jobs = self._failed_jobs, []
        for job_id, job in self._threads.take_ended():
            transfer = self._transfers.pop(job_id)
            done = [key for key, worked in zip(transfer.keys, job.worked, strict=True) if worked]
            if transfer.is_load:
                if self._store is not None:
                    self._store.unpin(transfer.keys)
                self._counts.failed_transfers += len(transfer.keys) - len(done)
            elif done and self._wants_events:
                self._events.append(self._event(done, removed=False))
                # Events of chunks that were evicted since they were written are before this one.
                if gone := [key for key in done if self._store is None or key not in self._store]:
                    self._removed(gone)
            results.append(
                JobResult(
                    job_id=job_id,
                    success=len(done) == len(transfer.keys),
                    successful_keys=tuple(done) if transfer.is_load and done else None,
                    transfer_time=job.seconds,
                    transfer_bytes=len(done) * self.block_size_bytes,
                )
            )
        return results

    @override
    def has_pending_work(self) -> bool:
        return self._threads.busy or bool(self._failed_jobs)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing: a request counts once, when it has finished."""

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        store = self._store
        if store is None:
            return
        path = path_of(req_context)
        written = state_of(req_context, _Written, _Written)
        used = [key for key in path.keys[: path.last] if key not in written]
        if not used:
            return
        cost, computed, expected = path.cost, set(path.keys[path.cached :]), path.expected

        def count(step: int) -> bool:
            store.use(used, cost=cost, computed=computed, expected=expected)
            return True

        # After the request's own chunks are stored, and without blocking the scheduler's thread.
        self._threads.add(ChunkJob(None, 1, count))

    @override
    def drain_jobs(self) -> None:
        self._threads.wait()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        while self._events:
            yield self._events.popleft()

    @override
    def get_stats(self) -> Any:
        store, counts = self._store, self._counts
        if store is not None:
            counts.chunks, counts.bytes = len(store), store.used_bytes
            oldest = store.oldest_written
            counts.oldest_seconds = 0.0 if oldest is None else max(0.0, time.time() - oldest)
            counts.stored, counts.evicted = store.counters.stored, store.counters.evicted
            counts.refused.update(store.counters.refusals())
        return counts.report()

    @override
    def shutdown(self) -> None:
        self._threads.close(_SHUTDOWN_PATIENCE_S)
        if self._store is not None:
            self._store.close()
        self._bytes.release()

    def _open(self, make: Callable[[], ChunkStore]) -> ChunkStore | None:
        try:
            return make()
        except StoreRefusedError as refused:
            self._refused, why = refused.reason, str(refused)
        except UnknownWeightsError as unknown:
            self._refused, why = "unknown-weights", str(unknown)
        except OSError as error:
            self._refused, why = "unknown-weights", f"the model's files cannot be read: {error.strerror or error}"
        self._counts.refused[self._refused] = 1
        self._counts.capacity_bytes = 0
        _logger.warning("No disk tier: %s. Device and host continue without it.", why)
        return None

    def _refuse(self, job: TransferJob) -> None:
        self._counts.refused[self._refused] += len(job.keys)
        self._failed_jobs.append(JobResult(job_id=job.job_id, success=False))

    def _transfer(self, job: TransferJob, order: dict[OffloadKey, int] | None = None) -> _DiskTransfer:
        chunks = list(zip(job.keys, map(int, job.chunk_ids), strict=True))
        if order is not None:
            # Parents before their children.
            chunks.sort(key=lambda chunk: order.get(chunk[0], 0))
        return _DiskTransfer([key for key, _ in chunks], [place for _, place in chunks], job.is_promotion)

    def _start(self, job_id: int, transfer: _DiskTransfer, step: Callable[[int], bool]) -> None:
        self._transfers[job_id] = transfer
        self._threads.add(ChunkJob(job_id, len(transfer.keys), step, urgent=transfer.is_load))

    def _chunk(self, place: int) -> memoryview:
        start = place * self.block_size_bytes
        return self._bytes[start : start + self.block_size_bytes]

    def _removed(self, keys: Sequence[OffloadKey]) -> None:
        self._events.append(self._event(keys, removed=True))

    def _event(self, keys: Sequence[OffloadKey], *, removed: bool) -> OffloadingEvent:
        return OffloadingEvent(
            keys=list(keys),
            medium=Medium.STORAGE,
            removed=removed,
            locality=self.locality,
            # vLLM keeps data for removal events until the last tier has removed the chunk.
            removal_expected=not removed,
        )
