"""Attention weights over paged keys: those of a softmax over all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.inside import set_bounds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ragorder.kernels.attention.weights import Keys, Queries, attention_received

BLOCK, HEADS, KV_HEADS, DIM = 16, 6, 2, 8
# Rows and weights at a time: as they are, in small chunks, in the smallest.
CHUNKS = {"whole": (256, 1 << 22), "small": (5, 1500), "smallest": (1, 1)}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 0.7},
    "window": {"window": 20},
    "softcap and window": {"softcap": 1.5, "window": 3},
}


@pytest.fixture(params=CHUNKS.values(), ids=list(CHUNKS), autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, numbers = request.param
    set_bounds(monkeypatch, weights_rows=rows, weights=numbers)


def paged(tokens: int, own: int = 0, seed: int = 0) -> tuple[Keys, Tensor]:
    """Keys in shuffled blocks among others, with NaN after the last, and the same in a row."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-tokens // BLOCK)
    cache = torch.full((count + 3, BLOCK, KV_HEADS, DIM), float("nan"))
    table = torch.randperm(count + 3, generator=generator)[:count]
    rows = torch.randn(tokens + own, KV_HEADS, DIM, generator=generator)
    for position in range(tokens):
        cache[table[position // BLOCK], position % BLOCK] = rows[position]
    return Keys(cache, table, tokens, rows[tokens:] if own else None), rows


def queries_at(positions: Tensor, seed: int = 1, **rule: Any) -> Queries:
    generator = torch.Generator().manual_seed(seed)
    return Queries(torch.randn(len(positions), HEADS, DIM, generator=generator), positions, **rule)


def dense(queries: Queries, rows: Tensor, held: Tensor | None = None) -> Tensor:
    """(heads, queries, keys): the softmax by the book."""
    keys = rows.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("nhd,khd->hnk", queries.rows, keys) * (queries.scale or DIM**-0.5)
    if queries.softcap is not None:
        scores = queries.softcap * torch.tanh(scores / queries.softcap)
    at, positions = torch.arange(len(rows)), queries.positions[:, None]
    seen = at <= positions
    if queries.window is not None:
        seen &= at > positions - queries.window
    if held is not None:
        seen &= torch.cat([held, torch.ones(len(rows) - len(held), dtype=torch.bool)])
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize(
    ("tokens", "own", "positions"),
    [
        *((tokens, 7, range(tokens, tokens + 7)) for tokens in (61, 64)),
        *((16, 1, range(10, 17)), (0, 9, range(2, 9)), (40, 0, range(33, 40))),
        (70, 0, (3, 17, 18, 50, 69)),
    ],
)
def test_what_each_key_receives_is_summed_over_the_queries(
    rule: dict[str, Any], tokens: int, own: int, positions: Sequence[int]
) -> None:
    keys, rows = paged(tokens, own)
    queries = queries_at(torch.tensor(positions), **rule)
    expected = dense(queries, rows).sum(1).mean(0)
    torch.testing.assert_close(attention_received(queries, keys), expected, rtol=1e-5, atol=1e-6)


def test_keys_that_are_not_held_receive_nothing() -> None:
    keys, rows = paged(61, 7)
    held = torch.ones(61, dtype=torch.bool)
    held[10:33] = False
    for position in range(10, 33):
        keys.cache[keys.table[position // BLOCK], position % BLOCK] = float("nan")
    queries = queries_at(torch.arange(61, 68))
    received = attention_received(queries, replace(keys, held=held))
    torch.testing.assert_close(received, dense(queries, rows, held).sum(1).mean(0), rtol=1e-5, atol=1e-6)
    assert not received[10:33].any()


def test_a_query_that_sees_no_key_gives_nothing() -> None:
    keys, _ = paged(30)
    assert not attention_received(
        queries_at(torch.tensor([29])), replace(keys, held=torch.zeros(30, dtype=torch.bool))
    ).any()


def test_half_precision_is_summed_in_single() -> None:
    keys, rows = paged(61, 7)
    half = replace(keys, cache=keys.cache.bfloat16(), own=rows[61:].bfloat16())
    queries = queries_at(torch.arange(61, 68))
    queries = replace(queries, rows=queries.rows.bfloat16())
    expected = dense(replace(queries, rows=queries.rows.float()), rows.bfloat16().float()).sum(1).mean(0)
    torch.testing.assert_close(attention_received(queries, half), expected, rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """The numbers in the largest result of an operation."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


def test_weights_are_never_in_memory_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bounds(monkeypatch, weights_rows=64, weights=1 << 16)
    cache = torch.randn(256, BLOCK, 1, DIM)
    keys = Keys(cache, torch.arange(256), 4096)
    queries = queries_at(torch.arange(3996, 4096))
    with Largest() as largest:
        attention_received(queries, keys)
    assert 0 < largest.numbers <= 1 << 16 < HEADS * 100 * 4096
