"""The embedded engine by itself: prefills, fused prompts, and workloads with caches of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from ragorder.benchmarks.kernels.embedded.cells import EmbeddedCell
from ragorder.benchmarks.kernels.embedded.models import SHAPES, hardware, threads
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import TorchModel, lacks_torch
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

__all__ = ["Embedded", "EmbeddedRecord"]

_COLUMNS = ("wall_ms", "cpu_ms", "device", "host", "disk")


_SERVED = ("prompt_tokens", "hits", "retrieved")


_OTHER_ENGINE = "the embedded engine is measured by itself: run it without --engine"


class EmbeddedRecord(Record):
    """One arm: times and cached tokens of each repetition or request. `facts`: the `profile` that PGDSF had."""

    called: ClassVar[str] = "a measurement of the embedded engine"

    type: Literal["embedded"] = "embedded"

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return _COLUMNS + (_SERVED if self.setting.measure == "serving" else ())

    @property
    def setting(self) -> EmbeddedCell:
        return EmbeddedCell.model_validate(self.cell)

    @property
    def requests(self) -> int:
        return len(self.figures("wall_ms"))

    def figures(self, name: str) -> list[float]:
        """The figures after the warm-up."""
        values: list[float] = self.rows[name]
        return values[self.warmup :]


class Embedded(Experiment):
    kind = "embedded"
    record = EmbeddedRecord
    cell = EmbeddedCell
    one_job = True
    unit = "prompts"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._models: dict[str, TorchModel] = {}

    def asked(self, suite: Suite) -> Sequence[str]:
        arms = dict.fromkeys(arm for cell in suite.cells for arm in cell.arms)
        return [arm for arm in arms if self.options.policies is None or arm in self.options.policies]

    def obstacle(self, suite: Suite, cell: EmbeddedCell, policy: str) -> str | None:
        if self.options.engine not in ("sim", "torch"):
            return _OTHER_ENGINE
        return lacks_torch() or SHAPES[cell.shape].obstacle

    def applies(self, suite: Suite, cell: EmbeddedCell, policy: str) -> bool:
        return policy in cell.arms

    def steps(self, job: Job) -> int:
        cell: EmbeddedCell = job.cell
        if cell.measure == "serving":
            return job.requests * len(job.policies)
        return cell.repeats * len(cell.arms)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        cell: EmbeddedCell = job.cell
        with threads(cell.threads):
            if cell.shape not in self._models:
                self._models[cell.shape] = SHAPES[cell.shape].make()
            model = self._models[cell.shape]
            engine = {"name": "torch", "model": cell.shape, "block_size": cell.block_size, "hardware": hardware()}
            try:
                for arm, warmup, rows, facts in self._measure(job, model, advance):
                    rounded = {name: [round(value, 3) for value in values] for name, values in rows.items()}
                    line = {"policy": arm, "engine": engine, "warmup": warmup, "load_average": load_average()}
                    yield {**line, "facts": facts, "rows": rounded}
            except ValueError as error:
                # A workload that cannot be drawn so, or a prompt that is longer than the model's longest.
                yield from (Missing(job.suite.name, cell.fields, arm, str(error)) for arm in job.policies)

    def _measure(
        self, job: Job, model: TorchModel, advance: Callable[[], None]
    ) -> Iterator[tuple[str, int, dict[str, list[float]], dict[str, Any]]]:
        cell: EmbeddedCell = job.cell
        if cell.measure == "serving":
            from ragorder.benchmarks.kernels.embedded.serving import draw_trace, serve_trace

            trace = draw_trace(cell.workload, job.seed, job.requests, cell.top_k)
            # A shorter run has as large a share of warm-up.
            warmup = cell.warmup * job.requests // cell.requests
            for arm in job.policies:
                yield arm, warmup, *serve_trace(trace, cell, cell.setups[arm], model, job.seed, advance)
            return
        from ragorder.benchmarks.kernels.embedded.prefill import measure_prefill

        # All take turns, those too that have been measured: times of one cell are of one time.
        for arm, rows in measure_prefill(cell, model, job.seed, advance).items():
            if arm in job.policies:
                yield arm, 0, rows, {}
