"""Cells of prompts to clouds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell

__all__ = ["CloudsCell"]


class CloudsCell(SuiteCell):
    """Requests of a workload to `model` of `provider`, each `gap_s` after the one before on average, at random times.

    A prompt is a system prompt, documents and a question of the given tokens; the answer's first token comes after
    `first_token_s`, its last one after `answer_s`. The workload "conversations" has conversations of `turns` turns,
    whose next question comes `pause_s` after an answer on average.
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
