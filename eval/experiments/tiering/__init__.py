"""Tiers on a real engine: suite ragcache-ttft-tiers."""

from ragorder.eval.experiments.tiering.requests import Stream, make_stream
from ragorder.eval.experiments.tiering.results import ARMS, MOST_WORSE, REQUIRED, Verdict, judge
from ragorder.eval.experiments.tiering.sizes import ROOMS, TierSizes, kv_bytes_per_token, make_sizes

__all__ = [
    "ARMS",
    "MOST_WORSE",
    "REQUIRED",
    "ROOMS",
    "Stream",
    "TierSizes",
    "Verdict",
    "judge",
    "kv_bytes_per_token",
    "make_sizes",
    "make_stream",
]
