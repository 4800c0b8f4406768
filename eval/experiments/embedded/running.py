"""One invocation: what is measured, and how it is kept."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ragorder.eval.data.machine import describe_environment
from ragorder.eval.running.record import RESULTS, SCHEMA
from ragorder.eval.running.store import Store

__all__ = ["Advance", "Experiment", "Rows", "read_lines", "run"]

_SUITE = "embedded"

Advance = Callable[[], None]
Rows = Mapping[str, Sequence[float]]
"""Columns of figures, one row a repetition or request."""


@dataclass(frozen=True)
class Experiment:
    """What is measured together: the arms take turns, or there is only one. `cell` says everything else that tells two
    measurements apart, `warmup` how many rows count for nothing, `steps` how often `measure` (of a seed) advances."""

    cell: Mapping[str, Any]
    arms: Sequence[str]
    measure: Callable[[int, Advance], Mapping[str, Rows]]
    steps: int
    warmup: int = 0

    def key(self, seed: int, arm: str) -> dict[str, Any]:
        """What makes a line of the results one of its kind."""
        return {"suite": _SUITE, "cell": dict(self.cell), "seed": seed, "policy": arm}


def run(
    experiments: Sequence[Experiment],
    seeds: Sequence[int],
    store: Store,
    progress: Callable[[str, int], Advance],
    arguments: Mapping[str, Any],
) -> None:
    """Measure what the store does not have; each experiment and seed is on the disk as soon as it is measured.

    Raises EngineError for an engine that does not do what is measured, OSError for results that cannot be written.
    """
    todo = [
        (experiment, seed)
        for experiment in experiments
        for seed in seeds
        if not all(store.has("run", **experiment.key(seed, arm)) for arm in experiment.arms)
    ]
    if not todo:
        return
    session = secrets.token_hex(4)
    store.append(
        {
            "type": "session",
            "schema": SCHEMA,
            "session": session,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "arguments": dict(arguments),
            "environment": describe_environment(),
        }
    )
    advance = progress("prompts", sum(experiment.steps for experiment, _ in todo))
    for experiment, seed in todo:
        for arm, rows in experiment.measure(seed, advance).items():
            store.append(
                {
                    "type": "run",
                    "session": session,
                    **experiment.key(seed, arm),
                    "engine": {"name": "torch", "model": experiment.cell["shape"]},
                    "warmup": experiment.warmup,
                    "failures": 0,
                    "rows": {name: [round(value, 3) for value in values] for name, values in rows.items()},
                }
            )


def read_lines(experiments: Sequence[Experiment], seeds: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """The results of these: one line for each experiment, seed and arm that was measured, in this order."""
    found = {_name(line): line for line in _lines(folder / RESULTS) if line.get("suite") == _SUITE}
    keys = (experiment.key(seed, arm) for experiment in experiments for seed in seeds for arm in experiment.arms)
    return [found[name] for name in map(_name, keys) if name in found]


def _name(line: Mapping[str, Any]) -> str:
    return json.dumps([line.get(name) for name in ("suite", "cell", "seed", "policy")], sort_keys=True)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line
