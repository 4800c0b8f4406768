"""Cached tokens by where the documents of a conversation stand."""
