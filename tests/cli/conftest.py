"""What tests of commands share: an environment without settings, and a wide terminal."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAGORDER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder for what is made of the standard library's documentation, apart from the user's."""
    pytest.importorskip("bm25s")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
