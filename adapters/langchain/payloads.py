"""Texts, answer tokens and usage in LangChain's messages and callbacks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from ragorder.adapters.usage import ReportedUsage, member, read_usage

_WRITTEN = ("cache_creation",)
_WRITTEN_FOR = re.compile(r"ephemeral_\w+_input_tokens")


def prompt_text(messages: Sequence[BaseMessage]) -> str:
    return "\n".join(map(text_of, messages))


def text_of(message: BaseMessage) -> str:
    # `message.text` is an attribute, a method, or missing, depending on LangChain's version.
    parts = [message.content] if isinstance(message.content, str) else message.content
    texts = (part if isinstance(part, str) else part.get("text") for part in parts if not is_other(part))
    return "\n".join(text for text in texts if isinstance(text, str))


def is_other(part: Any) -> bool:
    """Return whether a content part is no text."""
    return isinstance(part, Mapping) and part.get("type", "text") != "text"


def is_token(token: Any, chunk: Any) -> bool:
    message = getattr(chunk, "message", None)
    # Reasoning and tool calls arrive without text.
    return bool(
        token
        or getattr(message, "tool_call_chunks", None)
        or getattr(message, "additional_kwargs", None)
        or member(getattr(chunk, "generation_info", None), "finish_reason")
    )


def response_usage(response: LLMResult, alone: bool) -> ReportedUsage | None:
    """Return None if LangChain's own cache answered. A batch's sums count only for a call `alone` in it."""
    generation = next(iter(response.generations[0] if response.generations else ()), None)
    places = getattr(generation, "generation_info", None), response.llm_output if alone else None
    return message_usage(getattr(generation, "message", None), *places)


def written_tokens(message: BaseMessage) -> int | None:
    """Return the tokens written into a cloud's cache, of all TTLs."""
    details = member(getattr(message, "usage_metadata", None), "input_token_details")
    counts = [details[name] for name in details or () if name in _WRITTEN or _WRITTEN_FOR.fullmatch(name)]
    return sum(counts) if counts and all(type(count) is int for count in counts) else None


def message_usage(message: Any, *places: Any) -> ReportedUsage | None:
    own = member(message, "usage_metadata")
    if own is not None and member(own, "total_cost") == 0:
        return None
    reports = [own]
    for place in (member(message, "response_metadata"), *places):
        reports += [member(place, "token_usage"), member(place, "usage")]
    usage = read_usage(*reports)
    # LangChain writes 0 for a missing number.
    return ReportedUsage(usage.cached_tokens, usage.prompt_tokens or None, None, usage.total_tokens or None)
