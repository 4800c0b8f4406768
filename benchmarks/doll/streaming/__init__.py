"""Streamed weights on a throttled source: suite doll-streaming."""
