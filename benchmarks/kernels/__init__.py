"""Attention and the embedded engine."""
