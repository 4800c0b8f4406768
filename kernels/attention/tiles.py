"""Parts of the Triton kernels: request lookup, and online softmax over tiles of keys.

A tile is BLOCK_M rows by BLOCK_N keys; a row is one query head of one token. Rows are ordered by token, then by head in
the group, so that a group's heads share loaded keys (GQA packing). A tile may begin inside a group.

The softmax is online and in base 2. The running maximum starts finite, because exp2(-inf - -inf) is NaN for rows
without keys.

No `from __future__ import annotations`: Triton's interpreter reads the annotations. Kernels are untyped to mypy.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

__all__ = ["ANYWHERE", "CHANGING", "find_request", "see", "see_in_part"]

# Arguments that change between steps; specialising on them would recompile the kernel each time.
CHANGING = ("requests", "tokens", "window", "table_row", "splits")
ANYWHERE = ("starts_ptr", "contexts_ptr", "tables_ptr", "lows_ptr", "highs_ptr")


@triton.jit
def find_request(starts_ptr, tile, requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the request of a tile. Request r has the tiles from starts[r] * GROUP // BLOCK_M + r, enough for any
    lengths of other requests; its last tile may be empty."""
    low = 0
    high = requests
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) * GROUP // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _scores(queries, tail_queries, keys, tail_keys, TAIL: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        queries = queries.to(tl.float32)
        keys = keys.to(tl.float32)
    scores = tl.dot(queries, keys.T, input_precision="ieee")
    if TAIL:
        if UPCAST:
            tail_queries = tail_queries.to(tl.float32)
            tail_keys = tail_keys.to(tl.float32)
        scores = tl.dot(tail_queries, tail_keys.T, scores, input_precision="ieee")
    return scores


@triton.jit
def _weigh(weights, values, sums, UPCAST: tl.constexpr):
    weights = weights.to(values.dtype)
    if UPCAST:
        weights = weights.to(tl.float32)
        values = values.to(tl.float32)
    return tl.dot(weights, values, sums, input_precision="ieee")


@triton.jit
def _cap(scores, scale, cap):
    """cap * tanh(scores * scale), with cap in base 2, by exp2 of negative numbers, which cannot overflow."""
    rest = tl.exp2(tl.abs(scores) * scale * -2.8853900817779268)
    bent = cap * (1.0 - rest) / (1.0 + rest)
    return tl.where(scores < 0, -bent, bent)


@triton.jit
def _fold(scores, top, total, sums, tail_sums, values, tail_values, scale,
          CAPPED: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Fold a tile into the running softmax: each row's maximum, sum and weighted sum of values."""
    highest = tl.maximum(top, tl.max(scores, 1))
    if CAPPED:
        weights = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(top - highest)
    else:
        weights = tl.exp2(scores * scale - (highest * scale)[:, None])
        shrink = tl.exp2((top - highest) * scale)
    total = total * shrink + tl.sum(weights, 1)
    sums = _weigh(weights, values, sums * shrink[:, None], UPCAST)
    if TAIL:
        tail_sums = _weigh(weights, tail_values, tail_sums * shrink[:, None], UPCAST)
    return highest, total, sums, tail_sums


@triton.jit
def see(queries, tail_queries, key_at, value_at, dims, tail_dims, top, total, sums, tail_sums, scale, cap,
        CAPPED: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Fold in the keys at `key_at` and their values, visible to every row. Return the running maximum, sum and weighted
    sum of values."""
    keys = tl.load(key_at[:, None] + dims[None, :])
    tail_keys = keys
    if TAIL:
        tail_keys = tl.load(key_at[:, None] + tail_dims[None, :])
    scores = _scores(queries, tail_queries, keys, tail_keys, TAIL, UPCAST)
    if CAPPED:
        scores = _cap(scores, scale, cap)
    values = tl.load(value_at[:, None] + dims[None, :])
    tail_values = values
    if TAIL:
        tail_values = tl.load(value_at[:, None] + tail_dims[None, :])
    return _fold(scores, top, total, sums, tail_sums, values, tail_values, scale, CAPPED, TAIL, UPCAST)


@triton.jit
def see_in_part(queries, tail_queries, key_at, value_at, is_key, position, row_low, row_high, dims, tail_dims,
                top, total, sums, tail_sums, scale, cap,
                BOUNDED: tl.constexpr, CAPPED: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """As `see`, for the keys at `position` that exist (`is_key`): rows see keys before `row_high` and, if BOUNDED, from
    `row_low`."""
    keys = tl.load(key_at[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
    tail_keys = keys
    if TAIL:
        tail_keys = tl.load(key_at[:, None] + tail_dims[None, :], mask=is_key[:, None], other=0.0)
    scores = _scores(queries, tail_queries, keys, tail_keys, TAIL, UPCAST)
    if CAPPED:
        scores = _cap(scores, scale, cap)
    seen = position[None, :] < row_high[:, None]
    if BOUNDED:
        seen = seen & (position[None, :] >= row_low[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    values = tl.load(value_at[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
    tail_values = values
    if TAIL:
        tail_values = tl.load(value_at[:, None] + tail_dims[None, :], mask=is_key[:, None], other=0.0)
    return _fold(scores, top, total, sums, tail_sums, values, tail_values, scale, CAPPED, TAIL, UPCAST)
