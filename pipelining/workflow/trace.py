"""Trace of one request: its pieces of work, without their texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ragorder.pipelining.workflow.nodes import NodeId

__all__ = ["Kind", "Outcome", "PieceTrace", "Worker", "WorkflowTrace"]

Kind = Literal["due", "speculative"]
Worker = Literal["engine", "search", "step"]
Outcome = Literal["running", "used", "wasted", "rolled back", "cancelled", "failed"]

_MAX_PIECES = 1000


@dataclass(slots=True)
class PieceTrace:
    """One piece of work, in seconds from its request's start (`ended_s` None: still running).

    - `planned_s`: it became due, or was foreseen; until `started_s` it waited for a scheduling cycle
    - `outcome`: "used"; a speculation "wasted" (right, but its branch was left) or "rolled back" (wrong); "cancelled"
      or "failed" with its request
    - `tokens` generated, `prompt_tokens` and `cached_tokens` by the engine's report (None: not reported)
    - `stages` seen of a search, `clusters` scanned, and for how many of them the result had `settled`
    - `embed_s`: of a search's query; `first_token_s`: from the request's start
    - `stages_ahead` of need: 1 if it was foreseen from a due piece, 2 from one that was ahead itself
    - `applied`: names of the transformations
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


@dataclass(slots=True)
class WorkflowTrace:
    """What happened to one request, in seconds; `started_s` is by the server's clock.

    - `waited_s`: for its turn, before it started (`total_s` does not count it)
    - `rounds`: how often each node ran
    - `refused`, `declined`: speculations without room, and those without a gain
    - `dropped`: pieces beyond the first 1000, which are not recorded
    """

    graph: str
    started_s: float = 0.0
    waited_s: float = 0.0
    total_s: float | None = None
    outcome: Literal["running", "answered", "failed", "cancelled"] = "running"
    pieces: list[PieceTrace] = field(default_factory=list)
    rounds: dict[NodeId, int] = field(default_factory=dict)
    refused: int = 0
    declined: int = 0
    dropped: int = 0

    def add(self, piece: PieceTrace) -> None:
        if len(self.pieces) < _MAX_PIECES:
            self.pieces.append(piece)
        else:
            self.dropped += 1

    def as_record(self) -> dict[str, Any]:
        """For JSON. Ids of nodes become strings."""
        record = asdict(self)
        for piece in record["pieces"]:
            piece["node"] = str(piece["node"])
        record["rounds"] = {str(node): count for node, count in self.rounds.items()}
        return record
