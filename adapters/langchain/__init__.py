"""LangChain: retriever, chain step and chat turns in cache order."""

from ragorder.common.extras import needs

with needs("langchain", "ragorder.adapters.langchain"):
    from ragorder.adapters.langchain.feedback import FeedbackHandler
    from ragorder.adapters.langchain.marks import content_parts
    from ragorder.adapters.langchain.retriever import CacheOrderRetriever, CacheOrderTransformer
    from ragorder.adapters.langchain.turn import CacheOrderTurn

__all__ = ["CacheOrderRetriever", "CacheOrderTransformer", "CacheOrderTurn", "FeedbackHandler", "content_parts"]
