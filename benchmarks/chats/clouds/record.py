"""The cell and the record of requests to a cloud."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["WINDOW", "CloudsCell", "CloudsRecord"]

WINDOW = 1000
"""Requests over which the worst cost is taken."""


class CloudsCell(SuiteCell):
    """Requests of a workload to `model` of `provider`, each `gap_s` after the one before on average, at random times.

    A prompt is a system prompt, documents and a question of so many tokens; the answer's first token comes after
    `first_token_s`, its last one after `answer_s`. The workload "conversations" has conversations of so many `turns`,
    of which the next question comes `pause_s` after an answer on average.
    """

    workload: str
    provider: Literal["anthropic", "bedrock", "deepseek", "openai"] = "anthropic"
    model: str = "claude-opus-5"
    ttl: str | None = None
    gap_s: float = Field(2.0, gt=0)
    requests: int = Field(1500, ge=1)
    system_tokens: int = Field(600, ge=1)
    document_tokens: int = Field(600, ge=16)
    question_tokens: int = Field(60, ge=16)
    first_token_s: float = Field(1.0, ge=0)
    answer_s: float = Field(5.0, ge=0)
    turns: int = Field(6, ge=1)
    pause_s: float = Field(60.0, gt=0)

    @property
    def converses(self) -> bool:
        return self.workload == "conversations"


class CloudsRecord(Record):
    """`rows` of each request: `prompt_tokens`, of these `cached_tokens` and `written_tokens`, and `predicted_tokens` to
    be cached (-1: nothing was predicted). Facts: prices to `write` and to `read`, in multiples of the plain input
    price."""

    called: ClassVar[str] = "a run at a cloud"
    is_run: ClassVar[bool] = False
    facts_needed: ClassVar[tuple[str, ...]] = ("write", "read")

    type: Literal["clouds"] = "clouds"
    cell: dict[str, Any]
    rows: dict[str, list[int]]
    facts: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "prompt_tokens", "cached_tokens", "written_tokens", "predicted_tokens"

    @property
    def cost(self) -> float:
        """In multiples of what the prompts cost without a cache."""
        return self.cost_of(self)

    def cost_of(self, other: CloudsRecord) -> float:
        """In multiples of what another run's prompts cost without a cache."""
        return sum(self._costs()) / max(1, sum(other.rows["prompt_tokens"]))

    @property
    def worst(self) -> float:
        """The same over the worst `WINDOW` consecutive requests, or over all if they are fewer."""
        costs, plain = self._costs(), self.rows["prompt_tokens"]
        size = min(WINDOW, len(plain))
        cost, tokens = sum(costs[:size]), sum(plain[:size])
        worst = cost / max(1, tokens)
        for last in range(size, len(plain)):
            cost += costs[last] - costs[last - size]
            tokens += plain[last] - plain[last - size]
            worst = max(worst, cost / max(1, tokens))
        return worst

    def share(self, column: str) -> float:
        """Of the prompt tokens."""
        return sum(self.rows[column]) / max(1, sum(self.rows["prompt_tokens"]))

    @property
    def exact(self) -> float | None:
        """Share of the predictions that are right to the token, in conversations to one for each turn, whose template
        has some; None without predictions."""
        pairs = zip(self.rows["cached_tokens"], self.rows["predicted_tokens"], strict=True)
        most = CloudsCell.model_validate(self.cell).turns if self.cell.get("workload") == "conversations" else 0
        right = [abs(cached - predicted) <= most for cached, predicted in pairs if predicted >= 0]
        return sum(right) / len(right) if right else None

    def _costs(self) -> list[float]:
        write, read = self.facts["write"], self.facts["read"]
        columns = (self.rows[name] for name in ("prompt_tokens", "cached_tokens", "written_tokens"))
        return [
            prompt + (read - 1) * cached + (write - 1) * written
            for prompt, cached, written in zip(*columns, strict=True)
        ]
