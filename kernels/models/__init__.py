"""Transformers models: loading, checks, and attention over paged KV."""
