"""LlamaIndex: a node postprocessor and a retriever in cache order."""

from ragorder._moved import renamed

try:
    from ragorder.adapters.llama_index.feedback import FeedbackHandler
    from ragorder.adapters.llama_index.postprocessor import CacheOrderPostprocessor
    from ragorder.adapters.llama_index.retriever import CacheOrderRetriever
except ImportError as error:
    raise ImportError(
        "ragorder.adapters.llama_index needs llama-index-core: pip install 'ragorder[llama-index]'"
    ) from error

__all__ = ["CacheOrderPostprocessor", "CacheOrderRetriever", "FeedbackHandler"]

__getattr__ = renamed(__name__)
