"""Attention of rows at any positions: both backends against the formula itself in double precision.

As in test_prefix_attention.py, this file run as a script computes all its cases in Triton's interpreter.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from support.attention import FAR_OFF, TOLERANCE, batch_on, error, make_cache, moved, paged
from support.rings import grid

torch = pytest.importorskip("torch")

from torch import Tensor

from ragorder.kernels.attention import PackedBatch, merge_attention, prefix_attention, sparse_attention, torch_backend
from ragorder.kernels.attention.ranges import Ranges
from ragorder.kernels.attention.table import HEAD_DIMS, Tile

pytestmark = pytest.mark.merge

SMALL_TILES = Tile(32, 16, 4, 2)
FUSED, PREFILL, DECODE, WHOLE, NOTHING = (13, 4), (0, 9), (0, 1), (0, 24), (0, 0)
"""A request's rows: so many anywhere, and so many at its end."""


@dataclass(frozen=True)
class Case:
    """Requests of so many tokens, all of whose keys are in the cache, and the rows of each. `ranges`: "own", all keys
    up to a row's own; "any", from anywhere to anywhere, or none. `splits` and `tile`: instead of the table's."""

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: str = "float32"
    tokens: tuple[int, ...] = (110, 24, 33, 60)
    rows: tuple[tuple[int, int], ...] = (FUSED, WHOLE, DECODE, PREFILL)
    ranges: Literal["own", "any"] = "own"
    lse: bool = False
    block_size: int = 16
    softcap: float | None = None
    scale: float | None = None
    splits: int | None = None
    tile: Tile | None = None
    seed: int = 0

    def __str__(self) -> str:
        plain = Case()
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return " ".join(changed).replace("(", "").replace(")", "") or "plain"


def any_case(seed: int) -> Case:
    """Whatever can be."""
    rng = random.Random(seed)
    group, kv_heads = rng.randint(1, 6), rng.randint(1, 2)
    tokens = tuple(rng.choice((1, rng.randint(1, 60), rng.randint(60, 150))) for _ in range(rng.randint(1, 4)))
    return Case(
        heads=(group * kv_heads, kv_heads),
        head_dim=rng.choice((64, 80, 96)),
        dtype=rng.choice(("float32", "float16")),
        tokens=tokens,
        rows=tuple((rng.randint(0, count // 5), rng.randint(1, max(1, count // 5))) for count in tokens),
        ranges=rng.choice(("own", "any")),
        lse=rng.choice((False, True)),
        block_size=rng.choice((16, 32, 48, 128)),
        softcap=rng.choice((None, None, 10.0)),
        splits=rng.choice((None, rng.randint(2, 6))),
        tile=Tile(rng.choice((16, 32, 64)), rng.choice((16, 32, 64)), 4, 2),
        seed=seed,
    )


CASES = [
    Case(tile=SMALL_TILES),
    Case(ranges="any", lse=True, tile=SMALL_TILES),
    Case(heads=(8, 2), dtype="float16"),
    Case(),
    Case(heads=(4, 4), dtype="bfloat16"),
    Case(heads=(4, 1), dtype="bfloat16", ranges="any", lse=True, splits=3, tile=SMALL_TILES),
    *(Case(head_dim=head_dim, dtype="float16", tokens=(90, 20), rows=(FUSED, DECODE)) for head_dim in HEAD_DIMS[1:]),
    *(Case(head_dim=head_dim, ranges="any", tile=SMALL_TILES) for head_dim in (80, 96, 128)),
    *(Case(heads=(group, 1), tokens=(90,), rows=(FUSED,), tile=SMALL_TILES) for group in (3, 5, 6, 7)),
    Case(heads=(28, 4), head_dim=128, dtype="bfloat16", tokens=(80,), rows=((7, 3),)),
    *(Case(block_size=block_size, ranges="any", tile=SMALL_TILES) for block_size in (48, 64, 128)),
    Case(softcap=5.0, lse=True),
    Case(softcap=30.0, ranges="any", dtype="float16", tile=SMALL_TILES),
    Case(scale=0.2, tokens=(50,), rows=(FUSED,)),
    *(Case(splits=splits, lse=True, tile=SMALL_TILES) for splits in (2, 5, 9)),
    Case(splits=4, ranges="any", lse=True, softcap=10.0, dtype="float16", tile=SMALL_TILES),
    Case(splits=4, head_dim=80, dtype="bfloat16", tile=SMALL_TILES),
    Case(tokens=(16, 15, 17, 1), rows=(DECODE, DECODE, DECODE, DECODE)),
    Case(tokens=(10, 20, 0), rows=(NOTHING, PREFILL, NOTHING)),
    Case(tokens=(64, 128), rows=((0, 64), (60, 0)), tile=SMALL_TILES),
    *map(any_case, range(12)),
]


@dataclass
class Inputs:
    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PackedBatch
    positions: Tensor
    low: Tensor | None
    high: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.key_cache, self.value_cache

    def on(self, device: str) -> Inputs:
        others = (None if each is None else each.to(device) for each in (self.positions, self.low, self.high))
        return Inputs(*(moved(tensor, device) for tensor in self.tensors), batch_on(self.batch, device), *others)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        low = torch.zeros_like(self.positions) if self.low is None else self.low
        high = self.positions + 1 if self.high is None else self.high
        return list(zip(low.tolist(), high.tolist(), strict=True))


def inputs_of(case: Case) -> Inputs:
    rng = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    heads, kv_heads = case.heads
    positions, low, high, filled = [], [], [], []
    for tokens, (scattered, tail) in zip(case.tokens, case.rows, strict=True):
        anywhere = torch.randperm(tokens - tail, generator=rng)[:scattered].sort().values
        own = [*anywhere.tolist(), *range(tokens - tail, tokens)]
        positions += own
        bounds = [(0, position + 1) for position in own]
        if case.ranges == "any":
            # Empty ones and inverted ones, too.
            bounds = [tuple(torch.randint(0, tokens + 1, (2,), generator=rng).tolist()) for _ in own]
        low += [begin for begin, _ in bounds]
        high += [end for _, end in bounds]
        # What no row sees may be unwritten.
        filled.append(max((end for begin, end in bounds if begin < end), default=0))
    q = torch.randn(len(positions), heads, case.head_dim, generator=rng).to(dtype)
    key_cache, value_cache, tables = make_cache(filled, case.block_size, kv_heads, case.head_dim, dtype, rng)
    longest = max(case.tokens)
    if tables.shape[1] * case.block_size < longest:
        missing = -(-longest // case.block_size) - tables.shape[1]
        tables = torch.nn.functional.pad(tables, (0, missing), value=2**31 - 1)
    counts = torch.tensor([0, *(scattered + tail for scattered, tail in case.rows)])
    batch = PackedBatch(
        counts.cumsum(0).int(),
        torch.tensor(case.tokens, dtype=torch.int32),
        tables,
        int(counts.max()),
        longest,
    )
    as_ints = [torch.tensor(numbers, dtype=torch.int32) for numbers in (positions, low, high)]
    if case.ranges == "own":
        as_ints[1:] = [None, None]
    return Inputs(q, key_cache, value_cache, batch, *as_ints)


def formula(case: Case, given: Inputs) -> tuple[Tensor, Tensor]:
    """softmax(q k / sqrt(d)) v and its log-sum-exp, row by row, in double precision."""
    heads, kv_heads = case.heads
    scale = case.scale or 1 / math.sqrt(case.head_dim)
    found = torch.zeros(given.q.shape, dtype=torch.float64)
    weights = torch.full(given.q.shape[:2], -math.inf, dtype=torch.float64)
    for request, (begin, end, tokens) in enumerate(given.batch.spans):
        table = given.batch.block_tables[request]
        for row in range(begin, end):
            low, high = given.ranges[row]
            if low >= high:
                continue
            written = min(tokens, high)
            keys, values = (
                paged(cache, table, written)[low:].double() for cache in (given.key_cache, given.value_cache)
            )
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = keys[:, kv_head] @ given.q[row, head].double() * scale
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                found[row, head] = scores.softmax(0) @ values[:, kv_head]
                weights[row, head] = scores.logsumexp(0)
    return found, weights


def difference(found: tuple[Tensor, Tensor | None], wanted: tuple[Tensor, Tensor]) -> float:
    out, weight = found
    if weight is None:
        return error(out, wanted[0])
    nothing = wanted[1] == -math.inf
    assert torch.equal(weight == -math.inf, nothing)
    return max(error(out, wanted[0]), error(weight[~nothing], wanted[1][~nothing]) / 2)


def attend(case: Case, given: Inputs, backend: Literal["torch", "triton"]) -> tuple[Tensor, Tensor | None]:
    found = sparse_attention(
        *given.tensors,
        given.batch,
        given.positions,
        low=given.low,
        high=given.high,
        scale=case.scale,
        softcap=case.softcap,
        lse=case.lse,
        backend=backend,
    )
    return found if isinstance(found, tuple) else (found, None)


def attend_in_triton(case: Case, given: Inputs) -> tuple[Tensor, Tensor | None]:
    if case.splits is None and case.tile is None:
        return attend(case, given, "triton")
    from ragorder.kernels.attention.launch import triton_sparse_attention

    ranges = Ranges.of(given.batch, given.positions, given.low, given.high)
    scale = case.scale or 1 / math.sqrt(case.head_dim)
    how = {"splits": case.splits, "tile": case.tile}
    return triton_sparse_attention(*given.tensors, given.batch, ranges, scale, case.softcap, case.lse, **how)


def wrong_block(given: Inputs) -> Inputs:
    """The first request looks at another block instead of its first."""
    tables = given.batch.block_tables.clone()
    used = set(tables.flatten().tolist())
    tables[0, 0] = next(
        block for block in range(len(given.key_cache)) if block not in used and not given.key_cache[block].isnan().any()
    )
    return replace(given, batch=replace(given.batch, block_tables=tables))


CASES = grid(CASES, 6)


def main() -> None:
    """In a process of its own: the error of each case, and of the first ones with a wrong block."""
    for number, case in enumerate(CASES):
        given = inputs_of(case)
        wanted = formula(case, given)
        line = {"error": difference(attend_in_triton(case, given), wanted)}
        if number < 2:
            line["wrong_block"] = difference(attend_in_triton(case, wrong_block(given)), wanted)
        sys.stdout.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def interpreted(python: Any) -> list[dict[str, float]]:
    pytest.importorskip("triton")
    done = python(Path(__file__), path=(Path(__file__).parents[1],), timeout=580, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(params=range(len(CASES)), ids=[str(case) for case in CASES])
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class TestTheKernel:
    def test_is_as_exact_as_its_dtype(self, number: int, interpreted: list[dict[str, float]]) -> None:
        assert interpreted[number]["error"] < TOLERANCE[CASES[number].dtype]

    def test_sees_a_wrong_block(self, interpreted: list[dict[str, float]]) -> None:
        assert all(line["wrong_block"] > FAR_OFF for line in interpreted[:2])

    def test_says_that_it_needs_a_gpu(self) -> None:
        pytest.importorskip("triton")
        with pytest.raises(ValueError, match="needs a GPU"):
            attend(Case(), inputs_of(Case()), "triton")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnAGpu:
    def test_the_kernel_is_as_exact_as_its_dtype(self, number: int) -> None:
        case = CASES[number]
        given = inputs_of(case)
        found = on_cpu(attend_in_triton(case, given.on("cuda")))
        assert difference(found, formula(case, given)) < TOLERANCE[case.dtype]

    def test_so_is_torch(self, number: int) -> None:
        case = CASES[number]
        given = inputs_of(case)
        found = on_cpu(attend(case, given.on("cuda"), "torch"))
        assert difference(found, formula(case, given)) < TOLERANCE[case.dtype]

    def test_the_kernel_sees_a_wrong_block(self) -> None:
        given = inputs_of(Case())
        found = on_cpu(attend_in_triton(Case(), wrong_block(given).on("cuda")))
        assert difference(found, formula(Case(), given)) > FAR_OFF


def on_cpu(found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    out, weight = found
    return out.cpu(), None if weight is None else weight.cpu()


class TestTorch:
    def test_is_as_exact_as_its_dtype(self, number: int) -> None:
        case = CASES[number]
        given = inputs_of(case)
        assert difference(attend(case, given, "torch"), formula(case, given)) < TOLERANCE[case.dtype]

    def test_sees_a_wrong_block(self) -> None:
        case = Case()
        given = inputs_of(case)
        assert difference(attend(case, wrong_block(given), "torch"), formula(case, given)) > FAR_OFF

    @pytest.mark.parametrize("lse", [False, True])
    def test_goes_through_many_rows_in_chunks(self, lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        masks = []
        make = torch_backend._range_mask

        def recorded(*given: Any) -> Any:
            masks.append(make(*given))
            return masks[-1]

        monkeypatch.setattr(torch_backend, "_range_mask", recorded)
        monkeypatch.setattr(torch_backend, "_SCORES", 40 * 2 * 700)
        case = Case(heads=(2, 1), head_dim=16, tokens=(700, 300), rows=((300, 50), (0, 300)), lse=lse)
        given = inputs_of(case)
        assert difference(attend(case, given, "torch"), formula(case, given)) < 1e-5
        most = 40 if lse else 256
        assert all(len(mask) <= most and mask.shape[1] <= 700 for mask, _ in masks)

    @pytest.mark.parametrize("head_dim", [16, 40])
    def test_takes_any_head_dim_and_block_size(self, head_dim: int) -> None:
        case = Case(head_dim=head_dim, block_size=7, ranges="any", lse=True)
        given = inputs_of(case)
        assert difference(attend(case, given, "torch"), formula(case, given)) < 2e-6

    def test_is_what_a_cpu_gets(self) -> None:
        given = inputs_of(Case())
        found = sparse_attention(*given.tensors, given.batch, given.positions)
        assert torch.equal(found, attend(Case(), given, "torch")[0])

    def test_gives_all_layers_of_a_step_the_same_ranges(self) -> None:
        given = inputs_of(Case())
        first = Ranges.of(given.batch, given.positions, None, None)
        assert Ranges.of(given.batch, given.positions, None, None) is first
        assert Ranges.of(given.batch, given.positions, None, given.positions) is not first


class TestChunks:
    """What the torch backend computes at once."""

    def chunks(self, ranges: list[tuple[int, int]], rows: int = 256, tokens: int = 4000) -> list[tuple[int, ...]]:
        low, high = torch.tensor(ranges, dtype=torch.int32).T.contiguous()
        batch = PackedBatch.pack([0, len(ranges)], [0, tokens], [[], [0]])
        nothing, found = Ranges.of(batch, high, low, high).chunks(batch, rows)
        assert nothing == []
        return [(chunk.begin, chunk.end, chunk.first, chunk.last, chunk.whole) for chunk in found]

    def test_have_no_mask_where_rows_see_the_same(self) -> None:
        assert self.chunks([(0, 500)] * 3 + [(700, 900)] * 2) == [(0, 3, 0, 500, True), (3, 5, 700, 900, True)]

    def test_end_where_too_many_keys_would_be_hidden(self) -> None:
        assert self.chunks([(0, 10), (0, 138), (0, 139), (0, 267)]) == [(0, 2, 0, 138, False), (2, 4, 0, 267, False)]
        # An eighth of a long range.
        assert self.chunks([(0, 2400), (0, 2700), (0, 2701)]) == [(0, 2, 0, 2700, False), (2, 3, 0, 2701, True)]

    def test_end_with_so_many_rows(self) -> None:
        assert [chunk[:2] for chunk in self.chunks([(0, 9)] * 5, rows=2)] == [(0, 2), (2, 4), (4, 5)]

    def test_end_with_the_context(self) -> None:
        assert self.chunks([(5, 90), (5, 80)], tokens=60) == [(0, 2, 5, 60, True)]

    def test_have_rows_without_keys_among_others_only(self) -> None:
        assert self.chunks([(9, 9), (0, 20), (30, 4)]) == [(0, 3, 0, 20, False)]
        assert self.chunks([(9, 9), (30, 4)]) == []


class TestRowsAtTheEnd:
    """Contiguous rows are those of `prefix_attention`."""

    @pytest.mark.parametrize("softcap", [None, 8.0])
    def test_are_ordinary_prefill_and_decode(self, softcap: float | None) -> None:
        queries, contexts = (21, 1, 40, 1), (50, 33, 0, 15)
        case = Case(
            tokens=tuple(map(sum, zip(queries, contexts, strict=True))),
            rows=tuple((0, count) for count in queries),
            softcap=softcap,
        )
        given = inputs_of(case)
        new = [
            torch.cat(
                [
                    paged(cache, given.batch.block_tables[request], context + count)[context:]
                    for request, (count, context) in enumerate(zip(queries, contexts, strict=True))
                ]
            )
            for cache in (given.key_cache, given.value_cache)
        ]
        before = replace(
            given.batch, context_lengths=torch.tensor(contexts, dtype=torch.int32), longest_context=max(contexts)
        )
        expected = prefix_attention(given.q, *new, given.key_cache, given.value_cache, before, softcap=softcap)
        assert error(attend(case, given, "torch")[0], expected.double()) < 2e-6


class TestMergedRanges:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_are_the_attention_over_their_union(self, dtype: str) -> None:
        case = Case(dtype=dtype, lse=True)
        given = inputs_of(case)
        whole = formula(case, given)[0]
        end = given.positions + 1
        # The first parts of some rows are empty, and their last.
        cuts = [torch.zeros_like(end), end // 3, (end * 2) // 3, end.clone(), end]
        cuts[2] = torch.where(torch.arange(len(end)) % 2 == 0, cuts[1], cuts[2]).int()
        parts = [
            sparse_attention(*given.tensors, given.batch, given.positions, low=low.int(), high=high.int(), lse=True)
            for low, high in pairwise(cuts)
        ]
        outs, weights = zip(*parts, strict=True)
        found = merge_attention(outs, weights)
        assert found.dtype is getattr(torch, dtype)
        assert error(found, whole) < 2 * TOLERANCE[dtype]

    def test_of_a_row_without_any_key_are_nothing(self) -> None:
        outs = [torch.zeros(2, 3, 4)] * 2
        found = merge_attention(outs, [torch.full((2, 3), -math.inf)] * 2)
        assert torch.equal(found, torch.zeros(2, 3, 4))


class TestArguments:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x: {"q": x.q.double()}, "torch.float64 is not supported"),
            (lambda x: {"key_cache": x.key_cache.half()}, "key_cache is torch.float16, q is torch.float32"),
            (lambda x: {"q": x.q[:, :3]}, "3 query heads cannot share 2 KV heads"),
            (lambda x: {"value_cache": x.value_cache[:, :, :1]}, r"must be \(blocks, block size, 2, 64\)"),
            (lambda x: {"positions": x.positions.long()}, r"positions is torch.int64 .*: give torch.int32 \(51,\)"),
            (lambda x: {"positions": x.positions[1:]}, r"positions is torch.int32 \(50,\): give torch.int32 \(51,\)"),
            (lambda x: {"low": x.positions.float()}, "low is torch.float32"),
            (lambda x: {"high": x.positions.to("meta")}, "high is on meta, q on cpu"),
        ],
    )
    def test_that_cannot_be_are_refused_by_name(self, change: Any, message: str) -> None:
        given = inputs_of(Case())
        wrong = replace(given, **change(given))
        with pytest.raises(ValueError, match=message):
            attend(Case(), wrong, "torch")

    @pytest.mark.parametrize(
        ("named", "message"),
        [
            ({"softcap": -1.0}, "softcap is -1.0"),
            ({"scale": math.inf}, "scale is inf"),
            ({"backend": "cuda"}, "'cuda'"),
        ],
    )
    def test_numbers_that_cannot_be_are_refused(self, named: dict[str, Any], message: str) -> None:
        given = inputs_of(Case())
        with pytest.raises(ValueError, match=message):
            sparse_attention(*given.tensors, given.batch, given.positions, **named)

    def test_a_block_table_that_is_too_short_is_refused(self) -> None:
        given = inputs_of(Case())
        short = replace(given.batch, block_tables=given.batch.block_tables[:, :2].contiguous())
        with pytest.raises(ValueError, match="2 blocks of 16 tokens: too few for a context of 110"):
            sparse_attention(*given.tensors, short, given.positions)

    @pytest.mark.parametrize("lse", [False, True])
    def test_no_row_is_nothing(self, lse: bool) -> None:
        case = Case(tokens=(20,), rows=(NOTHING,), lse=lse)
        out, weight = attend(case, inputs_of(case), "torch")
        assert out.shape == (0, 4, 64)
        assert weight is None or weight.shape == (0, 4)


class TestTheBenchmark:
    def test_compares_rows_at_any_positions(self) -> None:
        from ragorder.benchmarks.kernels.attention.contenders import AttentionShape
        from ragorder.benchmarks.kernels.attention.measuring import measure

        shape = AttentionShape(2, 9, 40, heads=4, kv_heads=2, head_dim=64, dtype="fp32", block_size=16, scattered=True)
        assert shape.positions == [3, 7, 12, 16, 21, 25, 30, 34, 39]
        assert shape.flops == 4 * 64 * 4 * 2 * sum(position + 1 for position in shape.positions)
        assert shape.bytes == 4 * 2 * 64 * (2 * 40 * 2 + 2 * 9 * 4)
        found = dict(measure(shape, ["torch", "sdpa + mask", "flash"], device=torch.device("cpu"), repeats=0, seed=1))
        assert str(found["flash"]) == "needs a GPU"
        for name in ("torch", "sdpa + mask"):
            error_of_it, times = found[name]
            assert 0 < error_of_it < 1e-5
            assert times == []

    def test_refuses_more_rows_than_tokens(self) -> None:
        from ragorder.benchmarks.kernels.attention.cells import AttentionCell

        with pytest.raises(ValueError, match="41 tokens cannot be scattered among 40"):
            AttentionCell(query=41, context=40, scattered=True)


if __name__ == "__main__":
    main()
