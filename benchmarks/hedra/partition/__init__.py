"""Searches in pieces against searches in batches: suite hedra-partition."""
