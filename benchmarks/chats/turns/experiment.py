"""Cached tokens of conversations by where the documents of a turn stand: the suites of kind "turns"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.chats.conversations.layouts import conversations
from ragorder.benchmarks.chats.conversations.servers import ChatServers, whole_conversations
from ragorder.benchmarks.chats.turns.sending import CHATS, SYSTEM, send_turns
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.models import load_tokenizer
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["TurnCell", "TurnRecord", "Turns"]

_LONGEST_PROMPT = 16_384


class TurnCell(SuiteCell):
    """`blocks` is the size of the cache, `concurrency` the conversations at a time."""

    blocks: int = Field(1023, ge=1)
    conversations: int = Field(40, ge=1)
    turns: int = Field(6, ge=1)
    concurrency: int = Field(8, ge=1)
    max_tokens: int = Field(24, ge=1)


class TurnRecord(RunRecord):
    """Conversations under one policy, a row for each turn: `turn` counts from 0, `repeated` are documents named."""

    type: Literal["turns"] = "turns"  # type: ignore[assignment]


class Turns(Experiment):
    kind = "turns"
    record = TurnRecord
    cell = TurnCell
    policies: ClassVar[Any] = tuple(CHATS)
    one_job = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._servers = ChatServers(self.options, _LONGEST_PROMPT)

    def obstacle(self, suite: Suite, cell: TurnCell, policy: str) -> str | None:
        return self._servers.obstacle

    def requests(self, suite: Suite, cell: TurnCell) -> int:
        return whole_conversations(cell.conversations, cell.turns, self.options.limit)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: TurnCell = job.cell
        chats = conversations(job.requests // cell.turns, cell.turns, job.seed)
        texts = [text for turns in chats for turn in turns for _, text in turn.documents]
        server = self.kept(cell.blocks, lambda: self._servers.start(cell.blocks, [SYSTEM, *texts], self.resources))
        tokenizer = load_tokenizer(str(self._servers.model)) if self._servers.model is not None else None
        for policy in job.policies:
            rows = asyncio.run(
                send_turns(server, chats, CHATS[policy], tokenizer, cell.max_tokens, cell.concurrency, advance)
            )
            yield {
                "policy": policy,
                "engine": self._servers.describe(server),
                "load_average": load_average(),
                "rows": rows,
            }
