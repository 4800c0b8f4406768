"""Fixtures of the embedded engine: a small model, and engines on it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from support.small_engine import Make, small_model


@pytest.fixture(scope="session")
def model() -> Any:
    """Two layers of random weights."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return small_model()


@pytest.fixture(scope="session")
def plain(model: Any) -> Any:
    """The same model without an engine."""
    return copy.deepcopy(model)


@pytest.fixture
def make(model: Any) -> Iterator[Make]:
    """Engines on copies of the model that share its weights. Closed in the end."""
    from ragorder.kernels.engine import EngineSettings, TieredEngine

    engines: list[TieredEngine] = []

    def made(tokenizer: Any | None = None, *, of: Any = None, **settings: Any) -> TieredEngine:
        options = {"device_tokens": 2048, "host_bytes": 0, "verify": False} | settings
        clone = copy.deepcopy(model if of is None else of)
        engines.append(TieredEngine(clone, tokenizer, EngineSettings(**options)))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


@pytest.fixture
def fusing(make: Make) -> Make:
    return lambda **settings: make(reuse="fused", **settings)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The positions that each fused request recomputes."""
    from ragorder.kernels.engine.sequence import Sequence

    found: list[list[int]] = []
    choose = Sequence.choose

    def recorded(sequence: Any, positions: Any, **options: Any) -> None:
        found.append(positions.tolist())
        choose(sequence, positions, **options)

    monkeypatch.setattr(Sequence, "choose", recorded)
    return found
