"""Retrieval overlapped with prefill, on a real server."""
