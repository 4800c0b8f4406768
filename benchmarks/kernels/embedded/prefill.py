"""Time to the first token of one prompt, by its cached and its fused documents."""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from secrets import token_bytes
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ragorder.benchmarks.kernels.embedded.cells import (
    BLOCKING,
    EXACTLY,
    FUSED,
    HALF,
    NOTHING,
    PLAIN,
    PREFIX,
    TIERS,
    EmbeddedCell,
    way_of,
)
from ragorder.benchmarks.kernels.embedded.models import ask_again, draw_prompt, timed
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.torch import TorchEngine, TorchModel

if TYPE_CHECKING:
    from ragorder.kernels.cache import KVLease
    from ragorder.kernels.engine import Request

_KINDS = 5
"""Of KV at the same time: documents alone, thrice, and exact prefixes, one of half of them."""
_POLL_S = 0.001
_WARM_UPS = 2
_HOST_PROMPTS = 2.5
_FILLERS = {"device": 0, "host": 2, "disk": 4}
"""How many other prompts evict one from a device for little more than one, and how many from such a host as well."""
_TierTokens = tuple[int, int, int]
"""Cached tokens on the device, in the host, on the disk."""
_Serve = Callable[[str, PromptIds, random.Random], tuple[float, float, _TierTokens]]
"""Serves a prompt as an arm does: wall and CPU time in ms, and its cached tokens."""


@contextmanager
def _serve_fused(model: TorchModel, cell: EmbeddedCell) -> Iterator[_Serve]:
    layout = cell.layout
    tokens = cell.batch * (layout.tokens + (layout.documents + 4) * cell.block_size)
    sizes: dict[str, Any] = {"capacity_tokens": (2 + _KINDS * (cell.stored == "device")) * tokens}
    if cell.stored == "host":
        # What is computed with nothing cached gets there, too.
        sizes["host_tokens"] = (_KINDS + 1) * tokens
    with tempfile.TemporaryDirectory(prefix="ragorder-fused-") as folder:
        if cell.stored == "disk":
            sizes |= {"disk_path": Path(folder), "disk_bytes": 2 * _KINDS * tokens * model.bytes_per_token}
        with _engine(model, cell.block_size, reuse="fused", **sizes) as engine:
            yield _Turns(engine, model.vocabulary, cell)


class _Turns:
    """Serves batches of the prompt of a turn; what arms leave is kept apart by salt."""

    def __init__(self, engine: TorchEngine, vocabulary: int, cell: EmbeddedCell) -> None:
        self._engine, self._vocabulary, self._cell = engine, vocabulary, cell
        self._batch: Sequence[PromptIds] = ()

    def __call__(self, arm: str, prompt: PromptIds, rng: random.Random) -> tuple[float, float, _TierTokens]:
        if not self._batch or self._batch[0] is not prompt:
            self._begin(prompt, rng)
        way, blocking = way_of(arm), arm.endswith(BLOCKING)
        requests = [self._request(way, each, _salt(arm)) for each in self._batch]
        if arm.endswith(EXACTLY):
            requests = [replace(each, fusion="exact") for each in requests]
        self._leave_device()
        with _blocking_loads(self._engine) if blocking else nullcontext():
            done, wall_ms, cpu_ms = timed(lambda: self._engine.engine.generate(requests))
        for each in done:
            self._engine.completion(each)
        found = [[getattr(each.cached, tier) + getattr(each.fused, tier) for tier in TIERS] for each in done]
        by_tier = tuple(map(sum, zip(*found, strict=True)))
        self._check(way, by_tier)
        half = len(done) * self._cell.layout.end(self._cell.documents // 2)
        if arm.endswith(HALF) and (exact := sum(each.cached.total for each in done)) != half:
            raise EngineError(f"{half} tokens should be an exact prefix and {exact} are: nothing is measured")
        if len(done) > 1:
            wall_ms = 1e3 * fmean(each.ttft_s for each in done if each.ttft_s is not None)
        return wall_ms, cpu_ms / len(done), (by_tier[0], by_tier[1], by_tier[2])

    def _begin(self, prompt: PromptIds, rng: random.Random) -> None:
        layout, cell = self._cell.layout, self._cell
        self._engine.reset()
        others = [draw_prompt(layout, self._vocabulary, rng) for _ in range(cell.batch - 1)]
        # The same system prompt.
        system = prompt[: layout.system_tokens]
        others = [PromptIds([*system, *other[layout.system_tokens :]], layout.ends) for other in others]
        self._batch = [prompt, *others]
        for salt in dict.fromkeys(_salt(arm) for arm in cell.arms if arm != NOTHING):
            for each in self._batch:
                if salt == PREFIX:
                    again = ask_again(each, layout, layout.documents, self._vocabulary, rng)
                    self._serve([self._request(PREFIX, again, salt)])
                else:
                    self._serve(self._alone(each, salt))
                if salt == HALF:
                    again = ask_again(each, layout, layout.documents // 2, self._vocabulary, rng)
                    half = self._request(PREFIX, again, salt)
                    self._serve([replace(half, document_ends=again.document_ends[1:])])
            # So that all of it is written, however little may wait for the disk.
            self._leave_device()

    def _request(self, way: str, prompt: PromptIds, salt: str) -> Request:
        from ragorder.kernels.engine import Fusion

        request = replace(
            self._engine.request(prompt),
            document_ends=self._cell.layout.ends[1:],
            prefix_tokens=self._cell.layout.system_tokens,
            salt=salt,
        )
        return replace(request, fusion=Fusion(FUSED[way])) if way in FUSED else request

    def _alone(self, prompt: PromptIds, salt: str) -> list[Request]:
        """Each document after the system prompt."""
        system, ends = self._cell.layout.system_tokens, self._cell.layout.ends
        whole = self._request(PREFIX, prompt, salt)
        return [
            replace(
                whole,
                token_ids=[*prompt[:system], *prompt[begin:end], prompt[-1]],
                document_ends=[system + end - begin],
            )
            for begin, end in pairwise(ends)
        ]

    def _serve(self, requests: Sequence[Request]) -> None:
        for done in self._engine.engine.generate(requests):
            self._engine.completion(done)

    def _leave_device(self) -> None:
        """Have all documents move to the tier where they are stored, as requests for the whole device do."""
        if self._cell.stored == "device":
            return
        from ragorder.kernels.cache import Segment

        cache, tokens = self._engine.engine._cache, self._engine.engine.device_tokens
        lease = cache.acquire([Segment(token_bytes(32), tokens)])
        cache.extend(lease, tokens)
        cache.release(lease)
        while cache.stats().copies:
            time.sleep(_POLL_S)
            cache.poll()
        if cache._tiers.disk is not None:
            cache._tiers.disk.wait()

    def _check(self, way: str, found: Sequence[int]) -> None:
        cell, layout = self._cell, self._cell.layout
        expected = 0 if way == NOTHING else cell.batch * layout.ends[-1]
        # The first request of a batch brings the system prompt for all.
        stored = expected - (cell.batch - 1) * layout.system_tokens
        if way == NOTHING:
            # The system prompt is shared, within a block.
            right = sum(found) <= cell.batch * layout.system_tokens
        else:
            right = sum(found) == expected and found[TIERS.index(cell.stored)] >= stored
        if not right:
            raise EngineError(
                f"{expected} tokens should be reused, {stored} from the {cell.stored}, and by tier {tuple(found)} are: "
                "nothing is measured"
            )


def _salt(arm: str) -> str:
    """What an arm computes exactly, another one must not find."""
    way = way_of(arm)
    if arm.endswith(HALF):
        return HALF
    if way in FUSED:
        return arm if FUSED[way] == 1 else "fused"
    return token_bytes(16).hex() if way == NOTHING else way


@contextmanager
def _blocking_loads(engine: TorchEngine) -> Iterator[None]:
    """The engine waits for each request's loads, and begins none ahead: without FusionRAG's scheduler (4.2)."""
    cache = engine.engine._cache
    acquire, prefetch = cache.acquire, cache.prefetch

    def acquire_and_wait(*arguments: Any, **options: Any) -> KVLease:
        lease = acquire(*arguments, **options)
        lease.wait()
        return lease

    cache.acquire, cache.prefetch = acquire_and_wait, lambda *arguments, **options: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        cache.acquire, cache.prefetch = acquire, prefetch  # type: ignore[method-assign]


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
            # In a new order: after an arm that computes much, the processor's caches hold nothing of the next one's.
            for arm in random.Random(f"{seed} {number}").sample(cell.arms, len(cell.arms)):
                wall_ms, cpu_ms, cached = serve(arm, prompt, rng)
                if number < 0:
                    continue
                for name, value in zip(rows[arm], (wall_ms, cpu_ms, *cached), strict=True):
                    rows[arm][name].append(value)
                advance()
    return rows


@contextmanager
def _serve_on_device(model: TorchModel, cell: EmbeddedCell) -> Iterator[_Serve]:
    import torch

    layout, block_size = cell.layout, cell.block_size
    plain = plain_transformers(model.model) if PLAIN in cell.arms else None

    def first_token(prompt: PromptIds) -> int:
        assert plain is not None
        with torch.inference_mode():
            ids = torch.tensor([list(prompt)], device=plain.device)
            return int(plain(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax())

    with _engine(model, block_size, capacity_tokens=2 * layout.tokens + 4 * block_size) as engine:

        def serve(arm: str, prompt: PromptIds, rng: random.Random) -> tuple[float, float, _TierTokens]:
            engine.reset()
            if arm == PLAIN:
                _, wall_ms, cpu_ms = timed(lambda: first_token(prompt))
                return wall_ms, cpu_ms, (0, 0, 0)
            if arm == NOTHING:
                return _timed(engine, prompt, expected=(0, 0, 0))
            engine.generate(ask_again(prompt, layout, int(arm), model.vocabulary, rng))
            return _timed(engine, prompt, expected=(layout.end(int(arm)), 0, 0))

        yield serve


@contextmanager
def _serve_tiers(model: TorchModel, cell: EmbeddedCell) -> Iterator[_Serve]:
    layout, block_size = cell.layout, cell.block_size
    # Loaded documents do not share the blocks in which they meet: each brings one of its own.
    device_tokens = layout.tokens + (layout.documents + 4) * block_size
    host_tokens = round(_HOST_PROMPTS * layout.tokens) + layout.documents * block_size
    sizes: dict[str, Any] = {"capacity_tokens": device_tokens, "host_tokens": host_tokens}
    size = layout.tokens * model.bytes_per_token
    # A slow disk is not to drop what is asked for again.
    sizes |= {"disk_bytes": 16 * size + (1 << 24), "disk_backlog_bytes": 16 * size}
    with (
        tempfile.TemporaryDirectory(prefix="ragorder-embedded-") as folder,
        _engine(model, block_size, disk_path=Path(folder, "disk"), **sizes) as engine,
    ):

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


_MEASURES = {"cached": _serve_on_device, "overhead": _serve_on_device, "tiers": _serve_tiers, "fused": _serve_fused}


def plain_transformers(model: Any) -> Any:
    """The same weights in another model, with SDPA."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    plain = copy.deepcopy(model, shared)
    plain.set_attn_implementation("sdpa")
    return plain
