"""A GPU day: the suites of kind "gpu-day", whose parts are measured by the experiments of other suites."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.kernels.gpu_day.parts import PARTS
from ragorder.benchmarks.kernels.gpu_day.record import GpuDayCell, GpuDayRecord
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.running.progress import silent
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite, experiment_of

if TYPE_CHECKING:
    from ragorder.benchmarks.kernels.gpu_day.clock import DayClock

__all__ = ["GpuDay"]

_FAILURES = (EngineError, ImportError, OSError, RuntimeError, ValueError)
"""What one part cannot do, such as want of memory, is no end of the others."""

_NO_GPU = "a GPU day needs a CUDA device, and there is none here: --set small=true checks it on the CPU"


class GpuDay(Experiment):
    kind = "gpu-day"
    record = GpuDayRecord
    cell = GpuDayCell
    policies: ClassVar[Any] = tuple(PARTS)
    unit = "parts"
    one_job = True

    def obstacle(self, suite: Suite, cell: GpuDayCell, policy: str) -> str | None:
        lacking = lacks_torch()
        if lacking is not None or cell.small:
            return lacking
        import torch

        return None if torch.cuda.is_available() else _NO_GPU

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        from ragorder.benchmarks.kernels.gpu_day.clock import DayClock

        clock = DayClock(job.cell)
        for part in PARTS:
            clock.spent_s[part] = self._spent(job, part)
        for part in job.policies:
            if clock.has_time(part):
                yield from self._measure_part(job, part, clock)
                _free_memory()
            advance()

    def _spent(self, job: Job, part: str) -> list[float]:
        """Seconds of each job of earlier calls."""
        found: list[float] = []
        key = {"suite": job.suite.name, "cell": job.cell.fields, "seed": job.seed}
        while (line := self.store.find("gpu-day", **key, policy=_job_name(part, len(found)))) is not None:
            found += line["rows"]["seconds"]
        return found

    def _measure_part(self, job: Job, part: str, clock: DayClock) -> Iterator[Line | Missing]:
        small = job.cell.small
        suite = PARTS[part].of_suite(small=small)
        options = PARTS[part].options(self.options, small=small)
        experiment = experiment_of(suite.kind)(options, self.store, self.session, self.progress)
        planned = list(experiment.plan(suite))
        yield from (each for each in planned if isinstance(each, Missing))
        todo = experiment.in_order([each for each in planned if isinstance(each, Job)])
        left, failed = len(todo), False
        began = clock.now()
        try:
            with experiment:
                for each in todo:
                    if clock.ended(part) or not clock.has_time(part):
                        break
                    try:
                        for found in experiment.measure(each, silent("", 0)):
                            yield found if isinstance(found, Missing) or "type" in found else self._line(each, found)
                        left -= 1
                    except _FAILURES as error:
                        failed = True
                        yield Missing(suite.name, each.cell.fields, f"{part} of a GPU day", _words(error))
                    yield self._job(job, part, clock, began)
                    began = clock.now()
        except _FAILURES as error:
            # At its beginning or end: results that are wrong, say.
            failed = True
            yield Missing(job.suite.name, job.cell.fields, part, _words(error))
            yield self._job(job, part, clock, began)
        if clock.ended(part) or not (left or failed):
            facts = {"part": part, "suite": suite.name, "left": left, "device": _device()}
            yield {"policy": part, "facts": facts, "rows": {"seconds": clock.spent_s[part]}}

    def _job(self, job: Job, part: str, clock: DayClock, began: float) -> Line:
        name = _job_name(part, len(clock.spent_s[part]))
        clock.took(part, round(clock.now() - began, 3))
        return {"policy": name, "facts": {"part": part}, "rows": {"seconds": clock.spent_s[part][-1:]}}

    def _line(self, job: Job, found: Line) -> Line:
        """As the session would write it, if the suite were run by itself."""
        record = experiment_of(job.suite.kind).record
        named = {"session": self.session, "suite": job.suite.name, "cell": job.cell.fields, "seed": job.seed}
        kind = record.model_fields["type"].default
        return record.model_validate({"type": kind, **named, **found}).line()


def _job_name(part: str, number: int) -> str:
    return f"{part}, job {number + 1}"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _device() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "a CPU"


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
