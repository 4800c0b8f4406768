"""Tiers on a real engine: suite ragcache-ttft-tiers."""
