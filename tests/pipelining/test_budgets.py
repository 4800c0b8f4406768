"""Budgets of memory: sizes as people write them, and what this machine has."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragorder.pipelining.placement.budgets import Budgets, cgroup_headroom, device_memory, disk_memory, format_bytes


def group(folder: Path, limit: str, used: int, reclaimable: int, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {reclaimable}\n")


class TestSizes:
    def test_are_numbers_or_text(self) -> None:
        budgets = Budgets("6GiB", 24 << 30, disk_bytes="1.5 GB")
        assert (budgets.device_bytes, budgets.host_bytes, budgets.disk_bytes) == (6 << 30, 24 << 30, 1_500_000_000)
        assert not budgets.unified
        assert budgets == Budgets(6 << 30, "24GiB", 1_500_000_000)
        assert replace(Budgets(1, 2, 3, unified=True), host_bytes=20) == Budgets(1, 20, 3, unified=True)

    @pytest.mark.parametrize("size", [-1, "-1GiB", "six", "6 apples", "", 1.5, True, None])
    @pytest.mark.parametrize("name", ["device_bytes", "host_bytes", "disk_bytes"])
    def test_bad_sizes_are_refused_by_name(self, name: str, size: Any) -> None:
        sizes: dict[str, Any] = {"device_bytes": 1, "host_bytes": 1, name: size}
        with pytest.raises(ValueError, match=name):
            Budgets(**sizes)

    @pytest.mark.parametrize(
        ("size", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5,120.0 GiB")],
    )
    def test_are_shown(self, size: int, text: str) -> None:
        assert format_bytes(size) == text


class TestThisMachine:
    def test_is_within_what_is_free(self, tmp_path: Path) -> None:
        psutil = pytest.importorskip("psutil")
        budgets = Budgets.of_this_machine(tmp_path, share=0.5)
        assert 0 < budgets.host_bytes < psutil.virtual_memory().total
        assert 0 < budgets.disk_bytes < disk_memory(tmp_path)
        assert budgets.unified == (device_memory() is None)
        if budgets.unified:
            assert budgets.device_bytes == budgets.host_bytes

    @pytest.mark.parametrize("share", [0, -0.5, 1.5])
    def test_a_share_outside_0_to_1_is_refused(self, share: float) -> None:
        with pytest.raises(ValueError, match="share"):
            Budgets.of_this_machine(share=share)

    def test_a_folder_to_be_made_is_on_its_parents_disk(self, tmp_path: Path) -> None:
        assert disk_memory(tmp_path / "a" / "b") == pytest.approx(disk_memory(tmp_path), rel=0.1)

    def test_the_limit_of_the_process_counts(self) -> None:
        script = (
            "import resource\n"
            "from ragorder.pipelining.placement.budgets import host_memory\n"
            "import psutil\n"
            "limit = psutil.Process().memory_info().vms + (64 << 20)\n"
            "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
            "print(host_memory())"
        )
        pytest.importorskip("psutil")
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert 0 < int(done.stdout) <= 64 << 20

    @pytest.mark.parametrize(
        ("script", "visible", "found"),
        [
            ('echo "$@" > "$(dirname "$0")/called"\nprintf "8192\\n4096\\n"', "3,1", 8192 << 20),
            # A driver that fails is no GPU, nor is one that is hidden.
            ("echo broken\nexit 9", None, None),
            ("echo 8192", "", None),
        ],
    )
    def test_a_gpu_is_read_from_its_driver(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, visible: str | None, found: int | None
    ) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert device_memory() == found
        assert not visible or "-i 3" in (tmp_path / "called").read_text()


class TestControlGroups:
    @pytest.mark.parametrize(
        ("groups", "membership", "headroom"),
        [
            # The least of the group and those above it.
            ({"a": ("1000", 400, 0), "a/b": ("800", 300, 50)}, "0::/a/b", 550),
            ({"a": ("1000", 700, 100), "a/b": ("800", 300, 50)}, "0::/a/b", 400),
            # File pages that can go are free.
            ({".": ("1000", 990, 600)}, "0::/", 610),
            # Inside a container its own group is at the top.
            ({".": ("1000", 100, 0)}, "0::/docker/abc", 900),
            ({"memory/job": ("5000", 1000, 200)}, "5:cpu,cpuacct:/job\n4:memory:/job", 4200),
            ({".": ("max", 100, 0)}, "0::/", None),
            ({}, None, None),
            ({".": ("100", 150, 0)}, "0::/", 0),
        ],
    )
    def test_headroom_of_nested_groups(
        self, tmp_path: Path, groups: dict[str, tuple[str, int, int]], membership: str | None, headroom: int | None
    ) -> None:
        for name, (limit, used, reclaimable) in groups.items():
            group(tmp_path / name, limit, used, reclaimable, version=1 if name.startswith("memory") else 2)
        if membership is not None:
            (tmp_path / "membership").write_text(f"{membership}\n")
        assert cgroup_headroom(tmp_path, tmp_path / "membership") == headroom
