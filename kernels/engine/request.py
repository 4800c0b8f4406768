"""Requests, their updates and completions."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from ragorder.errors import RagorderError
from ragorder.kernels.cache import TierTokens
from ragorder.kernels.fusion.selection import Fusion
from ragorder.kernels.offload.checkpoint import LayerReadError

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]

Fault = Literal["memory", "device", "disk", "other"]
"""Too little memory for the step; a failed device; unreadable weights; an error that would recur."""


class RequestRefusedError(RagorderError, ValueError):
    """The request can never be served. The message quotes nothing of the prompt."""


class ShortOfMemoryError(RequestRefusedError):
    """The request can be served once memory is available again."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0: the likeliest token. A `seed` gives the same samples beside any requests. Text excludes `stop`
    strings; `stop` tokens add to end-of-text ones. `logprobs`: alternatives per token."""

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
            raise ValueError(f"temperature is {self.temperature}: give a finite number, 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give more than 0, and at most 1")
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
    """Prompt tokens, and documents' ends from the prompt's beginning, ascending.

    - `prefix_tokens`: first tokens in a node of their own, such as the system prompt.
    - `salt`: requests with the same one share the cache.
    - `expected_uses`: for each end, a forecast of requests with all documents up to it.
    - `fusion`: with `reuse="fused"`; None means the engine's settings. The first `exact_documents` are exact.
    - `keep_question`: warms up a system prompt (its only document) and a question before its fused request.
    - `keep_logits`: keeps the first token's logits. `deadline_s` runs from `add`.
    """

    token_ids: Sequence[int]
    document_ends: Sequence[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    salt: str | None = None
    keep_logits: bool = False
    expected_uses: Sequence[float] = ()
    deadline_s: float | None = None
    prefix_tokens: int = 0
    exact_documents: int = 0
    fusion: Fusion | Literal["exact"] | None = None
    keep_question: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms before temperature and top_p, of the chosen token and the `top` ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` include a stop token, `text` does not. Times run from `add`; `tbt_s` is the mean time between tokens.
    `logits` (vocabulary,) are fp32 on the CPU.

    Of the prompt's tokens, `cached` are an exact prefix, `fused` were reused at other positions (`recomputed`: those of
    them computed again). `fault` is the cause of an `error`, None if the request caused it.
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
    tbt_s: float | None = None
    fused: TierTokens = field(default_factory=TierTokens)
    recomputed: int = 0
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """One step's tokens, text (held back while incomplete) and logprobs; the last update has the completion."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED|can't start new thread")


class DeviceLostError(RagorderError, RuntimeError):
    """The device does not answer this process any more: start another process."""


def fault_of(error: Exception) -> Fault:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "memory"
    if isinstance(error, LayerReadError):
        return "disk"
    # torch raises plain RuntimeErrors for devices, but also for errors of models: retries are limited.
    if not isinstance(error, RuntimeError) or isinstance(error, (NotImplementedError, RecursionError)):
        return "other"
    return "memory" if _NO_MEMORY.search(str(error)) else "device"


def describe(error: BaseException, what: str) -> str:
    """Return `what` with the error's place; its message may quote a prompt."""
    if isinstance(error, LayerReadError):
        return f"{what}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what} ({type(error).__name__} in {Path(place.filename).name}, line {place.lineno})"


class UpdateQueues:
    def __init__(self) -> None:
        self._others: list[Update] = []
        self._subscribed: dict[int, list[Update]] = {}

    def __bool__(self) -> bool:
        return bool(self._others)

    def put(self, updates: Iterable[Update]) -> None:
        for update in updates:
            self._subscribed.get(update.request_id, self._others).append(update)

    def take(self) -> list[Update]:
        taken, self._others = self._others, []
        return taken

    def subscribe(self, request_id: int) -> None:
        self._subscribed[request_id] = []

    def take_for(self, request_id: int) -> list[Update]:
        taken, self._subscribed[request_id] = self._subscribed[request_id], []
        return taken

    def unsubscribe(self, request_id: int) -> None:
        self._subscribed.pop(request_id, None)
