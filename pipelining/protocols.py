"""Protocols and types of a pipeline."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ragorder.common.counts import reported_count


@dataclass(frozen=True, slots=True)
class Usage:
    """The engine's report. None: not reported, or no valid count."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            object.__setattr__(self, name, reported_count(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """The text since the last chunk, possibly empty. The last chunk has the usage."""

    text: str
    usage: Usage | None = None
    tokens: int = 1


class EngineRequest(Protocol):
    """Equal requests are sent as equal messages. `prompt_tokens`: None if unknown. If an optional `streamed` is False,
    the answer may come in one chunk."""

    @property
    def prompt_tokens(self) -> int | None: ...


Q = TypeVar("Q")
D = TypeVar("D")
R = TypeVar("R", bound=EngineRequest)
R_contra = TypeVar("R_contra", contravariant=True)
R_co = TypeVar("R_co", bound=EngineRequest, covariant=True)
Q_contra = TypeVar("Q_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)


class StreamingEngine(Protocol[R_contra]):
    def stream(self, request: R_contra, /) -> AsyncGenerator[AnswerChunk, None]:
        """Send the request at the first `__anext__`; closing the generator early aborts it."""


class CommittedRequest(Protocol[R_co]):
    """In flight until confirmed or discarded."""

    @property
    def request(self) -> R_co: ...

    def confirm(self, usage: Usage | None, /) -> None: ...

    def discard(self) -> None: ...


class RequestBuilder(Protocol[Q_contra, D_contra, R_co]):
    """May have, for a `WorkflowServer`, `lengths(question, documents)`, which returns None or a function that predicts
    the request's `CachedLengths` at each call."""

    def preview(self, question: Q_contra, documents: Sequence[D_contra], /) -> R_co: ...

    def commit(self, question: Q_contra, documents: Sequence[D_contra], /) -> CommittedRequest[R_co]: ...


@dataclass(slots=True)
class PipelineTrace:
    """Times of one question, in seconds from its start (None: not yet).

    - `speculations` started, `refused` for lack of room, `declined` without a gain; `right`: the last one was used
    - `exposed_search_s`: search time without a generation on its result (T1 of RAGCache Table 3, else T2)
    - `speculated_stage`: the stage, from 1, after which the used speculation started
    - `wasted_prompt_tokens`: prompts of unused speculations, an upper bound
    """

    warmed_up: bool = False
    stages: int = 0
    speculations: int = 0
    refused: int = 0
    declined: int = 0
    right: bool = False
    speculated_stage: int | None = None
    wasted_prompt_tokens: int = 0
    retrieval_s: float | None = None
    exposed_search_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    total_s: float | None = None
