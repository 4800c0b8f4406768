"""Triton kernel: attention of rows at any positions to cached keys (FusionRAG's Q-Sparse-Attn, section 4.3).

All keys are in the cache, by the block table. Tiles that all rows see fully are computed without masks, the others in a
second loop. See `tiles` for rows, tiles and the softmax.

No `from __future__ import annotations`: Triton's interpreter reads the annotations. Kernels are untyped to mypy.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from ragorder.kernels.attention.tiles import ANYWHERE, CHANGING, find_request, see, see_in_part

__all__ = ["attend_at"]


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=ANYWHERE)
def attend_at(
    q_ptr, key_cache_ptr, value_cache_ptr, starts_ptr, contexts_ptr, tables_ptr, lows_ptr, highs_ptr, out_ptr, lse_ptr,
    scale, cap,
    requests, tokens, splits,
    q_token, q_head, key_block, key_slot, key_head, value_block, value_slot, value_head, table_row, out_token, out_head,
    GROUP: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BOUNDED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, WEIGHED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """As `attend`, for rows that see cached keys before their `high` and, if BOUNDED, from their `low`.

    With WEIGHED and no SPLIT, `lse` (tokens, query heads) is the natural logarithm of the sums of the softmax.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = find_request(starts_ptr, tile, requests, GROUP, BLOCK_M)
    begin = tl.load(starts_ptr + request)
    length = tl.load(starts_ptr + request + 1) - begin
    context = tl.load(contexts_ptr + request)
    first_row = (tile - begin * GROUP // BLOCK_M - request) * BLOCK_M
    if first_row // GROUP >= length:
        return

    token = (first_row + tl.arange(0, BLOCK_M)) // GROUP
    head = kv_head * GROUP + (first_row + tl.arange(0, BLOCK_M)) % GROUP
    is_row = token < length
    dims = tl.arange(0, MAIN)
    q_ptr += begin.to(tl.int64) * q_token
    key_cache_ptr += kv_head * key_head
    value_cache_ptr += kv_head * value_head
    tables_ptr += request * table_row

    # Rows without keys, including those past the request's end, do not change the bounds.
    row_high = tl.minimum(tl.load(highs_ptr + begin + token, mask=is_row, other=0), context)
    row_low = tl.zeros([BLOCK_M], tl.int32)
    if BOUNDED:
        row_low = tl.maximum(tl.load(lows_ptr + begin + token, mask=is_row, other=0), 0)
    sees = row_low < row_high
    last = tl.max(tl.where(sees, row_high, 0), 0)
    high = tl.cdiv(last, BLOCK_N) * BLOCK_N
    edge = tl.min(tl.where(sees, row_high, last), 0) // BLOCK_N * BLOCK_N
    low = 0
    free = 0
    if BOUNDED:
        low = tl.min(tl.where(sees, row_low, last), 0) // BLOCK_N * BLOCK_N
        free = tl.cdiv(tl.max(tl.where(sees, row_low, 0), 0), BLOCK_N) * BLOCK_N
    if SPLIT:
        share = tl.cdiv((high - low) // BLOCK_N, splits) * BLOCK_N
        low += tl.program_id(2) * share
        high = tl.minimum(high, low + share)
        low = tl.minimum(low, high)
    free = tl.minimum(tl.maximum(free, low), high)
    edge = tl.minimum(tl.maximum(edge, free), high)

    q_at = q_ptr + token * q_token + head * q_head
    queries = tl.load(q_at[:, None] + dims[None, :], mask=is_row[:, None], other=0.0)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, MAIN], tl.float32)
    # Placeholders without a tail.
    tail_queries = queries
    tail_dims = dims
    tail_sums = total
    if TAIL:
        tail_dims = MAIN + tl.arange(0, TAIL)
        tail_queries = tl.load(q_at[:, None] + tail_dims[None, :], mask=is_row[:, None], other=0.0)
        tail_sums = tl.zeros([BLOCK_M, TAIL], tl.float32)
    slots = tl.arange(0, BLOCK_N)

    following = tl.load(tables_ptr + (free + slots) // BLOCK_SIZE, mask=free + slots < edge, other=0)
    for start in tl.range(free, edge, BLOCK_N):
        block = following.to(tl.int64)
        slot = (start + slots) % BLOCK_SIZE
        ahead = start + BLOCK_N + slots
        following = tl.load(tables_ptr + ahead // BLOCK_SIZE, mask=ahead < edge, other=0)
        key_at = key_cache_ptr + (block * key_block + slot * key_slot)
        value_at = value_cache_ptr + (block * value_block + slot * value_slot)
        top, total, sums, tail_sums = see(
            queries, tail_queries, key_at, value_at, dims, tail_dims, top, total, sums, tail_sums, scale, cap,
            CAPPED, TAIL, UPCAST,
        )  # fmt: skip

    at_low = (free - low) // BLOCK_N
    for number in tl.range(0, at_low + (high - edge) // BLOCK_N):
        start = tl.where(number < at_low, low + number * BLOCK_N, edge + (number - at_low) * BLOCK_N)
        position = start + slots
        is_key = position < last
        block = tl.load(tables_ptr + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = position % BLOCK_SIZE
        key_at = key_cache_ptr + (block * key_block + slot * key_slot)
        value_at = value_cache_ptr + (block * value_block + slot * value_slot)
        top, total, sums, tail_sums = see_in_part(
            queries, tail_queries, key_at, value_at, is_key, position, row_low, row_high, dims, tail_dims,
            top, total, sums, tail_sums, scale, cap, BOUNDED, CAPPED, TAIL, UPCAST,
        )  # fmt: skip

    # A row without keys (in total or in this split) is zeros with weight zero: tiles without masks do not check for
    # such rows.
    is_weighed = (row_low < row_high) & (total > 0)
    total = tl.where(is_weighed, total, 1.0)
    shrink = tl.where(is_weighed, 1.0 / total, 0.0)
    sums = sums * shrink[:, None]
    # Read again: values needed only by the stores would occupy registers throughout.
    begin = tl.load(starts_ptr + request, volatile=True)
    rows = (tile - begin * GROUP // BLOCK_M - request) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = token < length
    out_at = begin.to(tl.int64)
    if SPLIT:
        out_at += tl.program_id(2).to(tl.int64) * tokens
    if SPLIT or WEIGHED:
        heads = tl.num_programs(1) * GROUP
        if not CAPPED:
            top = top * scale
        weight = top + tl.log2(total)
        if not SPLIT:
            weight = weight * 0.6931471805599453
        weight = tl.where(is_weighed, weight, float("-inf"))
        tl.store(lse_ptr + out_at * heads + token * heads + head, weight, mask=is_row)
    out_at = out_ptr + out_at * out_token + token * out_token + head * out_head
    tl.store(out_at[:, None] + dims[None, :], sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
    if TAIL:
        tail_sums = tail_sums * shrink[:, None]
        tl.store(out_at[:, None] + tail_dims[None, :], tail_sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
