"""Lines of type "pipelining", as the harness writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["Pipelined"]


@dataclass(frozen=True, slots=True)
class Pipelined:
    """One cell with one seed: rows of each mode, which took turns, by name of mode and column."""

    session: str
    suite: str
    cell: Mapping[str, Any]
    seed: int
    policy: str
    engine: Mapping[str, Any]
    warmup: int
    rows: Mapping[str, Mapping[str, Sequence[Any]]]
    system_tokens: int
    load_average: float | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Pipelined:
        """Raises KeyError, TypeError or ValueError for a line that does not say all it must."""
        rows = {mode: dict(columns) for mode, columns in entry["rows"].items()}
        if len({len(values) for columns in rows.values() for values in columns.values()}) != 1:
            raise ValueError("columns of different lengths")
        return cls(
            str(entry.get("session", "")),
            str(entry["suite"]),
            dict(entry["cell"]),
            int(entry.get("seed", 0)),
            str(entry["policy"]),
            dict(entry.get("engine") or {}),
            int(entry.get("warmup", 0)),
            rows,
            int(entry["system_tokens"]),
            entry.get("load_average"),
        )

    @property
    def requests(self) -> int:
        """How many were served after the warm-up, in all modes."""
        throughput = self.column("none", "requests")
        if len(throughput):
            return int(sum(self.column(mode, "requests").sum() for mode in self.rows))
        return sum(len(self.column(mode, "ttft_ms")) for mode in self.rows)

    def column(self, mode: str, name: str) -> Floats:
        """The figures after the warm-up, NaN where there is none."""
        import numpy as np

        values = self.rows.get(mode, {}).get(name, ())
        return np.array([np.nan if value is None else value for value in values], dtype=float)[self.warmup :]

    def entries(self, mode: str, name: str) -> Sequence[Any]:
        """The same of a column whose entries are no numbers."""
        return self.rows.get(mode, {}).get(name, ())[self.warmup :]
