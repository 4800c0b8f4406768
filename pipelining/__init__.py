"""Retrieval overlapped with prefill (RAGCache++ section 3.6, RAGCache section 5.3)."""
