"""Tiers on a real engine: suite ragcache-ttft-tiers."""

from ragorder.benchmarks.ragcache.tiering.results import ARMS, GOALS, MOST_WORSE, REQUIRED, TierVerdict, judge
from ragorder.benchmarks.ragcache.tiering.sizes import (
    ROOMS,
    PromptStream,
    TierSizes,
    kv_bytes_per_token,
    make_sizes,
    make_stream,
)

__all__ = [
    "ARMS",
    "GOALS",
    "MOST_WORSE",
    "REQUIRED",
    "ROOMS",
    "PromptStream",
    "TierSizes",
    "TierVerdict",
    "judge",
    "kv_bytes_per_token",
    "make_sizes",
    "make_stream",
]
