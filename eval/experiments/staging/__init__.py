"""Staged searches against plain ones."""
