"""Kill a server under load, damage its disk, start it again; and so on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ragorder.adapters._server import ServerError
from ragorder.adapters.tier_stats import TierFigures, TierStats, fetch_tier_stats
from ragorder.eval.tiering.chaos.damage import chunk_files, damage
from ragorder.eval.tiering.chaos.load import Load
from ragorder.eval.tiering.chaos.site import Site
from ragorder.eval.vllm_server import VLLMServer

__all__ = ["Cycle", "latest_stats", "run_cycles"]

_LOAD_S = (3.0, 10.0)


@dataclass(frozen=True, slots=True)
class Cycle:
    """One life of a server: what it found on the disk, of which so many chunks were `damaged`, what it answered, what
    it refused (by reason) and had from the disk, in tokens. `faults` says what went wrong, in words: nothing, as it
    should be."""

    number: int
    found: int
    damaged: int
    right: int
    wrong: int
    lost: int
    worst: float
    cached_tokens: int
    disk_tokens: int
    refused: dict[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def run_cycles(
    site: Site, disk: Path, cycles: int, *, seed: int = 0, advance: Callable[[], None] = lambda: None
) -> Iterator[Cycle]:
    """So many lives of one server on one folder, each ended by SIGKILL under load, with damage done before the next.

    Raises EngineError if it does not come up again.
    """
    rng = random.Random(seed)
    server, damaged = site.server(disk), 0
    try:
        for number in range(cycles):
            found = len(chunk_files(disk))
            server.start()
            with Load(server, site.prompts, site.expected, seed=number) as load:
                until = time.monotonic() + rng.uniform(*_LOAD_S)
                stats: TierStats | None = None
                lost = 0
                while time.monotonic() < until:
                    stats = latest_stats(server) or stats
                    lost = load.lost
                    time.sleep(0.25)
                alive = server.alive
                server.kill()
            yield _judge(number, found, damaged, load, lost, stats, alive=alive)
            advance()
            damaged = damage(disk, rng)
    finally:
        server.stop()


def latest_stats(server: VLLMServer) -> TierStats | None:
    """None while there are none."""
    with suppress(ServerError):
        return fetch_tier_stats(server.base_url)
    return None


def _judge(
    number: int, found: int, damaged: int, load: Load, lost: int, stats: TierStats | None, *, alive: bool
) -> Cycle:
    faults = []
    if load.wrong:
        faults.append(f"{load.wrong} wrong answers")
    if load.broken:
        faults.append(f"{load.broken} requests ended in an error")
    if lost:
        faults.append(f"{lost} requests were lost before the server was killed")
    if not alive:
        faults.append("the server ended by itself")
    if not load.right:
        faults.append("nothing was answered")
    if stats is None:
        faults.append("there were no figures")
    elif not any(tier.tier == "disk" for tier in stats.tiers):
        faults.append("the server has no disk")
    refused = _of_disk(stats).refused if stats is not None else {}
    if damaged == 0 and any(refused.get(reason) for reason in ("checksum", "foreign", "identity")):
        faults.append("chunks were refused that nobody had damaged")
    return Cycle(
        number,
        found,
        damaged,
        load.right,
        load.wrong,
        load.lost,
        load.worst,
        load.cached_tokens,
        0 if stats is None else stats.hits.disk,
        dict(refused),
        tuple(faults),
    )


def _of_disk(stats: TierStats) -> TierFigures:
    nothing = TierFigures("disk", 0, 0, 0, 0.0)
    return next((tier for tier in stats.tiers if tier.tier == "disk"), nothing)
