"""LlamaIndex: node postprocessor, retriever and chat engine in cache order."""

from ragorder.common.extras import install_hint

try:
    from ragorder.adapters.llama_index.chat_engine import CacheOrderChatEngine
    from ragorder.adapters.llama_index.feedback import FeedbackHandler
    from ragorder.adapters.llama_index.retriever import CacheOrderPostprocessor, CacheOrderRetriever
except ImportError as error:
    raise ImportError(f"ragorder.adapters.llama_index needs llama-index-core: {install_hint('llama-index')}") from error

__all__ = ["CacheOrderChatEngine", "CacheOrderPostprocessor", "CacheOrderRetriever", "FeedbackHandler"]
