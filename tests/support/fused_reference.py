"""What a fused request must compute, by transformers alone: stale keys and values with some rows recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import transformers

from ragorder.kernels.engine import Completion, Fusion, Request, Sampling, TieredEngine
from support.inside import cache_of
from support.small_engine import tokens

SYSTEM = tokens(21, 100)
A, B, C, D = (tokens(length, seed) for length, seed in ((37, 1), (16, 2), (30, 3), (23, 4)))
QUESTION = tokens(9, 5)


@dataclass(frozen=True)
class Taken:
    """A document that stands at `start`, and was computed behind the tokens `behind`."""

    start: int
    tokens: Sequence[int]
    behind: Sequence[int]

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.start + len(self.tokens)


def prompt_of(
    system: Sequence[int],
    documents: Sequence[Sequence[int]],
    question: Sequence[int],
    *,
    fusion: Fusion | Literal["exact"] | None = None,
    salt: str | None = None,
    **sampling: Any,
) -> Request:
    """A request whose documents are marked behind a system prompt."""
    tokens = [*system, *(token for document in documents for token in document), *question]
    ends = list(accumulate(map(len, documents), initial=len(system)))[1:]
    options = Sampling(**{"max_tokens": 1} | sampling)
    return Request(tokens, ends, options, salt, keep_logits=True, prefix_tokens=len(system), fusion=fusion)


def fused_logits(plain: Any, tokens: Sequence[int], taken: Sequence[Taken], recomputed: Sequence[int]) -> Any:
    """Of the last token: all positions are computed but those of `taken`, of which those `recomputed` are."""
    missing = set(range(len(tokens)))
    layers = _empty_cache(plain, len(tokens))
    for document in taken:
        begin, end = document.span
        missing -= set(range(begin, end))
        source = len(document.behind)
        with torch.no_grad():
            cache = plain(torch.tensor([[*document.behind, *document.tokens]]), use_cache=True).past_key_values
        for (keys, values), layer in zip(layers, cache.layers, strict=True):
            keys[:, :, begin:end] = _turned(plain, layer.keys[:, :, source:], begin - source)
            values[:, :, begin:end] = layer.values[:, :, source:]
    rows = sorted(missing | set(recomputed))
    hidden = torch.arange(len(tokens))[None] > torch.tensor(rows)[:, None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[None, None]
    with torch.no_grad():
        found = plain(
            input_ids=torch.tensor([[tokens[row] for row in rows]]),
            position_ids=torch.tensor([rows]),
            attention_mask=mask,
            past_key_values=_Scattered(layers, rows),
            use_cache=True,
        )
    return found.logits[0, -1]


def warm(engine: TieredEngine, *paths: Sequence[Sequence[int]]) -> None:
    """Have these documents computed after the system prompt, exactly."""
    for path in paths:
        [completion] = engine.generate([prompt_of(SYSTEM, path, tokens(3, 77), fusion="exact")])
        assert completion.finish_reason == "length"


def taken_of(documents: Sequence[Sequence[int]], *after: Sequence[Sequence[int]] | None) -> list[Taken]:
    """Those of a prompt's documents that were computed after the system prompt and others; None: not reused."""
    taken, start = [], len(SYSTEM)
    for document, others in zip(documents, after, strict=True):
        if others is not None:
            taken.append(Taken(start, document, [*SYSTEM, *(token for other in others for token in other)]))
        start += len(document)
    return taken


def off(completion: Completion, expected: Any) -> float:
    assert completion.error is None, completion.error
    return float((completion.logits - expected).abs().max())


def used_blocks(engine: TieredEngine) -> int:
    engine.clear_cache()
    return cache_of(engine).pool.used_blocks


class _Scattered(transformers.DynamicCache):  # type: ignore[misc]
    """Writes new rows at their positions, and shows all."""

    def __init__(self, layers: list[tuple[Any, Any]], rows: list[int]) -> None:
        super().__init__()
        self._kv = layers
        self._rows = rows

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> Any:
        for held, new in zip(self._kv[layer], (keys, values), strict=True):
            held[:, :, self._rows] = new
        return self._kv[layer]


def _empty_cache(plain: Any, length: int) -> list[tuple[Any, Any]]:
    config = plain.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = (1, config.num_key_value_heads, length, head_dim)
    return [(torch.zeros(size), torch.zeros(size)) for _ in range(config.num_hidden_layers)]


def _turned(plain: Any, keys: Any, by: int) -> Any:
    """Keys (1, heads, T, D) moved `by` positions, in double precision."""
    angles = by * plain.model.rotary_emb.inv_freq.double()
    first, second = keys.double().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).float()
