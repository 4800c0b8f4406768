"""Evaluation: what ordering saves, measured on simulated and real engines."""
