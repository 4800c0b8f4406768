"""Streamed weights, partitions on disk and decoupled batches in real time."""
