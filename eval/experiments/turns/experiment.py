"""Cached tokens of conversations by where the documents of a turn stand: the suites of kind "turns"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.models import load_tokenizer
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.experiments.conversations.layouts import ChatTurn, conversations
from ragorder.eval.experiments.turns.sending import CHATS, SYSTEM, send_turns
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.experiment import Experiment, Job, Line
from ragorder.eval.running.record import RunRecord
from ragorder.kernels.random_model import make_model

if TYPE_CHECKING:
    from ragorder.eval.experiments.conversations.server import SimulatedServer
    from ragorder.eval.running.suite import Suite

    ChatServer = VLLMServer | SimulatedServer

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
        self._model: Path | None = None

    def obstacle(self, suite: Suite, cell: TurnCell, policy: str) -> str | None:
        if self.options.engine not in ("sim", "openai") or self.options.base_url is not None:
            return "a server is simulated or started: use --engine sim, or openai without --base-url"
        return None

    def requests(self, suite: Suite, cell: TurnCell) -> int:
        asked = cell.conversations * cell.turns
        return max(cell.turns, min(asked, self.options.limit or asked) // cell.turns * cell.turns)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: TurnCell = job.cell
        chats = conversations(job.requests // cell.turns, cell.turns, job.seed)
        server = self.kept(cell.blocks, lambda: self._start(cell.blocks, chats))
        tokenizer = load_tokenizer(str(self._model)) if self._model is not None else None
        for policy in job.policies:
            rows = asyncio.run(
                send_turns(server, chats, CHATS[policy], tokenizer, cell.max_tokens, cell.concurrency, advance)
            )
            yield {
                "policy": policy,
                "engine": {
                    "name": self.options.engine,
                    "model": None if self._model is None else str(self.options.model or "random weights"),
                    "block_size": server.block_size,
                    "capacity_tokens": server.capacity_tokens,
                },
                "load_average": load_average(),
                "rows": rows,
            }

    def _start(self, blocks: int, chats: Sequence[Sequence[ChatTurn]]) -> ChatServer:
        if self.options.engine == "sim":
            from ragorder.eval.experiments.conversations.server import SimulatedServer

            return SimulatedServer(blocks)
        if self.options.model is None:
            folder = Path(self.resources.enter_context(TemporaryDirectory()))
            texts = [text for turns in chats for turn in turns for _, text in turn.documents]
            shape = {"layers": 2, "hidden_size": 256, "vocab_size": 4096, "max_position_embeddings": _LONGEST_PROMPT}
            self._model = make_model(folder / "model", texts=[SYSTEM, *texts], **shape)
        else:
            self._model = self.options.model
        return self.resources.enter_context(VLLMServer(self._model, blocks=blocks, max_model_len=_LONGEST_PROMPT))
