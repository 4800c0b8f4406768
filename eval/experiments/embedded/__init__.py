"""Measurements of the embedded engine: `python -m ragorder.eval.experiments.embedded`."""

from ragorder.eval.experiments.embedded.prefill import MEASURES, Layout, prefill_experiments
from ragorder.eval.experiments.embedded.results import Verdict, judge
from ragorder.eval.experiments.embedded.running import Experiment, Rows, read_lines, run
from ragorder.eval.experiments.embedded.serving import Arm, Workload, make_arms, serving_experiments
from ragorder.eval.experiments.embedded.shapes import SHAPES, Shape

__all__ = [
    "MEASURES",
    "SHAPES",
    "Arm",
    "Experiment",
    "Layout",
    "Rows",
    "Shape",
    "Verdict",
    "Workload",
    "judge",
    "make_arms",
    "prefill_experiments",
    "read_lines",
    "run",
    "serving_experiments",
]
