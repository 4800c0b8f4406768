"""Engines with a small model, and clients of their applications."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from support.embedded_app import LONGEST, TEXTS, Client, Load, reaching

from ragorder.adapters.embedded import EngineWorker, make_engine_app
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "embedded"
    texts = [*TEXTS.values(), "Answer from the documents, please. Question: which?"]
    return make_model(folder, texts=texts, layers=2, hidden_size=64, vocab_size=600, max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def load(model: Path) -> Iterator[Load]:
    """Loads engines, each with a worker."""
    workers: list[EngineWorker] = []

    def load(max_unfinished: int = 64, folder: Path = model, **changes: Any) -> EngineWorker:
        sizes: dict[str, Any] = {"device_tokens": 8192, "host_bytes": 4 << 20, "dtype": "float32", "device": "cpu"}
        engine = TieredEngine.load(folder, EngineSettings(**sizes | changes))
        workers.append(EngineWorker(engine, max_unfinished=max_unfinished))
        return workers[-1]

    yield load
    for worker in workers:
        worker.close()


@pytest.fixture(scope="module")
def shared_worker(load: Load) -> EngineWorker:
    return load()


@pytest.fixture
def worker(shared_worker: EngineWorker) -> EngineWorker:
    """An engine with nothing cached."""
    shared_worker.engine.clear_cache()
    return shared_worker


@pytest.fixture
async def client(worker: EngineWorker) -> AsyncIterator[Client]:
    async with reaching(make_engine_app(worker)) as client:
        yield client
