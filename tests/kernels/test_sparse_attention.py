"""Attention of rows at any positions: both backends against the formula itself in double precision.

As in test_prefix_attention.py, this file run as a script computes all its cases in Triton's interpreter.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from support.attention import (
    FAR_OFF,
    TOLERANCE,
    Named,
    batch_on,
    error,
    interpret,
    make_cache,
    moved,
    paged,
    wrong_block,
)
from support.rings import grid

torch = pytest.importorskip("torch")

from torch import Tensor

from ragorder.kernels.attention import PackedBatch, sparse_attention, torch_backend
from ragorder.kernels.attention.batch import Ranges
from ragorder.kernels.attention.table import HEAD_DIMS, Tile

pytestmark = pytest.mark.merge

SMALL_TILES = Tile(32, 16, 4, 2)
FUSED, PREFILL, DECODE, WHOLE, NOTHING = (13, 4), (0, 9), (0, 1), (0, 24), (0, 0)
"""A request's rows: so many anywhere, and so many at its end."""


@dataclass(frozen=True)
class Case(Named):
    """Requests of so many tokens, all of whose keys are in the cache, and the rows of each. `splits` and `tile`:
    instead of the table's."""

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: str = "float32"
    tokens: tuple[int, ...] = (110, 24, 33, 60)
    rows: tuple[tuple[int, int], ...] = (FUSED, WHOLE, DECODE, PREFILL)
    block_size: int = 16
    softcap: float | None = None
    scale: float | None = None
    splits: int | None = None
    tile: Tile | None = None
    seed: int = 0


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
        block_size=rng.choice((16, 32, 48, 128)),
        softcap=rng.choice((None, None, 10.0)),
        splits=rng.choice((None, rng.randint(2, 6))),
        tile=Tile(rng.choice((16, 32, 64)), rng.choice((16, 32, 64)), 4, 2),
        seed=seed,
    )


CASES = [
    Case(tile=SMALL_TILES),
    Case(tile=SMALL_TILES),
    Case(heads=(8, 2), dtype="float16"),
    Case(),
    Case(heads=(4, 4), dtype="bfloat16"),
    Case(heads=(4, 1), dtype="bfloat16", splits=3, tile=SMALL_TILES),
    *(Case(head_dim=head_dim, dtype="float16", tokens=(90, 20), rows=(FUSED, DECODE)) for head_dim in HEAD_DIMS[1:]),
    *(Case(head_dim=head_dim, tile=SMALL_TILES) for head_dim in (80, 96, 128)),
    *(Case(heads=(group, 1), tokens=(90,), rows=(FUSED,), tile=SMALL_TILES) for group in (3, 5, 6, 7)),
    Case(heads=(28, 4), head_dim=128, dtype="bfloat16", tokens=(80,), rows=((7, 3),)),
    *(Case(block_size=block_size, tile=SMALL_TILES) for block_size in (48, 64, 128)),
    Case(softcap=5.0),
    Case(softcap=30.0, dtype="float16", tile=SMALL_TILES),
    Case(scale=0.2, tokens=(50,), rows=(FUSED,)),
    *(Case(splits=splits, tile=SMALL_TILES) for splits in (2, 5, 9)),
    Case(splits=4, softcap=10.0, dtype="float16", tile=SMALL_TILES),
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

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.key_cache, self.value_cache

    def on(self, device: str) -> Inputs:
        tensors = (moved(tensor, device) for tensor in self.tensors)
        return Inputs(*tensors, batch_on(self.batch, device), self.positions.to(device))


def inputs_of(case: Case) -> Inputs:
    rng = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    heads, kv_heads = case.heads
    positions, filled = [], []
    for tokens, (scattered, tail) in zip(case.tokens, case.rows, strict=True):
        anywhere = torch.randperm(tokens - tail, generator=rng)[:scattered].sort().values
        positions += [*anywhere.tolist(), *range(tokens - tail, tokens)]
        # What no row sees may be unwritten.
        filled.append(tokens if tail else (int(anywhere[-1]) + 1 if scattered else 0))
    q = torch.randn(len(positions), heads, case.head_dim, generator=rng).to(dtype)
    key_cache, value_cache, tables = make_cache(filled, case.block_size, kv_heads, case.head_dim, dtype, rng)
    longest = max(case.tokens)
    if tables.shape[1] * case.block_size < longest:
        missing = -(-longest // case.block_size) - tables.shape[1]
        tables = torch.nn.functional.pad(tables, (0, missing), value=2**31 - 1)
    counts = torch.tensor([0, *(scattered + tail for scattered, tail in case.rows)])
    contexts = torch.tensor(case.tokens, dtype=torch.int32)
    batch = PackedBatch(counts.cumsum(0).int(), contexts, tables, int(counts.max()), longest)
    return Inputs(q, key_cache, value_cache, batch, torch.tensor(positions, dtype=torch.int32))


def formula(case: Case, given: Inputs) -> Tensor:
    """softmax(q k / sqrt(d)) v, row by row, in double precision."""
    heads, kv_heads = case.heads
    scale = case.scale or 1 / math.sqrt(case.head_dim)
    found = torch.zeros(given.q.shape, dtype=torch.float64)
    for request, (begin, end, _) in enumerate(given.batch.spans):
        table = given.batch.block_tables[request]
        for row in range(begin, end):
            seen = int(given.positions[row]) + 1
            keys, values = (paged(cache, table, seen).double() for cache in (given.key_cache, given.value_cache))
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = keys[:, kv_head] @ given.q[row, head].double() * scale
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                found[row, head] = scores.softmax(0) @ values[:, kv_head]
    return found


def attend(case: Case, given: Inputs, backend: Literal["torch", "triton"]) -> Tensor:
    if backend == "torch" or (case.splits is None and case.tile is None):
        how = {"scale": case.scale, "softcap": case.softcap, "backend": backend}
        return sparse_attention(*given.tensors, given.batch, given.positions, **how)
    from ragorder.kernels.attention.launch import triton_sparse_attention

    ranges = Ranges.of(given.batch, given.positions)
    scale = case.scale or 1 / math.sqrt(case.head_dim)
    how = {"splits": case.splits, "tile": case.tile}
    return triton_sparse_attention(*given.tensors, given.batch, ranges, scale, case.softcap, **how)


def error_of(case: Case, backend: Literal["torch", "triton"], device: str = "cpu", *, wrong: bool = False) -> float:
    """Of attention as it is, or with a wrong block."""
    given = inputs_of(case)
    found = attend(case, (wrong_block(given) if wrong else given).on(device), backend)
    return error(found.cpu(), formula(case, given))


CASES = grid(CASES, 4)


def main() -> None:
    """In a process of its own: the error of each case, and of the first ones with a wrong block."""
    for number, case in enumerate(CASES):
        line = {"error": error_of(case, "triton")}
        if number < 2:
            line["wrong_block"] = error_of(case, "triton", wrong=True)
        sys.stdout.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def interpreted(python: Any) -> list[dict[str, float]]:
    pytest.importorskip("triton")
    return interpret(python, __file__)


@pytest.fixture(params=range(len(CASES)), ids=[str(case) for case in CASES])
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class TestTheKernel:
    def test_is_as_exact_as_its_dtype(self, number: int, interpreted: list[dict[str, float]]) -> None:
        assert interpreted[number]["error"] < TOLERANCE[CASES[number].dtype]

    def test_sees_a_wrong_block(self, interpreted: list[dict[str, float]]) -> None:
        assert all(line["wrong_block"] > FAR_OFF for line in interpreted[:2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("backend", ["torch", "triton"])
    def test_both_are_as_exact_as_their_dtype(self, number: int, backend: Literal["torch", "triton"]) -> None:
        assert error_of(CASES[number], backend, "cuda") < TOLERANCE[CASES[number].dtype]

    def test_the_kernel_sees_a_wrong_block(self) -> None:
        assert error_of(Case(), "triton", "cuda", wrong=True) > FAR_OFF


class TestTorch:
    def test_is_as_exact_as_its_dtype(self, number: int) -> None:
        assert error_of(CASES[number], "torch") < TOLERANCE[CASES[number].dtype]

    @pytest.mark.parametrize("softcap", [None, 8.0])
    def test_goes_through_many_rows_in_chunks(self, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
        masks = []
        make = torch_backend.hiding

        def recorded(*given: Any) -> Any:
            masks.append(make(*given))
            return masks[-1]

        monkeypatch.setattr(torch_backend, "hiding", recorded)
        monkeypatch.setattr(torch_backend, "SCORES", 40 * 2 * 700)
        case = Case(heads=(2, 1), head_dim=16, tokens=(700, 300), rows=((300, 50), (0, 300)), softcap=softcap)
        assert error_of(case, "torch") < 1e-5
        most = 256 if softcap is None else 40
        assert masks
        assert all(len(mask) <= most and mask.shape[1] <= 700 for mask in masks)

    @pytest.mark.parametrize("head_dim", [16, 40])
    def test_takes_any_head_dim_and_block_size(self, head_dim: int) -> None:
        assert error_of(Case(head_dim=head_dim, block_size=7), "torch") < 2e-6

    def test_is_what_a_cpu_gets(self) -> None:
        given = inputs_of(Case())
        found = sparse_attention(*given.tensors, given.batch, given.positions)
        assert torch.equal(found, attend(Case(), given, "torch"))

    def test_gives_all_layers_of_a_step_the_same_ranges(self) -> None:
        given = inputs_of(Case())
        first = Ranges.of(given.batch, given.positions)
        assert Ranges.of(given.batch, given.positions) is first
        assert Ranges.of(given.batch, given.positions.clone()) is not first


class TestArguments:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x: {"positions": x.positions.long()}, r"positions is torch.int64 .*: give torch.int32 \(51,\)"),
            (lambda x: {"positions": x.positions[1:]}, r"positions is torch.int32 \(50,\): give torch.int32 \(51,\)"),
            (lambda x: {"positions": x.positions.to("meta")}, "positions is on meta, q on cpu"),
            (
                lambda x: {"batch": replace(x.batch, block_tables=x.batch.block_tables[:, :2].contiguous())},
                "2 blocks of 16 tokens: too few for a context of 110",
            ),
        ],
    )
    def test_that_cannot_be_are_refused_by_name(self, change: Any, message: str) -> None:
        given = inputs_of(Case())
        wrong = replace(given, **change(given))
        with pytest.raises(ValueError, match=message):
            attend(Case(), wrong, "torch")

    def test_no_row_is_nothing(self) -> None:
        case = Case(tokens=(20,), rows=(NOTHING,))
        assert attend(case, inputs_of(case), "torch").shape == (0, 4, 64)


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


if __name__ == "__main__":
    main()
