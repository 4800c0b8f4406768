"""What may be wrong with the disk of a server: it goes on with the host alone, answers rightly, and counts it."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragorder.adapters.observing.tier_stats import TierStats
from ragorder.eval.engines.server import VLLMServer
from support.chaos.cycles import latest_stats
from support.chaos.damage import chunk_files
from support.chaos.load import Load
from support.chaos.site import Site, make_site

_LOAD_S = 8.0


class ScenarioError(AssertionError):
    """A server did not do what it should have."""


def run_scenario(name: str, site: Site, folder: Path) -> dict[str, Any]:
    """What came of it, as JSON values. Raises ScenarioError, and EngineError for a server that does not come up."""
    return SCENARIOS[name](site, folder)


def _two_servers(site: Site, folder: Path) -> dict[str, Any]:
    """Two on one folder: the second one does without, and has it once the first is gone."""
    disk = folder / "disk"
    first, second = site.server(disk), site.server(disk)
    with first:
        filled = _serve(first, site)
        _check(_disk(filled).get("stored", 0) > 0, "the first server stored nothing on the disk")
        with second:
            without = _serve(second, site)
            _check(bool(_disk(without).get("refused")), "the second server did not count that it has no disk")
            _check(without.hits.disk == 0, "the second server read the first one's disk")
            first.kill()
            second.kill()
            second.start()
            after = _serve(second, site)
            _check(after.hits.disk > 0, "the disk was not taken over once the first server was gone")
    return {"refused": _disk(without)["refused"], "disk_tokens_after": after.hits.disk}


def _other_model(site: Site, folder: Path) -> dict[str, Any]:
    """A folder that another model of the same shape has filled: none of it is used, and none of it is lost."""
    disk = folder / "disk"
    with site.server(disk) as server:
        _serve(server, site)
    kept = chunk_files(disk)
    _check(bool(kept), "the first model left nothing on the disk")
    other = make_site(folder / "other", prompts=10, seed=1, launch=site.launch)
    with other.server(disk) as server:
        stats = _serve(server, other)
        _check(stats.hits.disk == 0, "a chunk of another model was used")
        _check(bool(_disk(stats).get("refused")), "the refusal of another model's folder was not counted")
    _check(chunk_files(disk) == kept, "chunks of another model were touched")
    return {"refused": _disk(stats)["refused"], "kept": len(kept)}


def _read_only(site: Site, folder: Path) -> dict[str, Any]:
    """A folder in which nothing can be written."""
    with _unwritable(folder) as (disk, how), site.server(disk) as server:
        stats = _serve(server, site)
    _check(bool(_disk(stats).get("refused")), "a folder that cannot be written to was not counted")
    _check(stats.hits.host > 0, "the host did not go on alone")
    return {"refused": _disk(stats)["refused"], "how": how}


def _full_disk(site: Site, folder: Path) -> dict[str, Any]:
    """Writes fail from some time on, and work again later: files may not be as large as a chunk (RLIMIT_FSIZE, which
    the system answers with EFBIG)."""
    disk = folder / "disk"
    with site.server(disk) as server:
        before = _serve(server, site)
        written = _disk(before)["stored"]
        with _small_files(server, site.chunk_bytes // 2):
            during = _serve(server, site)
        failed = {reason: count for reason, count in _disk(during)["refused"].items() if reason.startswith("write_")}
        _check(bool(failed), "writes that failed were not counted")
        # Writing is paused for a while after failures in a row.
        deadline = time.monotonic() + 60
        after = _serve(server, site)
        while _disk(after)["stored"] <= _disk(during)["stored"] and time.monotonic() < deadline:
            after = _serve(server, site)
        _check(_disk(after)["stored"] > _disk(during)["stored"], "writing was not taken up again")
    return {"stored_before": written, "failed": failed, "stored_after": _disk(after)["stored"]}


SCENARIOS: Mapping[str, Callable[[Site, Path], dict[str, Any]]] = {
    "two-servers": _two_servers,
    "other-model": _other_model,
    "read-only": _read_only,
    "full-disk": _full_disk,
}


def _serve(server: VLLMServer, site: Site) -> TierStats:
    """Load for a while: every answer is right, and the figures behind it."""
    with Load(server, site.prompts, site.expected, clients=2) as load:
        time.sleep(_LOAD_S)
    _check(not load.wrong, f"{load.wrong} wrong answers, off by up to {load.worst:.4f}")
    _check(not load.broken and not load.lost, f"{load.broken + load.lost} requests failed")
    _check(load.right > 0, "nothing was answered")
    _check(server.alive, "the server ended by itself")
    stats = latest_stats(server)
    if stats is None:
        raise ScenarioError("the server says nothing of its tiers")
    return stats


def _disk(stats: TierStats) -> dict[str, Any]:
    return next((tier for tier in stats.as_json()["tiers"] if tier["tier"] == "disk"), {})


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ScenarioError(message)


@contextmanager
def _unwritable(folder: Path) -> Iterator[tuple[Path, str]]:
    """A folder that the system makes read-only, and how: root may write nearly anywhere."""
    disk = folder / "disk"
    disk.mkdir()
    if os.geteuid():
        disk.chmod(0o500)
        try:
            yield disk, "permissions"
        finally:
            disk.chmod(0o700)
        return
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "ragorder-chaos", str(disk)],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        disk.rmdir()
        disk.write_bytes(b"")
        yield disk / "below-a-file", "a folder below a file"
        return
    try:
        yield disk, "mounted read-only"
    finally:
        subprocess.run(["umount", str(disk)], check=False)  # noqa: S607


@contextmanager
def _small_files(server: VLLMServer, limit: int) -> Iterator[None]:
    """None of a server's processes may make a file longer than that."""
    pids = _family(server.pid) if server.pid is not None else []
    kept = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in kept.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        for pid, limits in kept.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    return [pid, *(each for child in children for each in _family(int(child)))]
