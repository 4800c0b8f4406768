"""Documents' KV computed before it is asked for, behind similar documents (FusionRAG 3.1)."""
