"""Pipelines of search and prefill: RAGCache Figure 22 and Table 3, RAGCache++ Tables 5 and 6."""
