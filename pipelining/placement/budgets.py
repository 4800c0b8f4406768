"""Memory budgets of a placement (RAGDoll Eq. 1)."""

from __future__ import annotations

import math
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ragorder.common.counts import parse_size
from ragorder.common.extras import needs

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_GPU_TIMEOUT_S = 10.0
# Files with the limit, the use, and the share of the use that the kernel can reclaim: file pages not recently used.
_FILES = {
    "v2": ("memory.max", "memory.current", "inactive_file"),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def device_memory() -> int | None:
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
        answer = subprocess.run(query, capture_output=True, timeout=_GPU_TIMEOUT_S, check=True).stdout  # noqa: S603
        return int(answer.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def is_gpu(device: str | None) -> bool:
    """Return whether the device is a GPU; None stands for a GPU if one is here, else the CPU."""
    return device_memory() is not None if device is None else device != "cpu"


def host_memory() -> int:
    """Return the bytes of RAM available: the least of machine, control group and RLIMIT_AS."""
    with needs("live", "reading this machine's memory"):
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
    path = Path(folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def cgroup_headroom(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes that control groups (version 2 or 1) leave, or None without a limit."""
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
        # In a container the path may be that of the host, and its own group is at the top.
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


@dataclass(frozen=True, slots=True, init=False)
class Budgets:
    """Bytes that may be used (on the disk for KV only).

        Budgets("6GiB", "24GiB", disk_bytes="100GiB")

    `unified`: the device computes in host memory, as a CPU does; both together are within `host_bytes`.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    unified: bool

    def __init__(
        self, device_bytes: int | str, host_bytes: int | str, disk_bytes: int | str = 0, *, unified: bool = False
    ) -> None:
        sizes = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
        for name, size in sizes.items():
            object.__setattr__(self, name, _parsed(name, size))
        object.__setattr__(self, "unified", unified)

    @classmethod
    def of_this_machine(cls, folder: Path | str = ".", share: float = 0.9) -> Self:
        if not 0 < share <= 1:
            raise ValueError(f"share is above 0 and at most 1, got {share}")
        host, gpu = host_memory(), device_memory()
        sizes = [math.floor(share * size) for size in (host if gpu is None else gpu, host, disk_memory(folder))]
        return cls(*sizes, unified=gpu is None)


def format_bytes(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} B"


def _parsed(name: str, size: int | str) -> int:
    if isinstance(size, str):
        try:
            return parse_size(size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"{name} is {size!r}: give 0 or more bytes, as a whole number or as text such as 6GiB")
    return size
