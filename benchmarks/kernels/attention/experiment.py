"""Attention kernels against one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar

from ragorder.benchmarks.kernels.attention.cells import TOLERANCE, AttentionCell, AttentionRecord
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

__all__ = ["Attention"]

_NO_GPU = "times need a GPU, and there is none here: attention-check checks results without one"


class Attention(Experiment):
    kind = "attention"
    record = AttentionRecord
    cell = AttentionCell
    policies: ClassVar[Any] = (
        "triton",
        "triton unsplit",
        "torch",
        "sdpa + mask",
        "flash",
        "flash + gather",
        "cudnn",
        "flex",
        "flex + mask",
    )
    unit = "shapes"
    one_job = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._checked = self._wrong = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        if error is None and self._wrong:
            raise EngineError(f"{self._wrong} of {self._checked} results are wrong: see the report")

    def obstacle(self, suite: Suite, cell: AttentionCell, policy: str) -> str | None:
        lacking = lacks_torch()
        if lacking is not None:
            return lacking
        import torch

        return _NO_GPU if cell.timed and not torch.cuda.is_available() else None

    def missing(self, suite: Suite, cell: AttentionCell, policy: str, reason: str) -> Missing | None:
        return Missing(suite.name, {}, policy, reason)

    def steps(self, job: Job) -> int:
        return 1

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        import torch

        from ragorder.benchmarks.kernels.attention.contenders import AttentionShape, MissingError
        from ragorder.benchmarks.kernels.attention.measuring import measure, splits_of

        cell: AttentionCell = job.cell
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shape = AttentionShape(**cell.shape)
        engine = {
            "name": "attention",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        }
        facts = {"flops": shape.flops, "bytes": shape.bytes, "splits": splits_of(shape, device)}
        repeats = cell.repeats if cell.timed else 0
        for name, found in measure(shape, job.policies, device=device, repeats=repeats, seed=job.seed):
            if isinstance(found, MissingError):
                yield Missing(job.suite.name, {}, name, str(found))
                continue
            error, ms = found
            self._checked += 1
            self._wrong += error > TOLERANCE[cell.dtype]
            yield {"policy": name, "engine": engine, "facts": {**facts, "error": error}, "rows": {"ms": ms}}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        advance()
