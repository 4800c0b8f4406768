"""Workflows whose prompts reuse copies of documents, on a model that streams: suite all-three."""
