"""Kill a server under load, damage its disk, start it again; and so on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.observing.tier_stats import TierFigures, TierStats, fetch_tier_stats
from ragorder.eval.engines.server import VLLMServer, launch_process
from support.chaos.damage import chunk_files, damage
from support.chaos.load import Load
from support.chaos.site import Site

_FIRST_ANSWER_S = 60.0
"""A process has much to do at its first requests: how long depends on what else the machine does."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """One life of a server: what it found on the disk, of which so many chunks were `damaged`, what it answered, what
    it refused (by reason) and had from the disk, in tokens. It began in a `fresh` process or in a forked one, and was
    up after `start_s`. `faults` says what went wrong, in words: nothing, as it should be."""

    number: int
    fresh: bool
    start_s: float
    found: int
    damaged: int
    right: int = 0
    wrong: int = 0
    lost: int = 0
    worst: float = 0.0
    cached_tokens: int = 0
    disk_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def run_cycles(
    site: Site,
    disk: Path,
    cycles: int,
    *,
    seed: int = 0,
    load_s: tuple[float, float] = (3.0, 10.0),
    fresh_every: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Cycle]:
    """So many lives of one server on one folder, each ended by SIGKILL under load, with damage done before the next.

    One in `fresh_every` begins in a fresh process, the others as the site launches its servers. From its first answer a
    server lives for a time between those of `load_s`, drawn again. Raises EngineError if one does not come up.
    """
    rng = random.Random(seed)
    fresh_server, usual_server = site.server(disk, launch_process), site.server(disk)
    damaged = 0
    try:
        for number in range(cycles):
            found = len(chunk_files(disk))
            fresh = number % fresh_every == 0
            server = fresh_server if fresh else usual_server
            started = time.monotonic()
            server.start()
            start_s = time.monotonic() - started
            with Load(server, site.prompts, site.expected, seed=number) as load:
                until = load.wait_for_an_answer(_FIRST_ANSWER_S) + rng.uniform(*load_s)
                stats: TierStats | None = None
                lost = 0
                while time.monotonic() < until:
                    stats = latest_stats(server) or stats
                    lost = load.lost
                    time.sleep(0.25)
                alive = server.alive
                server.kill()
            life = Cycle(number, fresh, round(start_s, 2), found, damaged)
            yield _judge(life, load, lost, stats, alive=alive)
            advance()
            damaged = damage(disk, rng)
    finally:
        fresh_server.stop()
        usual_server.stop()


def latest_stats(server: VLLMServer) -> TierStats | None:
    """None while there are none."""
    with suppress(ServerError):
        return fetch_tier_stats(server.base_url)
    return None


def _judge(life: Cycle, load: Load, lost: int, stats: TierStats | None, *, alive: bool) -> Cycle:
    """With what the server said of itself, and what must not be; `lost` before it was killed."""
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
    if life.damaged == 0 and any(refused.get(reason) for reason in ("checksum", "foreign", "identity")):
        faults.append("chunks were refused that nobody had damaged")
    return replace(
        life,
        right=load.right,
        wrong=load.wrong,
        lost=load.lost,
        worst=load.worst,
        cached_tokens=load.cached_tokens,
        disk_tokens=0 if stats is None else stats.hits.disk,
        refused=dict(refused),
        faults=tuple(faults),
    )


def _of_disk(stats: TierStats) -> TierFigures:
    nothing = TierFigures("disk", 0, 0, 0, 0.0)
    return next((tier for tier in stats.tiers if tier.tier == "disk"), nothing)
