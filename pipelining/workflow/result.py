"""Result, trace and stream of a workflow's request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ragorder.pipelining.servers import AnswerStream
from ragorder.pipelining.workflow.nodes import NodeId, State


@dataclass(frozen=True, slots=True)
class WorkflowResult:
    """`text`: the graph's answer, or "" if `until` ended the request before."""

    text: str = field(repr=False)
    state: State = field(repr=False)
    trace: Any = None


Kind = Literal["due", "speculative"]
Worker = Literal["engine", "search", "step"]
Outcome = Literal["running", "used", "wasted", "rolled back", "cancelled", "failed"]

_MAX_ITEMS = 1000


@dataclass(slots=True)
class WorkItemTrace:
    """One work item, in seconds from its request's start (`ended_s` None: still running).

    - `planned_s`: became due or was predicted, and waited for a scheduling cycle until `started_s`
    - `outcome` of a speculation: "used", "wasted" (right, on a dropped branch) or "rolled back" (wrong)
    - `settled`: clusters scanned after a search's last change
    - `stages_ahead`: predicted from a due item (1) or a speculative one (2)
    - `from_memory`: an earlier item of the request had the same input
    """

    node: NodeId
    kind: Kind
    worker: Worker
    planned_s: float = 0.0
    started_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome = "running"
    stages_ahead: int = 0
    applied: list[str] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first_token_s: float | None = None
    stages: int = 0
    clusters: int | None = None
    settled: int | None = None
    embed_s: float | None = None
    from_memory: bool = False


@dataclass(slots=True)
class WorkflowTrace:
    """One request, in seconds; `started_s` is by the server's clock.

    - `waited_s`: in the queue, before `total_s`
    - `outcome` "limited": ended by `max_rounds` or a deadline, with the answer so far
    - `refused`, `declined`: speculations without room, and without a gain
    - `dropped`: work items after the first 1000
    """

    graph: str
    started_s: float = 0.0
    waited_s: float = 0.0
    total_s: float | None = None
    outcome: Literal["running", "answered", "limited", "failed", "cancelled"] = "running"
    pieces: list[WorkItemTrace] = field(default_factory=list)
    rounds: dict[NodeId, int] = field(default_factory=dict)
    refused: int = 0
    declined: int = 0
    dropped: int = 0

    @property
    def wasted_tokens(self) -> int:
        """Prompts and answers of unused speculations."""
        return sum((item.prompt_tokens or 0) + item.tokens for item in self._wasted("engine"))

    @property
    def wasted_searches(self) -> int:
        return sum(1 for _ in self._wasted("search"))

    def _wasted(self, worker: Worker) -> Iterator[WorkItemTrace]:
        for item in self.pieces:
            if item.worker == worker and item.kind == "speculative" and item.outcome not in ("used", "running"):
                yield item

    def add(self, item: WorkItemTrace) -> None:
        if len(self.pieces) < _MAX_ITEMS:
            self.pieces.append(item)
        else:
            self.dropped += 1

    def as_record(self) -> dict[str, Any]:
        record = asdict(self)
        for item in record["pieces"]:
            item["node"] = str(item["node"])
        record["wasted_tokens"], record["wasted_searches"] = self.wasted_tokens, self.wasted_searches
        record["rounds"] = {str(node): count for node, count in self.rounds.items()}
        return record


class WorkflowStream(AnswerStream[str | WorkflowResult]):
    """Text of an answer; at its end the `result`."""

    def __init__(self, parts: AsyncGenerator[str | WorkflowResult, None], trace: WorkflowTrace) -> None:
        super().__init__(parts)
        self.trace = trace
        self.result: WorkflowResult | None = None

    def _read(self, part: str | WorkflowResult) -> str:
        if isinstance(part, str):
            return part
        self.result = part
        return ""


class AnswerText:
    """Chunks of a text, without the white space around it."""

    def __init__(self) -> None:
        self.began = False
        self._space = ""

    def add(self, chunk: str) -> str:
        text = self._space + chunk if self.began else chunk.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self.began = self.began or bool(shown)
        return shown
