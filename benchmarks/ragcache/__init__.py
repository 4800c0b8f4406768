"""RAGCache and RAGCache++: replacement, tiers and the queue."""
