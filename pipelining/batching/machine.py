"""Memory of this machine that is free for a model and an index: GPU, RAM within its limits, disk."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from ragorder.extras import needs

__all__ = ["cgroup_headroom", "device_memory", "disk_memory", "host_memory"]

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_GPU_TIMEOUT_S = 10.0
# Limit, use, and what of the use the kernel gives back when memory is short: file pages not lately used.
_FILES = {
    "v2": ("memory.max", "memory.current", "inactive_file"),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def device_memory() -> int | None:
    """Free bytes of the first GPU that CUDA_VISIBLE_DEVICES leaves, by nvidia-smi, which comes with the driver; None
    without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return None
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if visible is not None:
        query += ["-i", visible.split(",")[0].strip()]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True).stdout  # noqa: S603
        return int(answer.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def host_memory() -> int:
    """Bytes of RAM that can be taken without swapping: what the machine, the control group and RLIMIT_AS leave, the
    least of them. Raises ImportError without psutil."""
    with needs("memory", "reading this machine's memory"):
        import psutil

    free = [int(psutil.virtual_memory().available)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free.append(limit - int(psutil.Process().memory_info().vms))
    headroom = cgroup_headroom()
    if headroom is not None:
        free.append(headroom)
    return max(0, min(free))


def disk_memory(folder: Path | str) -> int:
    """Free bytes of the file system of `folder`, or of its first parent that exists."""
    path = Path(folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def cgroup_headroom(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the process's control groups (version 2 or 1) and all above them leave; None without a limit."""
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version, top = ("v1", root / "memory") if controllers else ("v2", root)
        # Inside a container the path may be the host's, and its own group is at the top.
        parts = Path(path.lstrip("/")).parts
        groups = [top.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
        left += [free for group in groups if (free := _free_of(group, *_FILES[version])) is not None]
    return max(0, min(left)) if left else None


def _free_of(group: Path, limit_file: str, use_file: str, reclaimable: str) -> int | None:
    try:
        limit = (group / limit_file).read_text("utf-8").strip()
        if limit == "max":
            return None
        used = int((group / use_file).read_text("utf-8"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines())
        return int(limit) - used + int(statistics.get(reclaimable, 0))
    except (OSError, ValueError):
        return None
