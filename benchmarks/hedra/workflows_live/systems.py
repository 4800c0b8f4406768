"""Systems that serve workflows on real parts."""

from __future__ import annotations

from ragorder.benchmarks.hedra.workflows.systems import SYSTEMS as VIRTUAL
from ragorder.benchmarks.hedra.workflows.systems import System

__all__ = ["SYSTEMS"]

SYSTEMS = {
    "lockstep": System("batches stage by stage", "alone", lockstep=32),
    "stages": System("stage by stage", "alone"),
    "batched": System("whole searches batched", "batch"),
    "hedra": VIRTUAL["hedra"],
    "hedra+order": VIRTUAL["hedra+order"],
}
"""By policy. One core searches, another computes."""
