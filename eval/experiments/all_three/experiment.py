"""All three systems together, in real time: the suites of kind "all-three"."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ragorder.common.extras import install_hint
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.experiments.all_three.record import AllThreeCell, AllThreeRecord
from ragorder.eval.experiments.all_three.systems import SYSTEMS
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["AllThree"]


class AllThree(Experiment):
    kind = "all-three"
    record = AllThreeRecord
    cell = AllThreeCell
    policies: ClassVar[Any] = tuple(SYSTEMS)
    one_job = True
    unit = "runs"

    def obstacle(self, suite: Suite, cell: AllThreeCell, policy: str) -> str | None:
        if find_spec("faiss") is None:
            return f"searches need faiss: {install_hint('retrieval')}"
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.eval.experiments.all_three.measuring import serve
        from ragorder.eval.experiments.all_three.model import save_model
        from ragorder.eval.experiments.all_three.questions import draw_two_hops
        from ragorder.eval.experiments.embedded.clocks import threads

        cell: AllThreeCell = job.cell
        questions = draw_two_hops(job.requests, job.seed)
        index = questions.index(cell.vectors, cell.clusters, cell.nprobe)
        at_s = [arrival.at_s for arrival in poisson_arrivals(cell.rate, job.requests, job.seed)]
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), cell.idle_layers, job.seed)
            for policy in job.policies:
                load = load_average()
                with threads(1):
                    found = asyncio.run(serve(SYSTEMS[policy], cell, Path(folder), questions, index, at_s))
                yield {"policy": policy, "engine": {"name": "torch"}, "load_average": load, **found}
                advance()
