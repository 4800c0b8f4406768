"""Placement of model and index on device, host memory and disk (RAGDoll)."""
