"""Experiments, one folder each."""
