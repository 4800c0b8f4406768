"""A model on the embedded engine and a FAISS index, placed and timed for a profile of placements."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ragorder.common.extras import needs
from ragorder.eval.data.machine import describe_environment
from ragorder.eval.running.load import Progress, silent
from ragorder.kernels.model_sizes import model_sizes
from ragorder.pipelining.placement.base import NO_INDEX, Curve, IndexSizes, ModelSizes, Workload
from ragorder.pipelining.placement.budgets import Budgets, format_bytes
from ragorder.pipelining.placement.fit import STAGES
from ragorder.pipelining.placement.profile import index_sizes

if TYPE_CHECKING:
    from ragorder.kernels.engine import Completion, Request

_STEPS = (64, 256, 1024, 4096)
_LARGEST_STEP = 8192
# Of the device, for the workspace, as `plan_placement` and the engine choose their steps.
_WORKSPACE_SHARE = 0.125
_RESULTS = 5
# Measured steps with one token for each request of a batch.
_DECODED = 4
_BLOCK = 16


class PlacedEngine:
    """A model whose layers lie where `place` puts them. `sizes`: with the measured workspace. Raises ImportError
    without torch, and what `TieredEngine.load` and `model_sizes` raise."""

    def __init__(
        self,
        model: Path,
        budgets: Budgets,
        workload: Workload,
        *,
        batch: int,
        seed: int = 0,
        device: str | None = None,
        limit_s: float = math.inf,
        progress: Progress = silent,
    ) -> None:
        with needs("torch", "ragorder profile --placement"):
            from ragorder.kernels.engine import EngineSettings, TieredEngine
            from ragorder.kernels.models.loading import pick_device

        sizes = model_sizes(model)
        steps = [step for step in (*_STEPS, _LARGEST_STEP) if step >= batch]
        small = [step for step in steps if sizes.workspace(step) <= _WORKSPACE_SHARE * budgets.device_bytes]
        self.step_tokens = max(small, default=max(batch, _STEPS[0]))
        self.workload = workload
        self.measured_tokens = workload.prompt_tokens
        self._token_s = self._step_s = 0.0
        self._layers = len(sizes.layers)
        self._slot = sizes.slot
        tokens = batch * _whole_blocks(workload.prompt_tokens + workload.answer_tokens)
        # Beside layers and their buffers.
        others = sizes.outside + tokens * sizes.kv_token + sizes.workspace(self.step_tokens)
        self._device_room = budgets.device_bytes - others
        self._host_room = budgets.host_bytes
        self.from_host = pick_device(device).type == "cuda"
        self._random = Random(seed)
        self._vocabulary = range(100, 256)
        self._salts = count()
        prompts = _cut(min(self.step_tokens, batch * workload.prompt_tokens), workload.prompt_tokens)
        request = _whole_blocks(workload.prompt_tokens + workload.answer_tokens)
        self._engine = TieredEngine.load(
            model,
            EngineSettings(
                device=device,
                device_bytes=budgets.device_bytes,
                # Host memory is for layers alone, where they are placed there.
                host_bytes=0,
                # Of the largest step that is measured: each block of it is written before.
                device_tokens=min(tokens, max(request, sum(_whole_blocks(each + 1) for each in prompts))),
                max_model_len=workload.prompt_tokens + workload.answer_tokens,
                max_requests=batch,
                max_batch_tokens=self.step_tokens,
            ),
        )
        try:
            self.place(self._layers, 0)
            # Writes every block of the pool, so that it counts as memory in use before a step is measured.
            self._engine.forget_device()
            self._timed([min(_STEPS[0], workload.prompt_tokens)], 1)
            staging = STAGES * sizes.slot if self.from_host else 0
            self.sizes = sizes.model_copy(
                update={"step_bytes": self._measure_steps(batch, limit_s, progress), "row_bytes": 0, "staging": staging}
            )
            self._engine.resize(device_tokens=tokens)
        except BaseException:
            self._engine.close()
            raise

    def place(self, device_layers: int, host_layers: int) -> bool:
        from ragorder.kernels.offload.residency import LayerTiers
        from ragorder.trie.residency.base import TierLevel

        buffers = 1 if device_layers < self._layers else 0
        needed = (device_layers + buffers) * self._slot
        # A machine short of memory ends processes instead of refusing it.
        if (device_layers and needed > self._device_room) or host_layers * self._slot > self._host_room:
            return False
        reached = self._engine.move_layers(LayerTiers.spread(self._layers, device_layers, host_layers))
        return bool((reached.count(TierLevel.DEVICE), reached.count(TierLevel.HOST)) == (device_layers, host_layers))

    def shorten(self, batches: Sequence[int], limit_s: float) -> None:
        """Compute only as much of the prompts as lets these batches end in about `limit_s`."""
        tokens = sum(batches) * self.workload.prompt_tokens
        steps = sum(-(-batch * self.workload.prompt_tokens // self.step_tokens) + _DECODED for batch in batches)
        share = min(1.0, max(0.0, limit_s) / (tokens * self._token_s + steps * self._step_s))
        least = min(_STEPS[0], self.workload.prompt_tokens)
        self.measured_tokens = max(least, int(share * self.workload.prompt_tokens))

    def generation_s(self, batch: int) -> float:
        """Return a batch's seconds from those of its first steps: those of a prefill in proportion to its tokens, and a
        step for each further token. Raises RuntimeError if a request fails."""
        prompt, answer = self.workload.prompt_tokens, self.workload.answer_tokens
        prefills = -(-batch * self.measured_tokens // self.step_tokens)
        measured = min(answer, prefills + _DECODED)
        times, begun, ended = [0.0], dict[int, int](), dict[int, int]()
        ids = [self._engine.add(each) for each in self._requests([self.measured_tokens] * batch, measured)]
        start = time.perf_counter()
        while len(ended) < len(ids):
            updates = self._engine.step()
            times.append(time.perf_counter() - start)
            for update in updates:
                if update.token_ids:
                    begun.setdefault(update.request_id, len(times) - 1)
                if update.completion is not None:
                    _check([update.completion])
                    ended[update.request_id] = len(times) - 1
        # From here on until the first request ends, a step computes a token of each.
        prefilled, decoded = max(begun.values()), max(max(begun.values()), min(ended.values()))
        if measured == answer or decoded == prefilled:
            return times[prefilled] * prompt / self.measured_tokens + times[-1] - times[prefilled]
        step_s = (times[decoded] - times[prefilled]) / (decoded - prefilled)
        return times[prefilled] * prompt / self.measured_tokens + (answer - 1) * step_s

    def close(self) -> None:
        self._engine.close()

    def _timed(self, prompts: Sequence[int], answer: int) -> float:
        requests = self._requests(prompts, answer)
        start = time.perf_counter()
        completions = self._engine.generate(requests)
        seconds = time.perf_counter() - start
        _check(completions)
        return seconds

    def _requests(self, prompts: Sequence[int], answer: int) -> list[Request]:
        from ragorder.kernels.engine import Request, Sampling

        # Random tokens under a salt of their own: nothing of them is cached.
        salt = f"placement-{next(self._salts)}"
        return [
            Request(self._random.choices(self._vocabulary, k=tokens), (), Sampling(answer, ignore_eos=True), salt)
            for tokens in prompts
        ]

    def _measure_steps(self, batch: int, limit_s: float, progress: Progress) -> Curve:
        """Return a prefill's peak bytes by its tokens, for at most about `limit_s`."""
        points: list[tuple[int, int]] = []
        largest = min(self.step_tokens, batch * self.workload.prompt_tokens)
        steps = [*(each for each in _STEPS if each < largest), largest]
        advance, taken_s, last_s = progress("workspace of steps", len(steps)), 0.0, 0.0
        for step in steps:
            # Between two points the workspace is linear, and so it is beyond the last one.
            if len(points) >= 2 and taken_s + last_s * step / points[-1][0] > limit_s:
                break
            prompts = _cut(step, self.workload.prompt_tokens)
            memory = MemoryPeak(cuda=self.from_host)
            last_s = self._timed(prompts, 1)
            taken_s += last_s
            self._step_s = self._step_s or last_s
            self._token_s = last_s / step
            points.append((step, max(memory.taken(), points[-1][1] if points else 1)))
            advance()
        return tuple(points)


class PlacedIndex:
    """A FAISS index whose partitions are resident as told, within `host_bytes`. Raises ImportError without FAISS,
    OSError, ValueError and TypeError for a file that is no IVF index."""

    def __init__(self, path: Path, partitions: int, host_bytes: int, *, queries: int, seed: int = 0) -> None:
        with needs("retrieval", "ragorder profile --placement --index"):
            import faiss
            import numpy as np

            from ragorder.pipelining.batching.partitioned import PartitionedSearch

        self.sizes: IndexSizes = index_sizes(path, partitions)
        if not self.sizes.partitions:
            raise ValueError(f"{path} is no IVF index, and is in memory as a whole: leave out --index")
        self._host_bytes = host_bytes
        self._search = PartitionedSearch(path, len(self.sizes.partitions))
        dimension = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY).d
        self._queries = np.random.default_rng(seed).standard_normal((queries, dimension), dtype=np.float32)

    def retrieval_s(self, partitions: int) -> float | None:
        sizes = self.sizes
        if sizes.fixed + sizes.resident(partitions) + sizes.reading(partitions) > self._host_bytes:
            return None
        try:
            self._search.resize(partitions)
            # Partitions become resident as a search reads them.
            self._pass()
            return self._pass()
        except MemoryError:
            return None

    def close(self) -> None:
        self._search.close()

    def _pass(self) -> float:
        start = time.perf_counter()
        for _ in self._search.search(self._queries, _RESULTS):
            pass
        return time.perf_counter() - start


class PlacedSystem:
    """A `PlacedEngine` with or without a `PlacedIndex`, for `measure_placement`. To be closed."""

    def __init__(
        self,
        model: Path,
        index: Path | None,
        budgets: Budgets,
        workload: Workload,
        *,
        batch: int,
        partitions: int = 32,
        seed: int = 0,
        limit_s: float = math.inf,
        progress: Progress = silent,
    ) -> None:
        """The workspace is measured for at most `limit_s`."""
        with ExitStack() as opened:
            self._index = (
                None if index is None else PlacedIndex(index, partitions, budgets.host_bytes, queries=batch, seed=seed)
            )
            if self._index is not None:
                opened.callback(self._index.close)
            self.engine = PlacedEngine(
                model, budgets, workload, batch=batch, seed=seed, limit_s=limit_s, progress=progress
            )
            opened.callback(self.engine.close)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def model(self) -> ModelSizes:
        return self.engine.sizes

    @property
    def index(self) -> IndexSizes:
        return NO_INDEX if self._index is None else self._index.sizes

    def place(self, device_layers: int, host_layers: int) -> bool:
        return self.engine.place(device_layers, host_layers)

    def generation_s(self, batch: int) -> float:
        return self.engine.generation_s(batch)

    def retrieval_s(self, partitions: int) -> float | None:
        return None if self._index is None else self._index.retrieval_s(partitions)

    def facts(self) -> dict[str, Any]:
        return {"environment": describe_environment(), "weights": format_bytes(self.model.weights)}


class MemoryPeak:
    """Peak of the memory in use from now on, of the process or the GPU."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._before: int
        if cuda:
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            # What the allocator keeps of freed memory would be taken without a trace.
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            # Linux resets the peak of the process's memory (proc(5)).
            Path("/proc/self/clear_refs").write_text("5", "ascii")
            self._before = _status("VmRSS")

    def taken(self) -> int:
        """Bytes above those in use at the beginning."""
        if self._cuda:
            import torch

            return int(torch.cuda.max_memory_allocated()) - self._before
        return _status("VmHWM") - self._before


def _status(name: str) -> int:
    lines: Iterator[str] = iter(Path("/proc/self/status").read_text("ascii").splitlines())
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _check(completions: Sequence[Completion]) -> None:
    failed = next((each for each in completions if each.error is not None), None)
    if failed is not None:
        raise RuntimeError(f"a request failed: {failed.error}")


def _cut(tokens: int, longest: int) -> list[int]:
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + ([rest] if rest else [])


def _whole_blocks(tokens: int) -> int:
    return (-(-tokens // _BLOCK) + 1) * _BLOCK
