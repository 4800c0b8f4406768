"""Models in folders, and budgets in which so many of their layers have room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import small_engine
from support.small_engine import tokens

if TYPE_CHECKING:
    from ragorder.kernels.engine import Completion, EngineSettings, Request, TieredEngine

STEP = 64
TOKENS = 1024
# Of a layer's parameters in a buffer, at most.
_ALIGNMENT = 16 * 512

ask = partial(small_engine.ask, max_tokens=6)


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def room_for(folder: Path, layers: int, *, tokens: int = TOKENS, requests: int = 64) -> int:
    """Device bytes for so many layers, a step, and the KV of so many tokens."""
    from transformers import AutoConfig

    from ragorder.kernels.offload import ModelMemory

    size = ModelMemory.of(AutoConfig.from_pretrained(folder))
    slot = max(size.layers) + _ALIGNMENT
    return size.outside + layers * slot + size.workspace(STEP, requests) + tokens * size.kv_token


def streaming(folder: Path, layers: int, **settings: Any) -> EngineSettings:
    """Settings of an engine with room for so many layers on the device, those of the ring included."""
    from ragorder.kernels.engine import EngineSettings

    options: dict[str, Any] = {"host_bytes": 0, "device_tokens": TOKENS, "max_batch_tokens": STEP} | settings
    if "device_bytes" not in options:
        options["device_bytes"] = room_for(folder, layers, tokens=options["device_tokens"])
    return EngineSettings(**options)


def whole(**settings: Any) -> EngineSettings:
    """Settings of the same engine on the whole model."""
    from ragorder.kernels.engine import EngineSettings

    return EngineSettings(**{"host_bytes": 0, "device_tokens": TOKENS, "max_batch_tokens": STEP} | settings)


def requests(seed: int = 0) -> list[Request]:
    """Four, three of which share a document; one is sampled."""
    shared = tokens(41, seed)
    return [
        ask([shared, tokens(30, seed + 1)], tokens(7, seed + 2)),
        ask([shared, tokens(23, seed + 3)], tokens(9, seed + 4)),
        ask([], tokens(90, seed + 5)),
        ask([tokens(17, seed + 6), shared], tokens(5, seed + 7), temperature=1.0, seed=seed),
    ]


def answers(folder: Path, seeds: Sequence[int] = (0, 0, 50), **settings: Any) -> list[list[Completion]]:
    """Of the whole model, to the requests of each seed."""
    from ragorder.kernels.engine import TieredEngine

    with TieredEngine.load(folder, whole(**settings)) as engine:
        return [engine.generate(requests(seed)) for seed in seeds]


def served_while(engine: TieredEngine, asked: Sequence[Request], happens: Callable[[], object]) -> list[Completion]:
    """Completions of requests between whose steps this happens."""
    ids, done = [engine.add(request) for request in asked], {}
    while engine.has_unfinished:
        done |= {update.request_id: update.completion for update in engine.step() if update.completion is not None}
        happens()
    return [done[each] for each in ids]


def check_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Tokens, logits and what was cached."""
    import torch

    for one, other in zip(found, expected, strict=True):
        assert one.error is None, one.error
        assert (one.token_ids, one.cached) == (other.token_ids, other.cached)
        assert torch.equal(one.logits, other.logits)


def check_tokens(found: Iterable[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.error is None, one.error
        assert one.token_ids == other.token_ids
