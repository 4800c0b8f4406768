"""Triton kernels of attention to paged and new keys, and their merge.

A tile is BLOCK_M rows by BLOCK_N keys. A row is one query head of one token; the heads of a group, which share keys
(GQA), are adjacent. Tiles that all rows see are computed without masks, the others last. The softmax is online, in
base 2, with a finite first maximum: exp2(-inf - -inf) is NaN.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No `from __future__ import annotations`: Triton's interpreter reads the annotations.

import triton
import triton.language as tl

# These change between steps: specialising on them would recompile the kernel each time.
CHANGING = ("requests", "tokens", "window", "table_row", "splits", "runs")
ANYWHERE = (
    *("starts_ptr", "contexts_ptr", "tables_ptr", "highs_ptr"),
    *("positions_ptr", "begins_ptr", "offsets_ptr", "reaches_ptr"),
)


@triton.jit
def find_request(starts_ptr, tile, requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's request: r's tiles begin at starts[r] * GROUP // BLOCK_M + r; the last may be empty."""
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
    rest = tl.exp2(tl.abs(scores) * scale * -2.8853900817779268)
    bent = cap * (1.0 - rest) / (1.0 + rest)
    return tl.where(scores < 0, -bent, bent)


@triton.jit
def _fold(scores, top, total, sums, tail_sums, values, tail_values, scale,
          CAPPED: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
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
    """Fold in keys that every row sees. Return the running maximum, sum and sum of values."""
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
    """Attend as `see`, to existing keys (`is_key`): rows see those before `row_high`; if BOUNDED, from `row_low`."""
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


@triton.jit
def turn(q_at, dims, is_row, turn_at, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr):
    """Return queries at `q_at`, rotated by cosines and signed sines at `turn_at`."""
    queries = tl.load(q_at[:, None] + dims[None, :], mask=is_row[:, None], other=0.0)
    if ROTARY:
        partner = dims ^ 1 if ADJACENT else tl.where(dims < ROTARY // 2, dims + ROTARY // 2, dims - ROTARY // 2)
        partner = tl.where(dims < ROTARY, partner, dims)
        partners = tl.load(q_at[:, None] + partner[None, :], mask=is_row[:, None], other=0.0)
        cos = tl.load(turn_at + dims)[None, :]
        sin = tl.load(turn_at + HEAD_DIM + dims)[None, :]
        queries = (queries.to(tl.float32) * cos + partners.to(tl.float32) * sin).to(queries.dtype)
    return queries


@triton.jit
def see_runs(q_at, is_row, key_cache_ptr, value_cache_ptr, rows_ptr, positions_ptr, begins_ptr, offsets_ptr, turns_ptr,
             runs, low, high, row_high, dims, tail_dims, top, total, sums, tail_sums, scale, cap, key_row, value_row,
             MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr, ROTARY: tl.constexpr,
             ADJACENT: tl.constexpr, CAPPED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Fold in keys from `low` to `high`, in the order of `Runs`, turning queries for each run."""
    slots = tl.arange(0, BLOCK_N)
    for run in tl.range(0, runs):
        begin = tl.maximum(tl.load(begins_ptr + run), low)
        end = tl.minimum(tl.load(begins_ptr + run + 1), high)
        if begin < end:
            turn_at = turns_ptr + tl.load(offsets_ptr + run) * (2 * (MAIN + TAIL))
            queries = turn(q_at, dims, is_row, turn_at, MAIN + TAIL, ROTARY, ADJACENT)
            tail_queries = queries
            if TAIL:
                tail_queries = turn(q_at, tail_dims, is_row, turn_at, MAIN + TAIL, ROTARY, ADJACENT)
            following = tl.load(rows_ptr + begin + slots, mask=begin + slots < end, other=0)
            for start in tl.range(begin, end, BLOCK_N):
                key = start + slots
                row = following.to(tl.int64)
                following = tl.load(rows_ptr + key + BLOCK_N, mask=key + BLOCK_N < end, other=0)
                position = tl.load(positions_ptr + key, mask=key < end, other=2147483647)
                top, total, sums, tail_sums = see_in_part(
                    queries, tail_queries, key_cache_ptr + row * key_row, value_cache_ptr + row * value_row, key < end,
                    position, row_high, row_high, dims, tail_dims, top, total, sums, tail_sums, scale, cap,
                    False, CAPPED, TAIL, UPCAST,
                )  # fmt: skip
    return top, total, sums, tail_sums


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=ANYWHERE)
def attend(
    q_ptr, k_ptr, v_ptr, key_cache_ptr, value_cache_ptr, starts_ptr, contexts_ptr, tables_ptr, out_ptr, lse_ptr,
    scale, cap,
    requests, tokens, window, splits,
    q_token, q_head, k_token, k_head, v_token, v_head,
    key_block, key_slot, key_head, value_block, value_slot, value_head, table_row, out_token, out_head,
    GROUP: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, split). A head has MAIN + TAIL dimensions, powers of two; TAIL may be 0.

    `scale` is in base 2, or divided by the cap if CAPPED; `cap` is in base 2. `out` is (tokens, query heads,
    dimensions); with SPLIT each split writes a float32 part (splits, ..), and its weight's base-2 logarithm to `lse`.
    """
    # A request's last tiles see the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = find_request(starts_ptr, tile, requests, GROUP, BLOCK_M)
    begin = tl.load(starts_ptr + request)
    length = tl.load(starts_ptr + request + 1) - begin
    context = tl.load(contexts_ptr + request)
    first_row = (tile - begin * GROUP // BLOCK_M - request) * BLOCK_M
    first_token = first_row // GROUP
    if first_token >= length:
        return
    last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP, length - 1)

    rows = first_row + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = token < length
    dims = tl.arange(0, MAIN)
    q_ptr += begin.to(tl.int64) * q_token
    k_ptr += begin.to(tl.int64) * k_token + kv_head * k_head
    v_ptr += begin.to(tl.int64) * v_token + kv_head * v_head
    key_cache_ptr += kv_head * key_head
    value_cache_ptr += kv_head * value_head
    tables_ptr += request * table_row

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

    # In whole tiles of keys: the tile sees keys from `low` to `high`, all its rows those from `free` to `edge`.
    low = 0
    free = 0
    if WINDOWED:
        low = tl.maximum(context + first_token + 1 - window, 0) // BLOCK_N * BLOCK_N
        free = tl.cdiv(tl.maximum(context + last_token + 1 - window, 0), BLOCK_N) * BLOCK_N
    high = tl.cdiv(context + last_token + 1, BLOCK_N) * BLOCK_N
    edge = (context + first_token + 1) // BLOCK_N * BLOCK_N
    if SPLIT:
        share = tl.cdiv((high - low) // BLOCK_N, splits) * BLOCK_N
        low += tl.program_id(2) * share
        high = tl.minimum(high, low + share)
        low = tl.minimum(low, high)
    free = tl.minimum(tl.maximum(free, low), high)
    edge = tl.minimum(tl.maximum(edge, free), high)
    # The tile of keys, if any, that begins in the cache and ends after it.
    seam = context // BLOCK_N * BLOCK_N
    after_seam = tl.cdiv(context, BLOCK_N) * BLOCK_N
    slots = tl.arange(0, BLOCK_N)

    following = tl.load(tables_ptr + (free + slots) // BLOCK_SIZE, mask=free + slots < context, other=0)
    for start in tl.range(free, tl.minimum(seam, edge), BLOCK_N):
        block = following.to(tl.int64)
        slot = (start + slots) % BLOCK_SIZE
        ahead = start + BLOCK_N + slots
        following = tl.load(tables_ptr + ahead // BLOCK_SIZE, mask=ahead < context, other=0)
        key_at = key_cache_ptr + (block * key_block + slot * key_slot)
        value_at = value_cache_ptr + (block * value_block + slot * value_slot)
        top, total, sums, tail_sums = see(
            queries, tail_queries, key_at, value_at, dims, tail_dims, top, total, sums, tail_sums, scale, cap,
            CAPPED, TAIL, UPCAST,
        )  # fmt: skip

    for start in tl.range(tl.maximum(after_seam, free), edge, BLOCK_N):
        new = start - context + slots
        key_at = k_ptr + new * k_token
        value_at = v_ptr + new * v_token
        top, total, sums, tail_sums = see(
            queries, tail_queries, key_at, value_at, dims, tail_dims, top, total, sums, tail_sums, scale, cap,
            CAPPED, TAIL, UPCAST,
        )  # fmt: skip

    # The keys that each row sees.
    row_high = context + token + 1
    row_low = row_high - window
    at_seam = ((seam < after_seam) & (seam >= free) & (seam < edge)).to(tl.int32)
    at_window = (free - low) // BLOCK_N
    masked = at_window + at_seam + (high - edge) // BLOCK_N
    for number in tl.range(0, masked):
        start = edge + (number - at_window - at_seam) * BLOCK_N
        start = tl.where(number < at_window + at_seam, seam, start)
        start = tl.where(number < at_window, low + number * BLOCK_N, start)
        position = start + slots
        cached = position < context
        is_key = position < context + length
        block = tl.load(tables_ptr + position // BLOCK_SIZE, mask=cached, other=0).to(tl.int64)
        slot = position % BLOCK_SIZE
        new = position - context
        key_at = tl.where(cached, key_cache_ptr + (block * key_block + slot * key_slot), k_ptr + new * k_token)
        value_at = tl.where(cached, value_cache_ptr + (block * value_block + slot * value_slot), v_ptr + new * v_token)
        # Rows are aligned to 16 bytes, which the compiler cannot see through `where`.
        key_at = tl.multiple_of(key_at, 16)
        value_at = tl.multiple_of(value_at, 16)
        top, total, sums, tail_sums = see_in_part(
            queries, tail_queries, key_at, value_at, is_key, position, row_low, row_high, dims, tail_dims,
            top, total, sums, tail_sums, scale, cap, WINDOWED, CAPPED, TAIL, UPCAST,
        )  # fmt: skip

    # A row without keys (in this split, or past the request's end) is zeros with weight zero.
    total = tl.where(total > 0, total, 1.0)
    shrink = 1.0 / total
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
        heads = tl.num_programs(1) * GROUP
        if not CAPPED:
            top = top * scale
        tl.store(lse_ptr + out_at * heads + token * heads + head, top + tl.log2(total), mask=is_row)
    out_at = out_ptr + out_at * out_token + token * out_token + head * out_head
    tl.store(out_at[:, None] + dims[None, :], sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
    if TAIL:
        tail_sums = tail_sums * shrink[:, None]
        tl.store(out_at[:, None] + tail_dims[None, :], tail_sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=ANYWHERE)
def attend_at(
    q_ptr, key_cache_ptr, value_cache_ptr, starts_ptr, contexts_ptr, tables_ptr, highs_ptr, out_ptr, lse_ptr,
    positions_ptr, begins_ptr, offsets_ptr, reaches_ptr, turns_ptr,
    scale, cap,
    requests, tokens, splits, runs,
    q_token, q_head, key_block, key_slot, key_head, value_block, value_slot, value_head, table_row, out_token, out_head,
    GROUP: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    RUNS: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """Attend as `attend`, in rows that see cached keys before `high` (FusionRAG 4.3). With RUNS, blocks are rows."""
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
    sees = row_high > 0
    last = tl.max(row_high, 0)
    if RUNS:
        last = tl.max(tl.load(reaches_ptr + begin + token, mask=is_row, other=0), 0)
    high = tl.cdiv(last, BLOCK_N) * BLOCK_N
    edge = tl.min(tl.where(sees, row_high, last), 0) // BLOCK_N * BLOCK_N
    low = 0
    if SPLIT:
        share = tl.cdiv(high // BLOCK_N, splits) * BLOCK_N
        low = tl.program_id(2) * share
        high = tl.minimum(high, low + share)
        low = tl.minimum(low, high)
    edge = tl.minimum(tl.maximum(edge, low), high)

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
    if RUNS:
        positions_ptr += request * table_row
        begins_ptr += request * (runs + 1)
        offsets_ptr += request * runs
        top, total, sums, tail_sums = see_runs(
            q_at, is_row, key_cache_ptr, value_cache_ptr, tables_ptr, positions_ptr, begins_ptr, offsets_ptr, turns_ptr,
            runs, low, high, row_high, dims, tail_dims, top, total, sums, tail_sums, scale, cap, key_block, value_block,
            MAIN, TAIL, BLOCK_N, ROTARY, ADJACENT, CAPPED, UPCAST,
        )  # fmt: skip
    else:
        slots = tl.arange(0, BLOCK_N)

        following = tl.load(tables_ptr + (low + slots) // BLOCK_SIZE, mask=low + slots < edge, other=0)
        for start in tl.range(low, edge, BLOCK_N):
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

        for start in tl.range(edge, high, BLOCK_N):
            position = start + slots
            is_key = position < last
            block = tl.load(tables_ptr + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            slot = position % BLOCK_SIZE
            key_at = key_cache_ptr + (block * key_block + slot * key_slot)
            value_at = value_cache_ptr + (block * value_block + slot * value_slot)
            top, total, sums, tail_sums = see_in_part(
                queries, tail_queries, key_at, value_at, is_key, position, row_high, row_high, dims, tail_dims,
                top, total, sums, tail_sums, scale, cap, False, CAPPED, TAIL, UPCAST,
            )  # fmt: skip

    # A row without keys (in total or in this split) is zeros with weight zero: tiles without masks do not check this.
    is_weighed = sees & (total > 0)
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
        heads = tl.num_programs(1) * GROUP
        if not CAPPED:
            top = top * scale
        weight = tl.where(is_weighed, top + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + out_at * heads + token * heads + head, weight, mask=is_row)
    out_at = out_ptr + out_at * out_token + token * out_token + head * out_head
    tl.store(out_at[:, None] + dims[None, :], sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
    if TAIL:
        tail_sums = tail_sums * shrink[:, None]
        tl.store(out_at[:, None] + tail_dims[None, :], tail_sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=("tokens", "splits"))
def merge(
    parts_ptr, lse_ptr, out_ptr, tokens, splits, out_token, out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Program (token, query head): the weighted mean of its parts. WIDTH and MOST are powers of two."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, MOST)
    dims = tl.arange(0, WIDTH)
    is_split = split < splits
    part = (split * tokens.to(tl.int64) + token) * HEADS + head
    lse = tl.load(lse_ptr + part, mask=is_split, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, 0)
    mask = is_split[:, None] & (dims[None, :] < HEAD_DIM)
    parts = tl.load(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    mean = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_at = out_ptr + token * out_token + head * out_head
    tl.store(out_at + dims, mean.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
