"""Lines of type "tiering", as the harness writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragorder.adapters.observing.tier_stats import SOURCES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["Tiered"]

_COLUMNS = ("ttft_ms", "cached_tokens", "prompt_tokens")
_FACTS = ("blocks", "host_bytes", "working_set_tokens")


@dataclass(frozen=True, slots=True)
class Tiered:
    """One arm (the prefix cache alone, or with tiers) in one cell with one seed, request by request; `sources` are the
    prompt tokens behind the warm-up by where their KV came from."""

    session: str
    suite: str
    cell: Mapping[str, Any]
    seed: int
    policy: str
    engine: Mapping[str, Any]
    warmup: int
    facts: Mapping[str, Any]
    sources: Mapping[str, int]
    rows: Mapping[str, Floats]
    load_average: float | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Tiered:
        """Raises KeyError, TypeError or ValueError for a line that does not say all it must."""
        import numpy as np

        rows = {name: np.array(entry["rows"][name], dtype=float) for name in _COLUMNS}
        if len({len(column) for column in rows.values()}) != 1:
            raise ValueError("columns of different lengths")
        facts = dict(entry["facts"])
        if not facts.keys() >= set(_FACTS):
            raise KeyError("facts")
        return cls(
            str(entry.get("session", "")),
            str(entry["suite"]),
            {"tier": str(entry["cell"]["tier"]), **entry["cell"]},
            int(entry.get("seed", 0)),
            str(entry["policy"]),
            dict(entry.get("engine") or {}),
            int(entry.get("warmup", 0)),
            facts,
            {source: int(entry["sources"][source]) for source in SOURCES},
            rows,
            entry.get("load_average"),
        )

    @property
    def requests(self) -> int:
        """How many were served after the warm-up."""
        return len(self.ttft_ms)

    @property
    def ttft_ms(self) -> Floats:
        """Of each request after the warm-up."""
        return self.rows["ttft_ms"][self.warmup :]

    @property
    def block_size(self) -> int:
        """Of the engine, in tokens."""
        return int(self.engine.get("block_size") or 1)
