"""The parts of orderer, engine, cache and search that are no interface: the one place where tests reach for them."""

from __future__ import annotations

from typing import Any


def scopes_of(orderer: Any) -> Any:
    return orderer._scopes


def cache_of(engine: Any) -> Any:
    return engine._cache


def runner_of(engine: Any) -> Any:
    return engine._runner


def scheduler_of(engine: Any) -> Any:
    return engine._scheduler


def scorer_of(engine: Any) -> Any:
    return engine._scheduler._fuser._scorer


def streamer_of(engine: Any) -> Any:
    return engine._streamer


def await_reads(streamer: Any) -> None:
    """Wait until no layer is queued or being read."""
    ring = streamer._ring
    with ring._changed:
        assert ring._changed.wait_for(lambda: not ring._jobs, 60)


def tiers_of(cache: Any) -> Any:
    return cache._tiers


def device_of(cache: Any) -> Any:
    return cache._tiers.device


def host_of(cache: Any) -> Any:
    return cache._tiers.host


def disk_of(cache: Any) -> Any:
    return cache._tiers.disk


def leases_of(cache: Any) -> Any:
    return cache._leases


def copies_of(cache: Any) -> Any:
    return cache._tiers.copies


def running_copies(cache: Any) -> Any:
    return cache._tiers.copies._running


def file_of(search: Any) -> Any:
    """The index file of a search by partition."""
    return search._file


def scanner_of(search: Any) -> Any:
    return search._scanner


def reads_ahead(passing: Any) -> bool:
    """Whether the next partition of a pass has been asked for, and no stage waits for it."""
    return passing._walk._reading is not None


def reader_of(search: Any) -> Any:
    """The thread that reads partitions."""
    return search._reader
