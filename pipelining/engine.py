"""What a pipeline needs of an engine: a request that streams its answer, and that can be aborted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Chunk", "Engine", "Request", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine reports of an answer, in tokens; None where it does not say. `cached_tokens` of the
    `prompt_tokens` were reused from its cache."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The text since the chunk before, which may be empty (a token that shows nothing yet); and, with the last one,
    what the engine reports."""

    text: str
    usage: Usage | None = None


class Request(Protocol):
    """What is sent to an engine. Two requests are equal if the engine is sent the same; `prompt_tokens` is the length
    of the prompt (None: not known)."""

    @property
    def prompt_tokens(self) -> int | None: ...


R_contra = TypeVar("R_contra", contravariant=True)


class Engine(Protocol[R_contra]):
    """An engine that generates: vLLM in this process, or a server."""

    def stream(self, request: R_contra, /) -> AsyncGenerator[Chunk, None]:
        """Send the request when the generator is first advanced; its first chunk comes with the first token.

        Closing the generator early aborts the request on the engine. Raises what the engine's client raises.
        """
