"""Protocols of a pipeline: the engine, the builder of requests, and the types that they exchange."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = [
    "AnswerChunk",
    "CommittedRequest",
    "EngineRequest",
    "PipelineTrace",
    "RequestBuilder",
    "StreamingEngine",
    "Usage",
]


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine reports for an answer, in tokens (None: not reported). `cached_tokens` of the `prompt_tokens`
    were reused from its cache."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """The text since the previous chunk, possibly empty (a token without visible text). The last one has the usage."""

    text: str
    usage: Usage | None = None


class EngineRequest(Protocol):
    """A request to an engine. Equal requests send the same; `prompt_tokens` is the prompt's length (None: unknown)."""

    @property
    def prompt_tokens(self) -> int | None: ...


R_contra = TypeVar("R_contra", contravariant=True)
R_co = TypeVar("R_co", bound=EngineRequest, covariant=True)
Q_contra = TypeVar("Q_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)


class StreamingEngine(Protocol[R_contra]):
    """An engine that generates: vLLM in this process, or a server."""

    def stream(self, request: R_contra, /) -> AsyncGenerator[AnswerChunk, None]:
        """Send the request at the first `__anext__`; the first chunk comes with the first token.

        Closing the generator early aborts the request on the engine. Raises what the engine's client raises.
        """


class CommittedRequest(Protocol[R_co]):
    """A request that counts as in flight: either confirmed, with the engine's usage, or discarded."""

    @property
    def request(self) -> R_co: ...

    def confirm(self, usage: Usage | None, /) -> None: ...

    def discard(self) -> None: ...


class RequestBuilder(Protocol[Q_contra, D_contra, R_co]):
    """Makes a request from a question and its documents, given in retrieval order."""

    def preview(self, question: Q_contra, documents: Sequence[D_contra], /) -> R_co:
        """The request that `commit` would make now. Nothing is recorded."""

    def commit(self, question: Q_contra, documents: Sequence[D_contra], /) -> CommittedRequest[R_co]: ...


@dataclass(slots=True)
class PipelineTrace:
    """Timing of one question, in seconds since it was asked (None: has not happened).

    - `retrieval_s`: the search ended, after so many `stages`.
    - `speculations` were started, `refused` for lack of room, `declined` because they would probably cost more than
      they save; `right` says whether the last one was used.
    - `exposed_search_s`: the part of the search that overlaps with no generation on its result (T1 of RAGCache Table 3;
      all of it, T2, if no speculation was used).
    - `speculated_stage`: the stage, from 1, after which the used speculation was started.
    - `wasted_prompt_tokens`: the prompts of the unused speculations, an upper bound of the wasted computation.
    - `warmed_up`: a warm-up of the system prompt ran during retrieval.
    - `first_token_s` is the time to the first token, `total_s` that to the last.
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
    total_s: float | None = None
