"""Answers by the place of what they need: the suites of kind "quality-positions"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ragorder.benchmarks.fusion.fusion.checkpoints import SHIPPED, checkpoint
from ragorder.benchmarks.fusion.quality_positions.record import PositionsCell, PositionsRecord
from ragorder.eval.engines.torch import need_torch
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.eval.suites.quality.orders import Order, QualityError

__all__ = ["QualityPositions"]

_STREAM_SEED = 2_000
"""Requests of seed 0; no model was trained with it."""

_HOPS = 2


class QualityPositions(Experiment):
    kind = "quality-positions"
    record = PositionsRecord
    cell = PositionsCell
    one_job = True

    @classmethod
    def check(cls, suite: Suite, where: str) -> None:
        super().check(suite, where)
        for policy in suite.policies:
            try:
                order = Order.parse(policy)
            except QualityError as error:
                raise SuiteError(f"{where}: {error}") from None
            if order.fused or order.state_ranking:
                raise SuiteError(f"{where}: {policy!r}: the model reads documents alone, and all of them again")

    def plan(self, suite: Suite) -> Iterator[Job | Missing]:
        for cell in suite.cells:
            for seed in self.options.seeds:
                if not _path(cell, seed).is_file():
                    train = f"ragorder eval run fusion-training --seeds {seed} -o DIR"
                    why = f"no model of seed {seed} in {_path(cell, seed).parent}: {train}, then --set models=DIR"
                    yield Missing(suite.name, cell.fields, f"seed {seed}", why)
        yield from super().plan(suite)

    def seeds(self, cell: PositionsCell) -> Sequence[int]:
        return [seed for seed in super().seeds(cell) if _path(cell, seed).is_file()]

    def obstacle(self, suite: Suite, cell: PositionsCell, policy: str) -> str | None:
        try:
            need_torch()
        except ImportError as error:
            return str(error)
        return super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.fusion.fusion.model import ChainModel
        from ragorder.benchmarks.fusion.quality_positions.measuring import Answers, order_stream, rows_of
        from ragorder.benchmarks.fusion.quality_positions.stream import draw_stream
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: PositionsCell = job.cell
        with threads(1):
            stream = draw_stream(job.requests, cell.task, cell.documents, _STREAM_SEED + job.seed)
            answers = Answers(ChainModel.load(_path(cell, job.seed)), stream)
            for policy in job.policies:
                orders = order_stream(stream, policy, cell.capacity_tokens, job.seed)
                rows = rows_of(stream, orders, answers, advance)
                yield {"policy": policy, "engine": {"name": "sim", "model": "chains"}, "rows": rows}


def _path(cell: PositionsCell, seed: int) -> Path:
    return checkpoint(cell.folder or SHIPPED, _HOPS, seed)
