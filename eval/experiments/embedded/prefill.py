"""The time to the first token of one prompt of several documents, by what of it is cached and where.

Three measures, each with arms that take turns on the same prompts, in another order each time:

- "cached": the system prompt and 0, 1, … all documents are on the device.
- "overhead": nothing is cached, on the engine and on plain transformers (SDPA, the same weights).
- "tiers": all documents are cached, on the device, in the host, or on the disk; and nothing is.

What the engine says that it found, and where, must be what was meant, or nothing is measured.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.torch import TorchEngine, TorchModel
from ragorder.eval.experiments.embedded.clocks import timed
from ragorder.eval.experiments.embedded.prompts import Layout, ask_again, draw_prompt
from ragorder.eval.experiments.embedded.running import Advance, Experiment, Rows
from ragorder.eval.experiments.embedded.shapes import Shape, hardware

__all__ = ["MEASURES", "Layout", "prefill_experiments"]

MEASURES = ("cached", "overhead", "tiers")

PLAIN, NOTHING, TIERS = "transformers", "nothing", ("device", "host", "disk")

_WARM_UPS = 2
_HOST_PROMPTS = 2.5
_FILLERS = {"device": 0, "host": 2, "disk": 4}
"""So many other prompts drive one out of a device for little more than one, and so many out of such a host as well."""

Tokens = tuple[int, int, int]
"""Cached tokens on the device, in the host, on the disk."""


def prefill_experiments(
    measures: Sequence[str],
    shape: Shape,
    layout: Layout,
    load: Callable[[], TorchModel],
    *,
    block_size: int,
    repeats: int,
) -> list[Experiment]:
    """The measures by their names, each `repeats` times a seed. `load` gives the model, once for all."""
    facts = {"shape": shape.name, "hardware": hardware(), **asdict(layout), "block_size": block_size}
    arms = {
        "cached": [NOTHING, *map(str, range(layout.documents + 1))],
        "overhead": [PLAIN, NOTHING],
        "tiers": [NOTHING, *TIERS],
    }
    measure = {"cached": _measure_cached, "overhead": _measure_overhead, "tiers": _measure_tiers}
    return [
        Experiment(
            {"measure": name, **facts, "repeats": repeats},
            arms[name],
            partial(_measure, measure[name], arms[name], load, layout, block_size, repeats),
            steps=repeats * len(arms[name]),
        )
        for name in measures
    ]


Serve = Callable[[str, PromptIds, random.Random], tuple[float, float, Tokens]]
"""Serves a prompt as an arm does: wall and CPU time in ms, and what was cached of it."""


def _measure(
    start: Callable[[TorchModel, Layout, int], Any],
    arms: Sequence[str],
    load: Callable[[], TorchModel],
    layout: Layout,
    block_size: int,
    repeats: int,
    seed: int,
    advance: Advance,
) -> Mapping[str, Rows]:
    model, rng = load(), random.Random(seed)
    rows: dict[str, dict[str, list[float]]] = {
        arm: {name: [] for name in ("wall_ms", "cpu_ms", *TIERS)} for arm in arms
    }
    with start(model, layout, block_size) as serve:
        for number in range(-_WARM_UPS, repeats):
            prompt = draw_prompt(layout, model.vocabulary, rng)
            first = number % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                wall_ms, cpu_ms, cached = serve(arm, prompt, rng)
                if number < 0:
                    continue
                for name, value in zip(rows[arm], (wall_ms, cpu_ms, *cached), strict=True):
                    rows[arm][name].append(value)
                advance()
    return rows


@contextmanager
def _measure_cached(model: TorchModel, layout: Layout, block_size: int) -> Iterator[Serve]:
    with _engine(model, block_size, capacity_tokens=2 * layout.tokens + 4 * block_size) as engine:

        def serve(arm: str, prompt: PromptIds, rng: random.Random) -> tuple[float, float, Tokens]:
            engine.reset()
            if arm == NOTHING:
                return _timed(engine, prompt, expected=(0, 0, 0))
            documents = int(arm)
            engine.generate(ask_again(prompt, layout, documents, model.vocabulary, rng))
            return _timed(engine, prompt, expected=(layout.end(documents), 0, 0))

        yield serve


@contextmanager
def _measure_overhead(model: TorchModel, layout: Layout, block_size: int) -> Iterator[Serve]:
    import torch

    plain = plain_transformers(model.model)
    with _engine(model, block_size, capacity_tokens=2 * layout.tokens + 4 * block_size) as engine:

        def first_token(prompt: PromptIds) -> int:
            with torch.inference_mode():
                ids = torch.tensor([list(prompt)], device=plain.device)
                return int(plain(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax())

        def serve(arm: str, prompt: PromptIds, rng: random.Random) -> tuple[float, float, Tokens]:
            engine.reset()
            if arm == NOTHING:
                return _timed(engine, prompt, expected=(0, 0, 0))
            _, wall_ms, cpu_ms = timed(lambda: first_token(prompt))
            return wall_ms, cpu_ms, (0, 0, 0)

        yield serve


@contextmanager
def _measure_tiers(model: TorchModel, layout: Layout, block_size: int) -> Iterator[Serve]:
    # What is loaded does not share the blocks in which documents meet: each document brings one of its own.
    device_tokens = layout.tokens + (layout.documents + 4) * block_size
    host_tokens = round(_HOST_PROMPTS * layout.tokens) + layout.documents * block_size
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragorder-embedded-")))
        sizes = {"capacity_tokens": device_tokens, "host_tokens": host_tokens}
        disk = {"disk_path": folder / "disk", "disk_bytes": 16 * layout.tokens * model.bytes_per_token + (1 << 24)}
        engine = stack.enter_context(_engine(model, block_size, **sizes, **disk))

        def serve(arm: str, prompt: PromptIds, rng: random.Random) -> tuple[float, float, Tokens]:
            engine.reset()
            if arm == NOTHING:
                return _timed(engine, prompt, expected=(0, 0, 0))
            engine.generate(ask_again(prompt, layout, layout.documents, model.vocabulary, rng))
            for _ in range(_FILLERS[arm]):
                engine.generate(draw_prompt(layout, model.vocabulary, rng))
            expected = [layout.ends[-1] if tier == arm else 0 for tier in TIERS]
            return _timed(engine, prompt, expected=(expected[0], expected[1], expected[2]))

        yield serve


@contextmanager
def _engine(model: TorchModel, block_size: int, **sizes: Any) -> Iterator[TorchEngine]:
    engine = TorchEngine(model, block_size=block_size, **sizes)
    try:
        yield engine
    finally:
        engine.close()


def _timed(engine: TorchEngine, prompt: PromptIds, expected: Tokens) -> tuple[float, float, Tokens]:
    _, wall_ms, cpu_ms = timed(lambda: engine.generate(prompt))
    found = engine.served[-1].cached
    cached = (found.device, found.host, found.disk)
    if cached != expected:
        raise EngineError(
            f"cached tokens were to be {expected} and are {cached} (device, host, disk): nothing can be measured so"
        )
    return wall_ms, cpu_ms, cached


def plain_transformers(model: Any) -> Any:
    """The same weights in a model of its own, with transformers' SDPA attention, whatever serves the first one."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    plain = copy.deepcopy(model, shared)
    plain.set_attn_implementation("sdpa")
    return plain
