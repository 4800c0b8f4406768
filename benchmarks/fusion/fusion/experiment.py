"""Answers from reused KV, and the models that give them: the suites of kinds "fusion" and "fusion-training"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.fusion.fusion.arms import ARMS
from ragorder.benchmarks.fusion.fusion.cells import FusionCell, TrainingCell
from ragorder.benchmarks.fusion.fusion.checkpoints import SHIPPED, checkpoint, earlier
from ragorder.benchmarks.fusion.fusion.record import FusionRecord, TrainingRecord
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import need_torch
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.fusion.fusion.curves import Measured

__all__ = ["Fusion", "FusionTraining"]

_QUESTIONS_SEED = 1_000
"""Questions of seed 0; no model was trained with it."""


class Fusion(Experiment):
    kind = "fusion"
    record = FusionRecord
    cell = FusionCell
    policies: ClassVar[Any] = tuple(ARMS)
    unit = "questions"
    one_job = True

    def plan(self, suite: Suite) -> Iterator[Job | Missing]:
        for cell in suite.cells:
            yield from (
                Missing(suite.name, cell.fields, f"seed {seed}", _untrained(cell, seed))
                for seed in self.options.seeds
                if not _path(cell, seed).is_file()
            )
        yield from super().plan(suite)

    def seeds(self, cell: FusionCell) -> Sequence[int]:
        return [seed for seed in super().seeds(cell) if _path(cell, seed).is_file()]

    def obstacle(self, suite: Suite, cell: FusionCell, policy: str) -> str | None:
        if cell.by == "engine" and not ARMS[policy].on_engine:
            return "by = engine has no preprocessed copies: take by = reference"
        return _no_torch()

    def steps(self, job: Job) -> int:
        return job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.fusion.fusion.curves import measure_curves
        from ragorder.benchmarks.fusion.fusion.model import ChainModel
        from ragorder.benchmarks.fusion.fusion.questions import draw_questions
        from ragorder.benchmarks.fusion.fusion.served import measure_on_engine
        from ragorder.benchmarks.fusion.fusion.task import Level
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: FusionCell = job.cell
        level, seed = Level(cell.hops, cell.documents), _QUESTIONS_SEED + job.seed
        arms = {name: ARMS[name] for name in job.policies}
        with threads(1):
            model = ChainModel.load(_path(cell, job.seed))
            questions = draw_questions(job.requests, level, cell.order, seed, cell.topic)
            found: Mapping[str, Measured]
            if cell.by == "engine":
                found = measure_on_engine(model, questions, arms, idle_layers=cell.idle_layers, advance=advance)
            else:
                found = measure_curves(model, questions, arms, neighbours=cell.neighbours, seed=seed, advance=advance)
        for name, measured in found.items():
            facts: dict[str, Any] = {
                "exact": arms[name].exact,
                "tokens": level.tokens,
                "answer_tokens": level.answer_tokens,
                "retrieved": round(questions.retrieved_together(cell.neighbours), 4),
            }
            facts |= measured.facts
            engine = {"name": "torch" if cell.by == "engine" else cell.by, "model": "chains"}
            yield {
                "policy": name,
                "engine": engine,
                "load_average": load_average(),
                "facts": facts,
                "rows": measured.rows,
            }


class FusionTraining(Experiment):
    kind = "fusion-training"
    record = TrainingRecord
    cell = TrainingCell
    policies: ClassVar[Any] = ("training",)

    def obstacle(self, suite: Suite, cell: TrainingCell, policy: str) -> str | None:
        return _no_torch()

    def steps(self, job: Job) -> int:
        return 0

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        from ragorder.benchmarks.fusion.fusion.history import History
        from ragorder.benchmarks.fusion.fusion.model import ChainModel
        from ragorder.benchmarks.fusion.fusion.training import remaining, train
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: TrainingCell = job.cell
        found = earlier(cell.start, cell.hops, job.seed) if cell.start is not None else None
        if cell.start is not None and found is None:
            why = f"no model of seed {job.seed} in {cell.start}: give a folder of suite fusion-training, or shipped"
            yield Missing(job.suite.name, cell.fields, f"seed {job.seed}", why)
            return
        known, start = (found[0], ChainModel.load(found[1])) if found is not None else (None, None)
        stages = remaining(cell.hops, known)
        path, history, load = checkpoint(self.store.folder, cell.hops, job.seed), History(), load_average()
        advance = self.progress(f"steps, seed {job.seed}", sum(stage.steps for stage in stages))
        with threads(1):
            for model in train(job.seed, stages, history.take(advance), start):
                # Whatever stage is interrupted, the model of the last one remains.
                model.save(path)
        history.close()
        yield {
            "policy": "training",
            "engine": {"name": "torch", "model": "chains"},
            "load_average": load,
            "facts": {"bytes": path.stat().st_size, "steps": history.steps},
            "rows": history.rows,
        }


def _no_torch() -> str | None:
    try:
        need_torch()
    except ImportError as error:
        return str(error)
    return None


def _untrained(cell: FusionCell, seed: int) -> str:
    train = f"ragorder eval run fusion-training --set hops={cell.hops} --seeds {seed} -o DIR"
    return f"no model of seed {seed} in {_folder(cell)}: {train}, then --set models=DIR"


def _folder(cell: FusionCell) -> Path:
    return cell.folder or SHIPPED


def _path(cell: FusionCell, seed: int) -> Path:
    return checkpoint(_folder(cell), cell.hops, seed)
