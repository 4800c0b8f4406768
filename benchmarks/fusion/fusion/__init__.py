"""Answers from reused KV of documents: suites fusion-quality, -preprocessing, -seconds and -training."""
