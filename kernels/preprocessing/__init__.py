"""Documents' KV computed before it is asked for, in the sight of similar documents (FusionRAG 3.1)."""
