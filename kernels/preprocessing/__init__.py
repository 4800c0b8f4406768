"""Documents' KV precomputed after similar documents (FusionRAG 3.1)."""
