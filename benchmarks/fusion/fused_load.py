"""Requests that wait for the same documents, by what they reuse (suite fused-load)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from ragorder.benchmarks.kernels.embedded.models import SHAPES, hardware, threads
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.torch import TorchModel, lacks_torch
from ragorder.eval.report.declared import Column, TableForm, figure, policy_column, ratio
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

if TYPE_CHECKING:
    from ragorder.kernels.engine import Request, TieredEngine


@dataclass(frozen=True, slots=True)
class Way:
    """What requests reuse: nothing, KV after exactly the same documents, or with a share recomputed any KV."""

    reuses: bool = True
    shuffled: bool = True
    recompute: float | None = None


FULL = "full attention"
WAYS = {
    FULL: Way(reuses=False),
    "exact, any order": Way(),
    "exact, one order": Way(shuffled=False),
    "fused, 15 %": Way(recompute=0.15),
    "fused, 5 %": Way(recompute=0.05),
}


class LoadCell(SuiteCell):
    """`waiting` requests for all of `documents` and a question, on an engine with a pool of `device_tokens`."""

    waiting: int = Field(24, ge=1)
    device_tokens: int = Field(4096, ge=16)
    documents: int = Field(10, ge=1)
    document_tokens: int = Field(96, ge=1)
    system_tokens: int = Field(16, ge=1)
    question_tokens: int = Field(16, ge=1)
    output_tokens: int = Field(16, ge=1)
    shape: Annotated[str, one_of("shape", SHAPES)] = "narrow"


def _speed(run: Record) -> float:
    return 1 / float(run.facts["cpu_s"])


class FusedLoad(Experiment):
    """Facts: the `most` requests at once, `steps`, those `preempted`, seconds of the processor (`cpu_s`) and of the
    clock (`wall_s`) from the first step to the last answer, and requests a second (`rate`)."""

    kind = "fused-load"
    cell = LoadCell
    facts = ("most", "steps", "preempted", "cpu_s", "wall_s", "rate")
    policies: ClassVar[Any] = tuple(WAYS)
    counts = "policies"
    unit = "runs"
    one_job = True
    tables: ClassVar[Any] = [
        TableForm(
            "{cell.waiting} waiting requests for {cell.documents} documents, on {cell.shape}",
            [
                Column("pool, tokens", lambda row: f"{row.cell.device_tokens:,}"),
                policy_column("documents reused"),
                figure("most at once", "most", 0, spread=True),
                figure("steps", "steps", 0, spread=True),
                figure("processor seconds", "cpu_s", 2, spread=True),
                figure("requests a second", "rate", spread=True),
                ratio("times full attention's, by processor time", _speed, FULL),
            ],
            note="Mean of {seeds} seeds (in brackets their range). Documents have {cell.document_tokens} tokens, "
            "answers {cell.output_tokens}.",
            labels=2,
            by=("shape", "waiting"),
            sort=("waiting", "device_tokens"),
            policies=tuple(WAYS),
        )
    ]

    def obstacle(self, suite: Suite, cell: LoadCell, policy: str) -> str | None:
        return lacks_torch() or SHAPES[cell.shape].obstacle or super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: LoadCell = job.cell
        model = self.kept(cell.shape, SHAPES[cell.shape].make)
        engine = {"name": "torch", "model": cell.shape, "hardware": hardware()}
        for name in job.policies:
            with threads(1):
                facts = serve(model, cell, WAYS[name], job.seed)
            yield {"policy": name, "engine": engine, "rows": {}, "facts": facts}
            advance()


def serve(model: TorchModel, cell: LoadCell, way: Way, seed: int) -> dict[str, float]:
    """Return the facts of a record. Raises EngineError if an answer is not whole."""
    from ragorder.kernels.engine import EngineSettings, Fusion, TieredEngine

    settings = EngineSettings(
        reuse="exact" if way.recompute is None else "fused",
        device_tokens=cell.device_tokens,
        max_requests=cell.waiting,
        host_bytes=0,
        replicate_nodes=0,
        verify=False,
    )
    fusion = None if way.recompute is None else Fusion(way.recompute)
    prompts = _Prompts(cell, model.vocabulary, seed)
    with closing(TieredEngine(model.model, settings=settings)) as engine:
        if way.reuses:
            engine.generate(list(prompts.first(shuffled=way.shuffled)))
        for number, request in enumerate(prompts.waiting(shuffled=way.shuffled, fusion=fusion)):
            # Of tenants of their own nothing is found.
            engine.add(request if way.reuses else replace(request, salt=f"request {number}"))
        return _facts(engine, cell)


def _facts(engine: TieredEngine, cell: LoadCell) -> dict[str, float]:
    before, most, answered = engine.stats(), 0, 0
    wall, cpu = time.perf_counter(), time.process_time()
    while engine.has_unfinished:
        ended = [update.completion for update in engine.step() if update.completion is not None]
        most = max(most, engine.stats().running + len(ended))
        answered += sum(len(each.token_ids) == cell.output_tokens for each in ended)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    if answered != cell.waiting:
        raise EngineError(f"{cell.waiting - answered} of {cell.waiting} requests have no whole answer")
    after = engine.stats()
    return {
        "most": most,
        "steps": after.steps - before.steps,
        "preempted": after.preemptions,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "rate": cell.waiting / wall_s,
    }


class _Prompts:
    """Random tokens, the same for one seed."""

    def __init__(self, cell: LoadCell, vocabulary: int, seed: int) -> None:
        self._cell, self._tokens = cell, range(vocabulary)
        self._random = random = Random(seed)
        self._system = self._draw(cell.system_tokens)
        self._documents = [self._draw(cell.document_tokens) for _ in range(cell.documents)]
        every = range(cell.documents)
        self._asked = [
            (random.sample(every, cell.documents), self._draw(cell.question_tokens)) for _ in range(cell.waiting)
        ]

    def first(self, *, shuffled: bool) -> Iterator[Request]:
        """Yield requests after which all documents have KV: each alone, or all in one order."""
        every = range(self._cell.documents)
        for documents in [[each] for each in every] if shuffled else [every]:
            yield self._request(documents, [0], output_tokens=1)

    def waiting(self, *, shuffled: bool, **options: Any) -> Iterator[Request]:
        for order, question in self._asked:
            yield self._request(order if shuffled else sorted(order), question, self._cell.output_tokens, **options)

    def _request(
        self, documents: Sequence[int], question: Sequence[int], output_tokens: int, **options: Any
    ) -> Request:
        from ragorder.kernels.engine import Request, Sampling

        parts = [self._system, *(self._documents[each] for each in documents)]
        _, *ends = accumulate(map(len, parts))
        tokens = [token for part in (*parts, question) for token in part]
        sampling = Sampling(max_tokens=output_tokens, ignore_eos=True)
        return Request(tokens, ends, sampling, prefix_tokens=self._cell.system_tokens, **options)

    def _draw(self, tokens: int) -> list[int]:
        return self._random.choices(self._tokens, k=tokens)
