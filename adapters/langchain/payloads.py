"""Prompt texts, answer tokens and usage in LangChain's callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from ragorder.adapters.usage import ReportedUsage, member, read_usage

__all__ = ["is_token", "prompt_text", "response_usage"]


def prompt_text(messages: Sequence[BaseMessage]) -> str:
    return "\n".join(map(_text, messages))


def _text(message: BaseMessage) -> str:
    # `message.text` is an attribute, a method, or missing, depending on LangChain's version.
    parts = [message.content] if isinstance(message.content, str) else message.content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def is_token(token: Any, chunk: Any) -> bool:
    message = getattr(chunk, "message", None)
    # Reasoning and tool calls come without text.
    return bool(
        token
        or getattr(message, "tool_call_chunks", None)
        or getattr(message, "additional_kwargs", None)
        or member(getattr(chunk, "generation_info", None), "finish_reason")
    )


def response_usage(response: LLMResult, alone: bool) -> ReportedUsage | None:
    """None if LangChain's own cache answered. Batch sums count only for a call `alone`."""
    generation = next(iter(response.generations[0] if response.generations else ()), None)
    own = member(getattr(generation, "message", None), "usage_metadata")
    if own is not None and member(own, "total_cost") == 0:
        return None
    usage = read_usage(*_reports(generation, own, response.llm_output if alone else None))
    # LangChain writes 0 where it has no number.
    return ReportedUsage(usage.cached_tokens, usage.prompt_tokens or None, None, usage.total_tokens or None)


def _reports(generation: Any, own: Any, llm_output: Any) -> Iterator[Any]:
    yield own
    response_metadata = member(getattr(generation, "message", None), "response_metadata")
    for place in (response_metadata, getattr(generation, "generation_info", None), llm_output):
        yield member(place, "token_usage")
        yield member(place, "usage")
