"""Load of a vLLM server, from its metrics."""

from __future__ import annotations

import re

__all__ = ["requests_on"]

_REQUESTS = re.compile(r"^vllm:num_requests_(?:waiting|running)(?:\{[^}\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


def requests_on(page: str) -> int | None:
    """Return the number of waiting and running requests in a server's /metrics, or None if it is missing."""
    counts = [int(float(count)) for count in _REQUESTS.findall(page)]
    return sum(counts) if counts else None
