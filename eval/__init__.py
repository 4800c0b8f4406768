"""Evaluation: what ordering saves, measured on simulated and real engines."""

from pathlib import Path

# `python -m ragorder.eval.staging` and other former commands run their suites.
__path__.append(str(Path(__file__).parent / "_aliases"))
