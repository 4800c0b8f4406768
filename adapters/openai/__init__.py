"""Ordering clients for OpenAI-compatible servers (vLLM, SGLang)."""

from ragorder.adapters.openai.client import AsyncOrderedClient, OrderedClient
from ragorder.adapters.openai.conversation import Conversation
from ragorder.adapters.openai.reply import Answer
from ragorder.adapters.openai.stream import AsyncOrderedStream, OrderedStream

__all__ = ["Answer", "AsyncOrderedClient", "AsyncOrderedStream", "Conversation", "OrderedClient", "OrderedStream"]
