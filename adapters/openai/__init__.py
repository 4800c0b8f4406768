"""Ordering clients for OpenAI-compatible servers (vLLM, SGLang)."""

from ragorder.adapters.openai.call import AsyncOrderedStream, OrderedStream
from ragorder.adapters.openai.client import AsyncOrderedClient, OrderedClient
from ragorder.adapters.openai.conversation import Conversation
from ragorder.adapters.openai.reply import Answer

__all__ = ["Answer", "AsyncOrderedClient", "AsyncOrderedStream", "Conversation", "OrderedClient", "OrderedStream"]
