"""Prefill times of an engine: T(cached, new)."""
