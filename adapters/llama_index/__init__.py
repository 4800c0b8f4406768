"""LlamaIndex: node postprocessor, retriever and chat engine in cache order."""

from ragorder.common.extras import needs

with needs("llama-index", "ragorder.adapters.llama_index"):
    from ragorder.adapters.llama_index.chat_engine import CacheOrderChatEngine
    from ragorder.adapters.llama_index.feedback import FeedbackHandler
    from ragorder.adapters.llama_index.retriever import CacheOrderPostprocessor, CacheOrderRetriever

__all__ = ["CacheOrderChatEngine", "CacheOrderPostprocessor", "CacheOrderRetriever", "FeedbackHandler"]
