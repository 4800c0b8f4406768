"""Answers of a real model from reused KV: the suites of kind "fused-answers"."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from ragorder.benchmarks.fusion.fused_answers.record import AnswersRecord
from ragorder.benchmarks.fusion.fused_answers.ways import WAYS, AnswersCell
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import TorchModel, lacks_torch
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

__all__ = ["FusedAnswers"]

_NO_MODEL = "answers need a model in the embedded engine: give --engine torch --model smollm2, or another one"


class FusedAnswers(Experiment):
    kind = "fused-answers"
    record = AnswersRecord
    cell = AnswersCell
    policies: ClassVar[Any] = tuple(WAYS)
    unit = "questions"
    one_job = True

    def obstacle(self, suite: Suite, cell: AnswersCell, policy: str) -> str | None:
        if self.options.engine != "torch" or self.options.model is None:
            return _NO_MODEL
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        from ragorder.benchmarks.fusion.fused_answers.asking import Asking

        cell, corpus, name = job.cell, job.corpus, self.options.model
        assert corpus is not None and name is not None
        model = self.kept(name, lambda: TorchModel.load(name))
        asking = self.kept((name, cell), lambda: Asking(model, corpus, cell))
        places = [place for place, each in enumerate(corpus.rankings) if len(each) >= cell.documents]
        places = [place for place in places if corpus.questions[place].answers]
        # Each seed has questions of its own.
        random.Random(0).shuffle(places)
        places = places[job.seed * job.requests : (job.seed + 1) * job.requests]
        if not places:
            reason = f"{corpus.name} has no further questions with answers and {cell.documents} documents"
            yield from (Missing(job.suite.name, cell.fields, way, f"{reason}: give fewer") for way in job.policies)
            return
        engine = {"name": "torch", "model": Path(name).name, "dtype": str(model.model.dtype).removeprefix("torch.")}
        for way, rows in asking.ask(places, {each: WAYS[each] for each in job.policies}, advance).items():
            yield {"policy": way, "engine": engine, "load_average": load_average(), "rows": rows}
