"""Training of the toy models that suite quality-positions asks (suite toy-training)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.fusion.toy.weights import checkpoint
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.lines import draw_lines
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite


class TrainingCell(SuiteCell):
    """Models differ by their seed alone."""


class ToyTraining(Experiment):
    """Columns: processor time, tokens, documents, right predictions by kind. Fact `bytes`: of the file."""

    kind = "toy-training"
    cell = TrainingCell
    columns = ("seconds", "tokens", "documents")
    facts = ("bytes", "steps")
    policies: ClassVar[Any] = ("training",)

    def obstacle(self, suite: Suite, cell: TrainingCell, policy: str) -> str | None:
        return lacks_torch()

    def steps(self, job: Job) -> int:
        return 0

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.fusion.toy.training import CURRICULUM, History, train
        from ragorder.benchmarks.kernels.embedded.models import threads

        path, history, load = checkpoint(self.store.folder, job.seed), History(), load_average()
        advance = self.progress(f"steps, seed {job.seed}", sum(stage.steps for stage in CURRICULUM))
        with threads(1):
            for model in train(job.seed, CURRICULUM, history.take(advance)):
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


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(ToyTraining.record, suite.name))
    return Part([*map(_table, groups)], pictures=lambda: [*map(_picture, groups)])


def _table(group: RecordGroup[Record]) -> Table:
    kinds = ("one hop", "two hops", "link")
    table = Table(
        "Right predictions at the end of training, %", ["seed", *kinds, "steps", "million tokens", "CPU s", "kB"]
    )
    for line in group.runs():
        last = {name: column[-1] for name, column in line.rows.items()}
        shares = [last[kind] for kind in kinds]
        table.add(
            str(line.seed),
            *(format_number(None if share is None else 100 * share) for share in shares),
            format_number(line.facts["steps"], 0),
            format_number((last["tokens"] or 0) / 1e6),
            format_number(last["seconds"], 0),
            format_number(line.facts["bytes"] / 1e3, 0),
        )
    return table


def _picture(group: RecordGroup[Record]) -> Picture:
    lines = group.runs()
    points = {}
    for line in lines:
        known = zip(line.rows["seconds"], line.rows["two hops"], strict=True)
        points[f"seed {line.seed}"] = [(at_s, share) for at_s, share in known if None not in (at_s, share)]
    alt = "; ".join(f"seed {line.seed}: {format_number(line.rows['seconds'][-1], 0)} s" for line in lines)
    caption = "More documents as soon as fewer are learnt."
    return draw_lines("Training", points, "processor time, s", "two hops, share right", alt=alt, caption=caption)
