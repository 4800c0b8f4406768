"""Systems with each of the three parts on or off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SYSTEMS", "System"]


@dataclass(frozen=True, slots=True)
class System:
    """`workflows`: searches and generations of all requests share their time, else stage by stage. `copies`: documents
    are reused wherever they stand, else in an exact prefix. `streamed`: the device holds a part of the layers, else
    all. `ordered`: documents are ordered for the cache, else as ranked."""

    workflows: bool = True
    copies: bool = True
    streamed: bool = True
    ordered: bool = True


SYSTEMS: Mapping[str, System] = {
    "all three": System(),
    "without workflows": System(workflows=False),
    "without copies": System(copies=False),
    "without streaming": System(streamed=False),
    "without ordering": System(ordered=False),
    "streaming alone": System(workflows=False, copies=False, ordered=False),
    "none": System(workflows=False, copies=False, streamed=False, ordered=False),
}
"""By policy."""
