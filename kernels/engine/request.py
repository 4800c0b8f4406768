"""What is asked of the engine, and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ragorder.kernels.cache import TierTokens

__all__ = ["Completion", "FinishReason", "Request", "RequestRefusedError", "Sampling", "TokenLogprobs", "Update"]

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestRefusedError(ValueError):
    """The request can never be served; the message says what to change, and nothing of the prompt."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and when that ends.

    `temperature` 0 takes the likeliest. `top_p` draws from the fewest tokens whose probabilities add up to as much.
    The same `seed` draws the same, whatever else the engine serves meanwhile; without one every request differs.
    `stop` are strings, of which the text ends in front, and tokens; the model's own end-of-text tokens are stops unless
    `ignore_eos`. `logprobs` is how many alternatives are reported for each token, 0: the chosen token alone.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str | int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: give 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: give 0 or more, and a finite number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give more than 0, and 1 at most")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs is {self.logprobs}: give 0 or more, or None")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if "" in self.stop:
            raise ValueError("an empty stop string would end every answer at once: leave it out")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(stop for stop in self.stop if isinstance(stop, str))

    @property
    def stop_tokens(self) -> frozenset[int]:
        return frozenset(stop for stop in self.stop if isinstance(stop, int))


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt in tokens. `document_ends` is where its documents end, ascending, in tokens from the beginning: what is
    in front of the first end is the system prompt and the first document's beginning, what is behind the last is the
    question and is not cached. `salt` keeps caches apart: only requests of the same salt share. `keep_logits` has the
    completion carry the logits of the first token."""

    token_ids: Sequence[int]
    document_ends: Sequence[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    salt: str | None = None
    keep_logits: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of a chosen token's probability, before temperature and top_p, and of the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """How a request ended. `token_ids` are all that were generated, a stop token included, of which `text` has nothing.

    `ttft_s` runs from `add` to the first token, None if there was none, `total_s` to the end. `error` says why for the
    finish reason "error". `logits` (vocabulary,) are those of the first token in fp32 on the CPU, if they were kept.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached: TierTokens
    ttft_s: float | None
    total_s: float
    error: str | None = None
    logits: torch.Tensor | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """What a step brought for one request: new tokens, the text that came new (none while a character or a stop string
    is incomplete), their logprobs if asked for, and at the end the completion."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
