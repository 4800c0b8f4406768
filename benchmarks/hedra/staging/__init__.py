"""Searches in stages against plain ones: suite staged-search."""
