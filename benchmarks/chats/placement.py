"""Where documents stand in a prompt (simulated)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ragorder.document import Document
from ragorder.eval.data.trace import TraceRequest, trace_of_workload
from ragorder.eval.data.workloads import WORKLOADS, make_workload
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.load import serve_in_turn
from ragorder.eval.running.options import SIM_LIKE
from ragorder.eval.running.policies import ORDERERS, make_policy
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.runner import Run
from ragorder.eval.running.suite import Experiment, Job, Line

PLACES = (
    "before the question",
    "labelled",
    "numbered by place",
    "numbered by rank",
    "after a date",
    "after the question",
)
_HEADER_TOKENS = 4
_DATE_TOKENS = 8
# Where the token ids of headers and dates begin; those of documents, system prompt and questions are elsewhere.
_HEADERS, _DATES = -2_000_000_000, -3_000_000_000


class PlacedPrompts:
    """Prompts with their documents at one of `PLACES`: a header has 4 tokens, a date 8."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._plain = NumberedPrompts()
        self._labels: dict[str, int] = {}
        self.prefix_tokens = self._plain.prefix_tokens
        self._headers = place in ("labelled", "numbered by place", "numbered by rank")

    def document_tokens(self, document: Document) -> int:
        return document.token_count + _HEADER_TOKENS * self._headers

    def suffix_tokens(self, request: TraceRequest) -> int:
        return self._plain.suffix_tokens(request)

    def token_ids(self, number: int, request: TraceRequest, documents: Sequence[Document]) -> array[int]:
        system, question = self._around(number, request)
        shown = array("q")
        for place, document in enumerate(documents):
            if self._headers:
                shown.extend(_run(_HEADERS, self._header(place, document, request), _HEADER_TOKENS))
            shown += self._alone(number, request, document)
        if self._place == "after a date":
            system.extend(_run(_DATES, number, _DATE_TOKENS))
        parts = (system, question, shown) if self._place == "after the question" else (system, shown, question)
        return sum(parts, array("q"))

    def _header(self, place: int, document: Document, request: TraceRequest) -> int:
        if self._place == "labelled":
            return self._labels.setdefault(document.key, len(self._labels))
        return place if self._place == "numbered by place" else request.documents.index(document)

    def _around(self, number: int, request: TraceRequest) -> tuple[array[int], array[int]]:
        ids = self._plain.token_ids(number, request, ())
        return ids[: self.prefix_tokens], ids[self.prefix_tokens :]

    def _alone(self, number: int, request: TraceRequest, document: Document) -> array[int]:
        ids = self._plain.token_ids(number, request, (document,))
        return ids[self.prefix_tokens : self.prefix_tokens + document.token_count]


def _run(first: int, number: int, tokens: int) -> range:
    return range(first + number * tokens, first + (number + 1) * tokens)


class PlacementCell(SuiteCell):
    """`documents`: where they stand, or what each begins with."""

    documents: Annotated[str, one_of("place", PLACES)] = "before the question"
    workload: Annotated[str, one_of("workload", WORKLOADS)] = "paper-shuf"
    capacity_tokens: int = Field(100_000, ge=1)
    block_size: int = Field(16, ge=1)


class Placement(Experiment):
    """Requests whose documents stand at one place."""

    kind = "placement"
    base = RunRecord
    cell = PlacementCell
    policies: ClassVar[Any] = ("retrieval", "sorted", *ORDERERS)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: PlacementCell = job.cell
        trace = trace_of_workload(make_workload(cell.workload, job.seed, requests=job.requests), job.requests)
        for policy in job.policies:
            engine = SimEngine(block_size=cell.block_size, capacity_tokens=cell.capacity_tokens, like=SIM_LIKE)
            prompts = PlacedPrompts(cell.documents)
            ordered = make_policy(policy, engine=engine, prompts=prompts, seed=job.seed)
            run = Run(trace, policy, ordered, engine, prompts, seed=job.seed)
            for _ in serve_in_turn(run, engine):
                advance()
            yield {
                "policy": policy,
                "engine": {"name": engine.name, "block_size": engine.block_size, "like": engine.like},
                "warmup": min(job.suite.warmup, job.requests // 2),
                "rows": asdict(run.columns()),
            }
