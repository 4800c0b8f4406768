"""LlamaIndex's messages in plain form."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage

from ragorder.adapters.turns import plain_message

__all__ = ["read_message"]


def read_message(message: ChatMessage) -> dict[str, Any]:
    content: Any = message.content or ""
    # The first versions have no blocks.
    others = [block for block in getattr(message, "blocks", ()) if block.block_type != "text"]
    if others:
        content = [{"type": "text", "text": content}, *others]
    known = message.additional_kwargs
    return plain_message(
        getattr(message.role, "value", message.role),
        content,
        tool_calls=known.get("tool_calls"),
        tool_call_id=known.get("tool_call_id"),
    )
