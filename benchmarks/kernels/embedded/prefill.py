"""Time to the first token of one prompt, by its cached documents.

Arms take turns on the same prompts, each time in another order.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.benchmarks.kernels.embedded.cells import NOTHING, TIERS, EmbeddedCell
from ragorder.benchmarks.kernels.embedded.clocks import timed
from ragorder.benchmarks.kernels.embedded.fused import serve_fused
from ragorder.benchmarks.kernels.embedded.prompts import ask_again, draw_prompt
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.torch import TorchEngine, TorchModel

if TYPE_CHECKING:
    pass

__all__ = ["measure_prefill", "plain_transformers"]

_WARM_UPS = 2
_HOST_PROMPTS = 2.5
_FILLERS = {"device": 0, "host": 2, "disk": 4}
"""How many other prompts evict one from a device for little more than one, and how many from such a host as well."""

_TierTokens = tuple[int, int, int]
"""Cached tokens on the device, in the host, on the disk."""

_Serve = Callable[[str, PromptIds, random.Random], tuple[float, float, _TierTokens]]
"""Serves a prompt as an arm does: wall and CPU time in ms, and its cached tokens."""


def measure_prefill(
    cell: EmbeddedCell, model: TorchModel, seed: int, advance: Callable[[], None]
) -> dict[str, dict[str, list[float]]]:
    """Columns of each arm. Raises EngineError if other tokens were cached than intended."""
    layout, rng = cell.layout, random.Random(seed)
    start = _MEASURES[cell.measure]
    rows: dict[str, dict[str, list[float]]] = {
        arm: {name: [] for name in ("wall_ms", "cpu_ms", *TIERS)} for arm in cell.arms
    }
    with start(model, cell) as serve:
        for number in range(-_WARM_UPS, cell.repeats):
            prompt = draw_prompt(layout, model.vocabulary, rng)
            # In a new order: behind an arm that computes much, the processor's caches hold nothing of the next one's.
            for arm in random.Random(f"{seed} {number}").sample(cell.arms, len(cell.arms)):
                wall_ms, cpu_ms, cached = serve(arm, prompt, rng)
                if number < 0:
                    continue
                for name, value in zip(rows[arm], (wall_ms, cpu_ms, *cached), strict=True):
                    rows[arm][name].append(value)
                advance()
    return rows


@contextmanager
def _serve_cached(model: TorchModel, cell: EmbeddedCell) -> Iterator[_Serve]:
    layout, block_size = cell.layout, cell.block_size
    with _engine(model, block_size, capacity_tokens=2 * layout.tokens + 4 * block_size) as engine:

        def serve(arm: str, prompt: PromptIds, rng: random.Random) -> tuple[float, float, _TierTokens]:
            engine.reset()
            if arm == NOTHING:
                return _timed(engine, prompt, expected=(0, 0, 0))
            documents = int(arm)
            engine.generate(ask_again(prompt, layout, documents, model.vocabulary, rng))
            return _timed(engine, prompt, expected=(layout.end(documents), 0, 0))

        yield serve


@contextmanager
def _serve_overhead(model: TorchModel, cell: EmbeddedCell) -> Iterator[_Serve]:
    import torch

    layout, block_size = cell.layout, cell.block_size
    plain = plain_transformers(model.model)
    with _engine(model, block_size, capacity_tokens=2 * layout.tokens + 4 * block_size) as engine:

        def first_token(prompt: PromptIds) -> int:
            with torch.inference_mode():
                ids = torch.tensor([list(prompt)], device=plain.device)
                return int(plain(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax())

        def serve(arm: str, prompt: PromptIds, rng: random.Random) -> tuple[float, float, _TierTokens]:
            engine.reset()
            if arm == NOTHING:
                return _timed(engine, prompt, expected=(0, 0, 0))
            _, wall_ms, cpu_ms = timed(lambda: first_token(prompt))
            return wall_ms, cpu_ms, (0, 0, 0)

        yield serve


@contextmanager
def _serve_tiers(model: TorchModel, cell: EmbeddedCell) -> Iterator[_Serve]:
    layout, block_size = cell.layout, cell.block_size
    # Loaded documents do not share the blocks in which they meet: each brings one of its own.
    device_tokens = layout.tokens + (layout.documents + 4) * block_size
    host_tokens = round(_HOST_PROMPTS * layout.tokens) + layout.documents * block_size
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragorder-embedded-")))
        sizes = {"capacity_tokens": device_tokens, "host_tokens": host_tokens}
        size = layout.tokens * model.bytes_per_token
        # A slow disk is not to drop what is asked for again.
        disk = {"disk_path": folder / "disk", "disk_bytes": 16 * size + (1 << 24), "disk_backlog_bytes": 16 * size}
        engine = stack.enter_context(_engine(model, block_size, **sizes, **disk))

        def serve(arm: str, prompt: PromptIds, rng: random.Random) -> tuple[float, float, _TierTokens]:
            engine.reset()
            if arm == NOTHING:
                return _timed(engine, prompt, expected=(0, 0, 0))
            engine.generate(ask_again(prompt, layout, layout.documents, model.vocabulary, rng))
            for _ in range(_FILLERS[arm]):
                engine.generate(draw_prompt(layout, model.vocabulary, rng))
            expected = [layout.ends[-1] if tier == arm else 0 for tier in TIERS]
            return _timed(engine, prompt, expected=(expected[0], expected[1], expected[2]))

        yield serve


def _engine(model: TorchModel, block_size: int, **sizes: Any) -> closing[TorchEngine]:
    return closing(TorchEngine(model, block_size=block_size, **sizes))


def _timed(engine: TorchEngine, prompt: PromptIds, expected: _TierTokens) -> tuple[float, float, _TierTokens]:
    _, wall_ms, cpu_ms = timed(lambda: engine.generate(prompt))
    found = engine.served[-1].cached
    cached = (found.device, found.host, found.disk)
    if cached != expected:
        raise EngineError(
            f"cached tokens on device, host and disk should be {expected} and are {cached}: nothing is measured"
        )
    return wall_ms, cpu_ms, cached


_MEASURES = {"cached": _serve_cached, "overhead": _serve_overhead, "tiers": _serve_tiers, "fused": serve_fused}


def plain_transformers(model: Any) -> Any:
    """The same weights in another model, with SDPA."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    plain = copy.deepcopy(model, shared)
    plain.set_attn_implementation("sdpa")
    return plain
