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


@pytest.mark.parametrize(("budget", "device_layers"), [(300, None), (360, None), (600, 12)])
def test_what_is_planned_is_placed_and_the_process_stays_within_5_percent(
    folder: Path, budget: int, device_layers: int | None
) -> None:
    found: dict[str, Any] = json.loads(run(folder, budget << 20).splitlines()[-1])
    assert found["placed"] == found["plan"]
    assert found["measured"] <= 1.05 * found["planned"] <= 1.05 * (budget << 20), found
    if device_layers is None:
        # What is left over is less than the model could use.
        assert found["planned"] >= 0.9 * (budget << 20) and found["plan"]["weights"]["device"] < 12
    else:
        assert found["plan"]["weights"]["device"] == device_layers
