"""Times of copies between a vLLM server's tiers, from its metrics."""

from __future__ import annotations

import re

__all__ = ["copy_times"]

_COPIES = re.compile(
    r"^vllm:kv_offload_(?P<name>(?:load|store|tiering_read|tiering_write)_(?:bytes|time))_total(?:\{[^}\n]*\})? "
    r"(?P<value>[0-9.]+(?:e[+-]?[0-9]{1,3})?)$",
    re.MULTILINE,
)


def copy_times(page: str, token_bytes: float) -> dict[str, float]:
    """Return the seconds to copy a token of `token_bytes` to the device from "host" memory, and from "disk" through it:
    from the loads so far, else from the copies in the other direction. A tier without either is left out."""
    sums: dict[str, float] = {}
    for found in _COPIES.finditer(page):
        sums[found["name"]] = sums.get(found["name"], 0.0) + float(found["value"])

    def a_token(*copies: str) -> float | None:
        for name in copies:
            if (size := sums.get(f"{name}_bytes", 0.0)) and (time_s := sums.get(f"{name}_time", 0.0)):
                return token_bytes * time_s / size
        return None

    host_s = a_token("load", "store")
    disk_s = a_token("tiering_read", "tiering_write")
    times = {} if host_s is None else {"host": host_s}
    if host_s is not None and disk_s is not None:
        times["disk"] = host_s + disk_s
    return times
