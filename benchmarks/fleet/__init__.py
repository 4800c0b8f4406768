"""Replicas, workers and shared orders."""
