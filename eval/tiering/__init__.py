"""What tiers are worth on a real engine: `python -m ragorder.eval.tiering`; and what they survive:
`python -m ragorder.eval.tiering.chaos`."""

from ragorder.eval.tiering.cells import TieringCell, make_cells
from ragorder.eval.tiering.measuring import Turn, measure
from ragorder.eval.tiering.requests import Stream, make_stream
from ragorder.eval.tiering.results import ARMS, Verdict, judge

__all__ = ["ARMS", "Stream", "TieringCell", "Turn", "Verdict", "judge", "make_cells", "make_stream", "measure"]
