"""Copies between vLLM's KV cache and host memory on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

# A child of vLLM's logger: an engine's process does not configure ours.
_log = init_logger("vllm.ragorder.copies")


class FailedCopy(NamedTuple):
    job_id: int
    chunk_ids: set[int]


# A block of the device, and its place in the host: chunk and part.
_Place = tuple[int, int, int]


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies in its own thread. Failed jobs count as finished, and are in `take_failures`."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        """Raises ValueError for another layout; the caller then keeps `region`."""
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk is {blocks_per_chunk}: give 1 or more")
        self._blocks_per_chunk = blocks_per_chunk
        self._device: list[Any] = []
        self._host: list[Any] = []
        for cache in kv_caches.tensors:
            tensor, size = cache.tensor, cache.page_size_bytes
            if tensor.device.type != "cpu" or tensor.dtype != torch.int8 or tensor.ndim != 2 or tensor.shape[1] != size:
                raise ValueError(
                    f"a KV cache of {tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type} does not consist of "
                    f"blocks of {size} bytes on the CPU"
                )
            self._device.append(tensor.numpy())
            view = region.create_next_worker_view(size * blocks_per_chunk)
            self._host.append(view.unflatten(1, (blocks_per_chunk, size)).numpy())
        # For each group of layers: its caches, and the bytes that it uses of a block there.
        self._parts: list[dict[int, int]] = []
        for references in kv_caches.group_data_refs:
            parts: dict[int, int] = {}
            for reference in references:
                parts[reference.tensor_idx] = max(parts.get(reference.tensor_idx, 0), reference.page_size_bytes)
            self._parts.append(parts)
        self._region: SharedOffloadRegion | None = region
        self._thread = ThreadPoolExecutor(1, "ragorder-host-copies")
        self._jobs: dict[int, Future[tuple[TransferResult, FailedCopy | None]]] = {}
        self._failures: list[FailedCopy] = []

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._jobs[job_id] = self._thread.submit(self._run, job_id, src_spec, dst_spec, True)
        return True

    @override
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        self._jobs[job_id] = self._thread.submit(self._run, job_id, dst_spec, src_spec, False)
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        finished = [job_id for job_id, job in self._jobs.items() if job.done()]
        ended = [self._jobs.pop(job_id).result() for job_id in finished]
        self._failures += [failure for _, failure in ended if failure is not None]
        return [result for result, _ in ended]

    def take_failures(self) -> list[FailedCopy]:
        taken, self._failures = self._failures, []
        return taken

    @override
    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    @override
    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)
        self._device.clear()
        self._host.clear()
        region, self._region = self._region, None
        if region is not None:
            # The scheduler has unlinked the file once it had it open; see `TierSpec`.
            region._creator = region._creator and Path(region.mmap_path).exists()
            region.cleanup()

    def copy(self, places: list[_Place], parts: dict[int, int], to_host: bool) -> int:
        for block, chunk, part in places:
            for index, size in parts.items():
                device, host = self._device[index][block, :size], self._host[index][chunk, part, :size]
                np.copyto(host if to_host else device, device if to_host else host)
        return len(places) * sum(parts.values())

    def _run(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, to_host: bool
    ) -> tuple[TransferResult, FailedCopy | None]:
        started = time.perf_counter()
        try:
            if not isinstance(host, CPULoadStoreSpec):
                raise TypeError(f"{type(host).__name__} is no address in host memory")
            copied = sum(self.copy(places, parts, to_host) for places, parts in self._places(device, host))
        except Exception as error:
            # The exception's message may quote an array's values.
            _log.warning("a copy %s host memory failed: %s", "to" if to_host else "from", type(error).__name__)
            chunks = {int(chunk) for chunk in getattr(host, "block_ids", ())}
            return TransferResult(job_id, True), FailedCopy(job_id, chunks)
        return TransferResult(job_id, True, copied, time.perf_counter() - started), None

    def _places(
        self, device: GPULoadStoreSpec, host: CPULoadStoreSpec
    ) -> Iterator[tuple[list[_Place], dict[int, int]]]:
        """Yield each group's places and parts. A group may begin in the middle of a chunk."""
        blocks = [int(block) for block in device.block_ids]
        chunks = [int(chunk) for chunk in host.block_ids]
        if min(blocks, default=0) < 0 or min(chunks, default=0) < 0:
            raise ValueError("blocks and chunks are numbered from 0")
        if len(device.group_sizes) != len(self._parts):
            raise ValueError("the number of groups differs from the KV caches'")
        for parts, count, first in zip(self._parts, device.group_sizes, device.block_indices, strict=True):
            if not count:
                continue
            skipped = first % self._blocks_per_chunk
            slots = [divmod(skipped + place, self._blocks_per_chunk) for place in range(count)]
            yield [(blocks[place], chunks[chunk], part) for place, (chunk, part) in enumerate(slots)], parts
            blocks, chunks = blocks[count:], chunks[slots[-1][0] + 1 :]
        if blocks or chunks:
            raise ValueError("more blocks or chunks than the groups have")
