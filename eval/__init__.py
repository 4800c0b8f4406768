"""Evaluation: what ordering saves, measured on simulated and real engines."""

from pathlib import Path

# `python -m ragorder.eval.staging` and its like are documented; their modules are under `experiments`.
__path__.append(str(Path(__file__).parent / "_aliases"))
