"""LangChain: retriever, chain step and chat turns in cache order.

retriever = CacheOrderRetriever(retriever=store.as_retriever(), orderer=Orderer.for_vllm("http://host:8000"))
chain = {"context": retriever | join_texts, "question": RunnablePassthrough()} | prompt | llm
chain.invoke(question, config={"callbacks": [FeedbackHandler()]})
"""

from ragorder.common.extras import needs

with needs("langchain", "ragorder.adapters.langchain"):
    from ragorder.adapters.langchain.feedback import FeedbackHandler
    from ragorder.adapters.langchain.marks import content_parts
    from ragorder.adapters.langchain.retriever import CacheOrderRetriever, CacheOrderTransformer
    from ragorder.adapters.langchain.turn import CacheOrderTurn

__all__ = ["CacheOrderRetriever", "CacheOrderTransformer", "CacheOrderTurn", "FeedbackHandler", "content_parts"]
