"""Load of a vLLM server, from its metrics."""

from __future__ import annotations

import re

__all__ = ["requests_on"]

_REQUESTS = re.compile(r"^vllm:num_requests_(?:waiting|running)(?:\{[^}\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


def requests_on(page: str) -> int | None:
    """Requests that wait or run, by a server's /metrics; None if it does not say."""
    counts = [int(float(count)) for count in _REQUESTS.findall(page)]
    return sum(counts) if counts else None
