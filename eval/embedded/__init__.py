"""What the embedded engine takes: `python -m ragorder.eval.embedded`."""

from ragorder.eval.embedded.prefill import MEASURES, Layout, prefill_experiments
from ragorder.eval.embedded.results import Verdict, judge
from ragorder.eval.embedded.running import Experiment, Rows, read_lines, run
from ragorder.eval.embedded.serving import Arm, Workload, make_arms, serving_experiments
from ragorder.eval.embedded.shapes import SHAPES, Shape

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
