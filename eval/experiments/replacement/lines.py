"""Lines of type "replacement", as the harness writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["RUN", "Replaced"]

RUN = 10
"""Consecutive requests whose figures are added up before they are compared: there are thousands."""

_COLUMNS = ("retrieved", "hits", "prefill_ms")
_FACTS = ("working_set_tokens", "device_tokens", "host_tokens", "seen_percent")


@dataclass(frozen=True, slots=True)
class Replaced:
    """One policy on one stream, request by request; or, where it was timed, what scheduling took."""

    session: str
    suite: str
    cell: Mapping[str, Any]
    seed: int
    policy: str
    engine: Mapping[str, Any]
    warmup: int
    facts: Mapping[str, float]
    rows: Mapping[str, Floats]
    scheduling: Mapping[str, float] | None = None
    load_average: float | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Replaced:
        """Raises KeyError, TypeError or ValueError for a line that does not say all it must."""
        import numpy as np

        told, scheduling = entry.get("rows") or {}, entry.get("scheduling")
        rows = {name: np.array(told[name], dtype=float) for name in _COLUMNS if name in told}
        if scheduling is not None:
            scheduling = {name: float(scheduling[name]) for name in ("p50_ms", "p99_ms", "max_ms", "requests")}
        elif len({len(rows[name]) for name in _COLUMNS}) != 1:
            raise ValueError("columns of different lengths")
        elif not entry["facts"].keys() >= set(_FACTS):
            raise KeyError("facts")
        rows["requests"] = np.ones(len(told.get("hits", ())))
        return cls(
            str(entry.get("session", "")),
            str(entry["suite"]),
            dict(entry["cell"]),
            int(entry.get("seed", 0)),
            str(entry["policy"]),
            dict(entry.get("engine") or {}),
            int(entry.get("warmup", 0)),
            {name: float(value) for name, value in (entry.get("facts") or {}).items()},
            rows,
            scheduling,
            entry.get("load_average"),
        )

    @property
    def requests(self) -> int:
        """How many were served after the warm-up."""
        if self.scheduling is not None:
            return int(self.scheduling["requests"])
        return len(self.column("requests"))

    def column(self, name: str) -> Floats:
        """The figures after the warm-up."""
        return self.rows[name][self.warmup :]

    def sums(self, name: str) -> Floats:
        """The same, added up over runs of up to `RUN` consecutive requests, fewer where there are few in all."""
        import numpy as np

        values = self.column(name)
        run = max(1, min(RUN, len(values) // 200))
        found: Floats = np.add.reduceat(values, np.arange(0, len(values), run))
        return found
