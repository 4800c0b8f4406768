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

from ragorder.kernels.cache import TierTokens
from ragorder.kernels.fusion.settings import Fusion
from ragorder.kernels.offload.checkpoint import LayerReadError

__all__ = [
    "Completion",
    "DeviceLostError",
    "Fault",
    "FinishReason",
    "Request",
    "RequestRefusedError",
    "Sampling",
    "ShortOfMemoryError",
    "TokenLogprobs",
    "Update",
    "UpdateQueues",
    "describe",
    "fault_of",
]

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]

Fault = Literal["memory", "device", "disk", "other"]
"""Too little memory for the step; a failed device; weights that could not be read; an error that would come again."""


class RequestRefusedError(ValueError):
    """The request can never be served. The message quotes nothing of the prompt."""


class ShortOfMemoryError(RequestRefusedError):
    """The request can be served when memory is there again."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choice of tokens, and the end of an answer.

    `temperature` 0 takes the likeliest token. A `seed` gives the same samples whatever else is served. Text excludes
    `stop` strings; `stop` tokens add to the end-of-text ones (unless `ignore_eos`). `logprobs`: alternatives for each
    token.
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
    """Prompt tokens, and the documents' ends from the prompt's beginning, ascending.

    The `prefix_tokens` first tokens are a node of their own, shared by all that begin with them; by default the system
    prompt is in the first document's node. The question is not cached. A cache is shared within a `salt`.
    `expected_uses`: for each end, the requests to come that will contain all documents up to it, if forecast.
    `fusion`: how documents behind the cached prefix are reused, for engines with `reuse="fused"`; None: as its settings
    say. `exact_documents`: leading ones that are computed exactly even if they could be taken over. `keep_question`: a
    warm-up, of a system prompt (its only document) and a question whose fused request follows.
    `keep_logits`: of the first token. `deadline_s` runs from `add`: then the request ends with reason "timeout".
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
    """Before temperature and top_p, natural: the chosen token's, and the `top` ones'."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` include a stop token, `text` does not. Times run from `add`. `logits` (vocabulary,): the first
    token's, fp32 on the CPU. `tbt_s`: the mean time between its tokens (RAGCache 5.4).

    Of the prompt's tokens `cached` are an exact prefix, `fused` were taken over from elsewhere, and `recomputed` of
    these were recomputed (FusionRAG). `fault`: what an `error` came from; None: the request.
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
    """One step's tokens, text (held back while incomplete) and logprobs; at the end the completion."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED|can't start new thread")


class DeviceLostError(RuntimeError):
    """The device answers this process no more, as after most CUDA errors: start another process."""


def fault_of(error: Exception) -> Fault:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "memory"
    if isinstance(error, LayerReadError):
        return "disk"
    # torch raises plain RuntimeErrors for devices, and for some mistakes of models too: retries are bounded.
    if not isinstance(error, RuntimeError) or isinstance(error, (NotImplementedError, RecursionError)):
        return "other"
    return "memory" if _NO_MEMORY.search(str(error)) else "device"


def describe(error: BaseException, what: str) -> str:
    """`what` failed and where: the message of an error may quote a prompt, the place where it was raised does not."""
    if isinstance(error, LayerReadError):
        # It names a file.
        return f"{what}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what} ({type(error).__name__} in {Path(place.filename).name}, line {place.lineno})"


class UpdateQueues:
    """A queue for each subscribed request's updates, and one for the others."""

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
