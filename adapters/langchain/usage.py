"""What LangChain's callbacks carry: the text of prompts, the first token of an answer, the reported usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from ragorder.adapters.langchain.runs import Usage

__all__ = ["is_token", "prompt_text", "read_usage"]

_MAX_COUNT = 1 << 32


def prompt_text(messages: Sequence[BaseMessage]) -> str:
    """The text of a prompt, messages one below the other."""
    return "\n".join(map(_text, messages))


def _text(message: BaseMessage) -> str:
    """A message's text. `message.text` is an attribute, a method, or missing, depending on LangChain's version."""
    parts = [message.content] if isinstance(message.content, str) else message.content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def is_token(token: Any, chunk: Any) -> bool:
    """Whether a piece of an answer says that its prompt was computed: chats open with a role, which says nothing."""
    message = getattr(chunk, "message", None)
    # Reasoning and calls of tools come without a text.
    return bool(
        token
        or getattr(message, "tool_call_chunks", None)
        or getattr(message, "additional_kwargs", None)
        or _get(getattr(chunk, "generation_info", None), "finish_reason")
    )


def read_usage(response: LLMResult, alone: bool) -> Usage | None:
    """What the engine reported, in any model's dialect; None if LangChain had the answer in a cache of its own.

    Text models sum up the usage of a batch: it says nothing of a call that was not made `alone`.
    """
    generation = next(iter(response.generations[0] if response.generations else ()), None)
    own = _get(getattr(generation, "message", None), "usage_metadata")
    if own is not None and _get(own, "total_cost") == 0:
        return None
    cached = prompt = total = None
    for reported in _reports(generation, own, response.llm_output if alone else None):
        details = _first(reported, "input_token_details", "prompt_tokens_details", "input_tokens_details")
        cached = _count(_first(details, "cache_read", "cached_tokens")) if cached is None else cached
        prompt = prompt or _count(_first(reported, "input_tokens", "prompt_tokens"))
        total = total or _count(_get(reported, "total_tokens"))
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    return Usage(cached, total or None, prompt or None)


def _reports(generation: Any, own: Any, llm_output: Any) -> Iterator[Any]:
    yield own
    response_metadata = _get(getattr(generation, "message", None), "response_metadata")
    for place in (response_metadata, getattr(generation, "generation_info", None), llm_output):
        yield _get(place, "token_usage")
        yield _get(place, "usage")


def _first(value: Any, *names: str) -> Any:
    return next((found for name in names if (found := _get(value, name)) is not None), None)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None
