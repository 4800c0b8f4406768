"""Planned bytes against the memory of a process that has a model and an index placed so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some 320 MB, and an index of 100."""
    for name in ("torch", "transformers", "faiss", "psutil"):
        pytest.importorskip(name)
    if sys.platform != "linux":
        pytest.skip("resident memory is read from /proc")
    from support.placed_memory import make_index, make_model

    folder = tmp_path_factory.mktemp("placed")
    make_model(folder / "model", layers=12, hidden=768)
    make_index(folder / "index.faiss", vectors=390_000)
    run(folder)
    return folder


def run(*arguments: Any) -> str:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-m", "support.placed_memory", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("budget", [300, 360, 600], ids=["few layers", "more layers", "all"])
def test_planned_bytes_are_the_processs_within_5_percent(folder: Path, budget: int) -> None:
    """What stays is all there; what passes through is there at most at once, which is the scheduler's business."""
    found: dict[str, Any] = json.loads(run(folder, budget << 20).splitlines()[-1])
    assert found["planned"] <= budget << 20
    passes = ("streamed", "transit", "workspace")
    passing = sum(size for name, size in found["parts"].items() if any(word in name for word in passes))
    assert 0.95 * (found["planned"] - passing) <= found["measured"] <= 1.05 * found["planned"], found
    assert found["device_layers"] == 12 if budget == 600 else found["device_layers"] < 12
