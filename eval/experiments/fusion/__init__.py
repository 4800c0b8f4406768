"""Answers from reused KV of documents: suites fusion-quality and fusion-training."""
