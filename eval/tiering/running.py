"""One invocation: what is measured, in which order, and how it is kept."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ragorder.eval.environment import describe_environment
from ragorder.eval.harness.store import RESULTS, SCHEMA, Store
from ragorder.eval.tiering.cells import TieringCell
from ragorder.eval.tiering.measuring import measure, pair_of_servers
from ragorder.eval.tiering.requests import Stream
from ragorder.eval.tiering.results import ARMS

__all__ = ["Plan", "read_lines", "run"]

_SUITE = "tiers"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured: each cell on each seed's stream, `warmup` requests of which count for nothing, with
    `segment` requests in a turn. `settings` are those of the tiers, and `facts` what else stands in a result's cell."""

    model: Path
    cells: Sequence[TieringCell]
    streams: Mapping[int, Stream]
    block_size: int
    warmup: int
    segment: int
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]

    def key(self, cell: TieringCell, seed: int, arm: str) -> dict[str, Any]:
        """What makes a line of the results one of its kind."""
        fields = {**self.facts, **self.settings, **cell.fields(), "warmup": self.warmup}
        return {"suite": _SUITE, "cell": fields, "seed": seed, "policy": arm}


def run(plan: Plan, store: Store, progress: Callable[[str, int], Callable[[], None]]) -> None:
    """Measure what the store does not have. Raises EngineError for a server that does not come up or fails a request,
    OSError for results that cannot be written."""
    todo = [(cell, seed) for cell in plan.cells for seed in plan.streams if not _done(plan, store, cell, seed)]
    if not todo:
        return
    session = secrets.token_hex(4)
    arguments = {**plan.facts, **plan.settings, "segment": plan.segment, "seeds": list(plan.streams)}
    store.append(
        {
            "type": "session",
            "schema": SCHEMA,
            "session": session,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "arguments": arguments,
            "environment": describe_environment(),
        }
    )
    advance = progress("requests", len(ARMS) * sum(len(plan.streams[seed].prompts) for _, seed in todo))
    longest = max(stream.longest_tokens for stream in plan.streams.values())
    for cell in plan.cells:
        seeds = [seed for other, seed in todo if other == cell]
        if not seeds:
            continue
        with pair_of_servers(
            cell, plan.model, block_size=plan.block_size, longest_tokens=longest, settings=plan.settings
        ) as servers:
            for seed in seeds:
                serving = measure(
                    servers,
                    plan.streams[seed],
                    warmup=plan.warmup,
                    segment=plan.segment,
                    first=seed,
                    advance=advance,
                )
                for turn in asyncio.run(serving):
                    rows = {name: value for name, value in asdict(turn).items() if name not in ("arm", "hits")}
                    store.append(
                        {
                            "type": "run",
                            "session": session,
                            **plan.key(cell, seed, turn.arm),
                            "engine": {"name": "openai", "model": plan.model.name, "block_size": plan.block_size},
                            "warmup": plan.warmup,
                            "failures": 0,
                            "sources": turn.hits.as_json(),
                            "rows": rows,
                        }
                    )


def read_lines(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """The results of this plan: one line for each cell, seed and arm that was measured, cell by cell."""
    found: dict[str, dict[str, Any]] = {}
    for line in _lines(folder / RESULTS):
        if line.get("type") == "run" and line.get("suite") == _SUITE:
            key = {name: line.get(name) for name in ("suite", "cell", "seed", "policy")}
            found[json.dumps(key, sort_keys=True)] = line
    keys = (plan.key(cell, seed, arm) for cell in plan.cells for seed in plan.streams for arm in ARMS)
    wanted = (json.dumps(key, sort_keys=True) for key in keys)
    return [found[key] for key in wanted if key in found]


def _done(plan: Plan, store: Store, cell: TieringCell, seed: int) -> bool:
    return all(store.has("run", **plan.key(cell, seed, arm)) for arm in ARMS)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line
