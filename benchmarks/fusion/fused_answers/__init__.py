"""Answers of a real model from reused KV of documents: suite fusion-answers."""
