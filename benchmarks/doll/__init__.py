"""RAGDoll: batches, streamed layers and disk."""
