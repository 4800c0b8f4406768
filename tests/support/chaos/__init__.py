"""Fault injection for the tiers: `make chaos` kills servers under load, damages their disk in between, and compares
every answer with one computed without a cache."""

from support.chaos.asking import Answer, ask
from support.chaos.damage import chunk_files, damage, flip_bit, truncate
from support.chaos.load import Load
from support.chaos.prompts import Prompts, make_prompts

__all__ = ["Answer", "Load", "Prompts", "ask", "chunk_files", "damage", "flip_bit", "make_prompts", "truncate"]
