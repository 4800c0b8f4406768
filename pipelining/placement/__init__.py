"""Placement of a model and an index over device, host memory and disk (RAGDoll)."""
