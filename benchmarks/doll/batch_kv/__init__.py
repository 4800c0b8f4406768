"""Batches that a bounded KV cache holds, and what a streamed gigabyte of weights serves: the suite doll-ordering."""
