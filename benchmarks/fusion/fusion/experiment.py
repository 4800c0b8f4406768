"""Answers of a toy model from reused KV, by what is recomputed (FusionRAG Figure 13), and the training of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.benchmarks.fusion.fusion.cells import CORPUS_DOCUMENTS, SHIPPED, Arm, OfTrainedModels, Order, checkpoint
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.fusion.fusion.prompts import Measured

_DEVIATING = (0.0, 0.05)
BASELINE, REUSE = "full attention", "full reuse"
NEIGHBOURS = 4
"""Similar documents of the corpus that preprocessing takes."""

ARMS: Mapping[str, Arm] = {
    BASELINE: Arm(ratios=(1.0,)),
    REUSE: Arm(ratios=(0.0,)),
    "random": Arm("random"),
    "EPIC": Arm("head"),
    "CacheBlend": Arm("deviation"),
    "Cache-Craft": Arm("inter", copies="served"),
    "FusionRAG, online only": Arm(),
    "FusionRAG": Arm(copies="similar"),
    "two rounds": Arm(rounds=2),
    "with ordering": Arm(exact=0.5),
    "FusionRAG, best first": Arm(copies="similar, best first", ratios=_DEVIATING),
    "behind those retrieved with it": Arm(copies="retrieved", ratios=_DEVIATING),
    "behind those in front of it": Arm(copies="in front", ratios=_DEVIATING),
}
"""By name: the systems of the paper's figures, ours, and copies to explain what preprocessing leaves."""


class FusionCell(SuiteCell):
    """Questions of `hops` on `documents`. In `order` a document that another one refers to stands before it, after it,
    or anywhere. `neighbours` are for preprocessing; `models` is a folder of suite
    fusion-training, instead of the models that come with ragorder; answers are `by` a reference in plain torch, or the
    embedded engine, compared with that. `idle_layers` change no answer, and give the engine's model the times of a
    larger one. `topic`: how many documents of a corpus refer only to each other, and are likelier to be retrieved
    together (0: references lead anywhere)."""

    hops: int = Field(2, ge=2, le=3)
    documents: int = Field(8, ge=2, le=24)
    order: Order = "in front"
    neighbours: int = Field(NEIGHBOURS, ge=0, le=23)
    models: str | None = None
    by: Literal["reference", "engine"] = "reference"
    idle_layers: int = Field(0, ge=0, le=64)
    topic: int = Field(0, ge=0, le=CORPUS_DOCUMENTS)

    @model_validator(mode="after")
    def _enough_documents(self) -> Self:
        if self.documents < self.hops:
            raise ValueError(f"documents = {self.documents} for {self.hops} hops: a question needs {self.hops}")
        if self.idle_layers and self.by != "engine":
            raise ValueError(f"idle_layers = {self.idle_layers} of the reference: they go with by = engine")
        if self.topic and (self.topic < self.hops or CORPUS_DOCUMENTS % self.topic):
            raise ValueError(f"topic = {self.topic}: give a divisor of {CORPUS_DOCUMENTS}, {self.hops} at least")
        return self


class TrainingCell(SuiteCell):
    """`start`: a folder of models ("shipped": ours) whose training goes on."""

    hops: Literal[2, 3] = 2
    start: str | None = None


def earlier(start: str, hops: int, seed: int) -> tuple[int, Path] | None:
    """Return the hops and the path of the model of the most hops, at most `hops`, in a folder or "shipped"."""
    folder = SHIPPED if start == "shipped" else Path(start)
    paths = ((known, checkpoint(folder, known, seed)) for known in range(hops, 1, -1))
    return next(((known, path) for known, path in paths if path.is_file()), None)


class FusionRecord(Record):
    """One way to reuse KV: columns by ratio, 1 where the answer is right, and "deviation", or by the engine "wall_ms"
    and "cpu_ms" by ratio. Facts: `exact`, the share of the
    documents in an exact prefix; `tokens` of all documents; `retrieved`, the share of their neighbours among them;
    their mean `deviation`, or by the engine how many answers were `compared` with the reference's, how many are
    `others`, and how far logits are `apart` at most."""

    called: ClassVar[str] = "a measurement of answers from reused KV"

    type: Literal["fusion"] = "fusion"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.ratios or len({len(column) for column in self.rows.values()}) != 1:
            raise ValueError("columns of different lengths, or none")
        if not {"exact", "tokens"} <= self.facts.keys():
            raise ValueError("facts are missing")
        return self

    @property
    def setting(self) -> FusionCell:
        return FusionCell.model_validate(self.cell)

    @property
    def ratios(self) -> list[float]:
        return [float(name) for name in self.rows if name[0].isdigit()]

    @property
    def requests(self) -> int:
        return len(next(iter(self.rows.values())))


_QUESTIONS_SEED = 1_000
"""Questions of seed 0; no model was trained with it."""


class Fusion(OfTrainedModels):
    kind = "fusion"
    record = FusionRecord
    cell = FusionCell
    policies: ClassVar[Any] = tuple(ARMS)
    unit = "questions"
    one_job = True

    def obstacle(self, suite: Suite, cell: FusionCell, policy: str) -> str | None:
        if cell.by == "engine" and not ARMS[policy].on_engine:
            return "by = engine has no preprocessed copies: take by = reference"
        return lacks_torch()

    def steps(self, job: Job) -> int:
        return job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.fusion.fusion.prompts import draw_questions, measure_curves
        from ragorder.benchmarks.fusion.fusion.served import measure_on_engine
        from ragorder.benchmarks.fusion.fusion.task import ChainModel, Level
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: FusionCell = job.cell
        level, seed = Level(cell.hops, cell.documents), _QUESTIONS_SEED + job.seed
        arms = {name: ARMS[name] for name in job.policies}
        with threads(1):
            model = ChainModel.load(self.model_of(cell, job.seed))
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
    """Columns: processor time, tokens, hops, documents, right predictions by kind. Fact `bytes`: of the file."""

    kind = "fusion-training"
    cell = TrainingCell
    columns = ("seconds", "tokens", "hops", "documents")
    facts = ("bytes", "steps")
    policies: ClassVar[Any] = ("training",)

    def obstacle(self, suite: Suite, cell: TrainingCell, policy: str) -> str | None:
        return lacks_torch()

    def steps(self, job: Job) -> int:
        return 0

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        from ragorder.benchmarks.fusion.fusion.task import ChainModel
        from ragorder.benchmarks.fusion.fusion.training import History, remaining, train
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
                # If a stage is interrupted, the model of the last one remains.
                model.save(path)
        history.close()
        yield {
            "policy": "training",
            "engine": {"name": "torch", "model": "chains"},
            "load_average": load,
            "facts": {"bytes": path.stat().st_size, "steps": history.steps},
            "rows": history.rows,
        }
