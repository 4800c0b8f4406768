"""Documents' KV reused at any position of a prompt (FusionRAG)."""
