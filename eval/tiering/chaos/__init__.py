"""What tiers survive: `python -m ragorder.eval.tiering.chaos` kills servers under load, damages what lies on their disk
in between, and compares every answer with one that was computed without any cache."""

from ragorder.eval.tiering.chaos.asking import Answer, ask
from ragorder.eval.tiering.chaos.damage import chunk_files, damage, flip_bit, truncate
from ragorder.eval.tiering.chaos.load import Load
from ragorder.eval.tiering.chaos.prompts import Prompts, make_prompts

__all__ = ["Answer", "Load", "Prompts", "ask", "chunk_files", "damage", "flip_bit", "make_prompts", "truncate"]
