"""LlamaIndex: a node postprocessor, a retriever and a chat engine in cache order."""

try:
    from ragorder.adapters.llama_index.chat_engine import CacheOrderChatEngine
    from ragorder.adapters.llama_index.feedback import FeedbackHandler
    from ragorder.adapters.llama_index.postprocessor import CacheOrderPostprocessor
    from ragorder.adapters.llama_index.retriever import CacheOrderRetriever
except ImportError as error:
    raise ImportError(
        "ragorder.adapters.llama_index needs llama-index-core: pip install 'ragorder[llama-index]'"
    ) from error

__all__ = ["CacheOrderChatEngine", "CacheOrderPostprocessor", "CacheOrderRetriever", "FeedbackHandler"]
