"""Attention over a paged prefix: both backends against the formula itself in double precision.

The Triton kernel runs in Triton's interpreter, which has to be asked for before triton is imported: this file, run as a
script, computes all its cases in a process of its own.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner
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
from support.inside import aligned
from support.rings import grid

torch = pytest.importorskip("torch")

from torch import Tensor

from ragorder import cli
from ragorder.kernels.attention import PackedBatch, prefix_attention, torch_backend
from ragorder.kernels.attention.table import (
    ARCHITECTURES,
    HEAD_DIMS,
    Tile,
    architecture,
    choose_splits,
    choose_tile,
    count_programs,
)

pytestmark = pytest.mark.merge

SMALL_TILES = Tile(32, 16, 4, 2)
"""So that short contexts, too, have tiles without masks."""


@dataclass(frozen=True)
class Case(Named):
    """Requests of so many new tokens after so many cached ones. `splits` and `tile`: instead of the table's. `spare`:
    blocks that the tables and the longest context and query have beyond the requests'."""

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: str = "float32"
    queries: tuple[int, ...] = (21, 5, 1, 1, 1)
    contexts: tuple[int, ...] = (50, 0, 97, 33, 17)
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    splits: int | None = None
    tile: Tile | None = None
    spare: int = 0
    seed: int = 0


def any_case(seed: int) -> Case:
    """Whatever can be."""
    rng = random.Random(seed)
    group = rng.randint(1, 9)
    kv_heads = rng.randint(1, 2)
    requests = rng.randint(1, 4)
    return Case(
        heads=(group * kv_heads, kv_heads),
        head_dim=rng.choice((64, 80, 96)),
        dtype=rng.choice(("float32", "float16")),
        queries=tuple(rng.choice((1, rng.randint(0, 40))) for _ in range(requests)),
        contexts=tuple(rng.choice((0, rng.randint(0, 150))) for _ in range(requests)),
        block_size=rng.choice((16, 32, 48, 128)),
        window=rng.choice((None, rng.randint(1, 100))),
        softcap=rng.choice((None, None, 10.0)),
        splits=rng.choice((None, rng.randint(2, 6))),
        tile=Tile(rng.choice((16, 32, 64)), rng.choice((16, 32, 64)), 4, 2),
        seed=seed,
    )


CASES = [
    Case(heads=(4, 4)),
    Case(heads=(8, 2), dtype="float16"),
    Case(heads=(4, 1), dtype="bfloat16"),
    Case(heads=(4, 4), dtype="bfloat16"),
    Case(heads=(8, 2)),
    Case(heads=(4, 1), dtype="float16"),
    *(Case(head_dim=head_dim, dtype="float16", queries=(21, 1), contexts=(50, 97)) for head_dim in HEAD_DIMS[1:]),
    *(Case(head_dim=head_dim, tile=SMALL_TILES) for head_dim in (80, 96, 128)),
    Case(head_dim=256, queries=(9,), contexts=(50,), tile=SMALL_TILES),
    *(Case(heads=(group, 1), queries=(23, 1), contexts=(40, 61), tile=SMALL_TILES) for group in (3, 5, 6, 7)),
    Case(heads=(28, 4), head_dim=128, dtype="bfloat16", queries=(11,), contexts=(70,)),
    Case(heads=(71, 1), queries=(3,), contexts=(30,), tile=SMALL_TILES),
    *(Case(block_size=block_size, tile=SMALL_TILES) for block_size in (48, 64, 128)),
    *(Case(window=window, tile=SMALL_TILES) for window in (1, 7, 40)),
    Case(window=20, queries=(70, 1), contexts=(0, 200), tile=SMALL_TILES),
    Case(window=24, dtype="float16"),
    Case(softcap=5.0),
    Case(softcap=30.0, window=50, dtype="float16", tile=SMALL_TILES),
    Case(scale=0.2, queries=(9,), contexts=(33,)),
    *(Case(splits=splits, tile=SMALL_TILES) for splits in (2, 5, 9)),
    Case(splits=3, window=40, softcap=10.0, dtype="float16", tile=SMALL_TILES),
    Case(splits=4, head_dim=80, dtype="bfloat16", queries=(3, 1), contexts=(200, 64), tile=SMALL_TILES),
    Case(queries=(70,), contexts=(200,), dtype="float16"),
    Case(queries=(64,), contexts=(64,), tile=SMALL_TILES),
    Case(queries=(70, 3, 64), contexts=(0, 0, 0), dtype="bfloat16"),
    Case(queries=(1, 1, 1, 1), contexts=(16, 15, 17, 0)),
    Case(queries=(0, 4, 0), contexts=(10, 20, 0)),
    Case(queries=(3, 0, 0, 5), contexts=(40, 0, 0, 0), spare=70),
    Case(queries=(1, 1, 1, 0, 0), contexts=(40, 700, 1, 0, 0), spare=70, dtype="bfloat16"),
    Case(queries=(1, 1, 1, 0, 0), contexts=(40, 700, 1, 0, 0), spare=70, window=40),
    *map(any_case, range(10)),
]


@dataclass
class Inputs:
    """What a case is given. What may not be looked at is not a number, or no block."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PackedBatch

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.key_cache, self.value_cache

    def on(self, device: str) -> Inputs:
        return Inputs(*(moved(tensor, device) for tensor in self.tensors), batch_on(self.batch, device))


def inputs_of(case: Case) -> Inputs:
    rng = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    heads, kv_heads = case.heads
    tokens = sum(case.queries)
    fused = torch.randn(tokens, heads + 2 * kv_heads, case.head_dim, generator=rng).to(dtype)
    q, k, v = fused.split((heads, kv_heads, kv_heads), 1)

    key_cache, value_cache, tables = make_cache(case.contexts, case.block_size, kv_heads, case.head_dim, dtype, rng)
    starts = torch.tensor([0, *case.queries]).cumsum(0).int()
    contexts = torch.tensor(case.contexts, dtype=torch.int32)
    spare = case.spare * case.block_size
    tables = torch.nn.functional.pad(tables, (0, case.spare), value=2**31 - 1)
    batch = PackedBatch(starts, contexts, tables, max(case.queries) + spare, max(case.contexts) + spare)
    return Inputs(q, k, v, key_cache, value_cache, batch)


def formula(case: Case, given: Inputs) -> Tensor:
    """softmax(q k / sqrt(d)) v, token by token, in double precision."""
    heads, kv_heads = case.heads
    scale = case.scale or 1 / math.sqrt(case.head_dim)
    found = torch.zeros(given.q.shape, dtype=torch.float64)
    begin = 0
    for row, (queries, context) in enumerate(zip(case.queries, case.contexts, strict=True)):
        own = slice(begin, begin + queries)
        begin += queries
        keys, values = (
            torch.cat([paged(cache, given.batch.block_tables[row], context), new[own]]).double()
            for cache, new in ((given.key_cache, given.k), (given.value_cache, given.v))
        )
        for token in range(queries):
            last = context + token
            first = 0 if case.window is None else max(0, last - case.window + 1)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = keys[first : last + 1, kv_head] @ given.q[own][token, head].double() * scale
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                found[own][token, head] = scores.softmax(0) @ values[first : last + 1, kv_head]
    return found


def attend(case: Case, given: Inputs, backend: Literal["torch", "triton"]) -> Tensor:
    if backend == "torch" or (case.splits is None and case.tile is None):
        how = {"scale": case.scale, "window": case.window, "softcap": case.softcap, "backend": backend}
        return prefix_attention(*given.tensors, given.batch, **how)
    from ragorder.kernels.attention.launch import triton_attention

    scale = case.scale or 1 / math.sqrt(case.head_dim)
    return triton_attention(
        *given.tensors, given.batch, scale, case.window, case.softcap, splits=case.splits, tile=case.tile
    )


def error_of(case: Case, backend: Literal["torch", "triton"], device: str = "cpu", *, wrong: bool = False) -> float:
    """Of attention as it is, or with a wrong block."""
    given = inputs_of(case)
    found = attend(case, (wrong_block(given) if wrong else given).on(device), backend)
    return error(found.cpu(), formula(case, given))


CASES = grid(CASES, 7)


def main() -> None:
    """In a process of its own: the error of each case, and of the first ones with a wrong block."""
    for number, case in enumerate(CASES):
        line = {"error": error_of(case, "triton")}
        if number < 3:
            line["wrong_block"] = error_of(case, "triton", wrong=True)
        sys.stdout.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def interpreted(python: Any) -> list[dict[str, float]]:
    """What Triton's interpreter found, case by case."""
    pytest.importorskip("triton")
    return interpret(python, __file__)


@pytest.fixture(params=range(len(CASES)), ids=[str(case) for case in CASES])
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class TestTheKernel:
    def test_is_as_exact_as_its_dtype(self, number: int, interpreted: list[dict[str, float]]) -> None:
        assert interpreted[number]["error"] < TOLERANCE[CASES[number].dtype]

    def test_sees_a_wrong_block(self, interpreted: list[dict[str, float]]) -> None:
        assert all(line["wrong_block"] > FAR_OFF for line in interpreted[:3])

    def test_says_that_it_needs_a_gpu(self) -> None:
        pytest.importorskip("triton")
        given = inputs_of(Case())
        with pytest.raises(ValueError, match="needs a GPU"):
            prefix_attention(*given.tensors, given.batch, backend="triton")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("backend", ["torch", "triton"])
    def test_both_are_as_exact_as_their_dtype(self, number: int, backend: Literal["torch", "triton"]) -> None:
        assert error_of(CASES[number], backend, "cuda") < TOLERANCE[CASES[number].dtype]

    def test_the_kernel_sees_a_wrong_block(self) -> None:
        assert error_of(Case(), "triton", "cuda", wrong=True) > FAR_OFF

    def test_it_is_what_a_gpu_gets(self) -> None:
        given = inputs_of(Case()).on("cuda")
        assert torch.equal(prefix_attention(*given.tensors, given.batch), attend(Case(), given, "triton"))


class TestTorch:
    def test_is_as_exact_as_its_dtype(self, number: int) -> None:
        assert error_of(CASES[number], "torch") < TOLERANCE[CASES[number].dtype]

    def test_sees_a_wrong_block(self) -> None:
        assert error_of(Case(), "torch", wrong=True) > FAR_OFF

    @pytest.mark.parametrize("window", [None, 300])
    @pytest.mark.parametrize("softcap", [None, 20.0])
    def test_goes_through_long_prompts_in_chunks(self, window: int | None, softcap: float | None) -> None:
        case = Case(queries=(600, 1, 300), contexts=(70, 700, 0), window=window, softcap=softcap, heads=(2, 1))
        assert error_of(case, "torch") < 1e-5

    def test_decodes_requests_of_all_lengths_together(self) -> None:
        contexts = (1, 15, 16, 17, 60, 100, 101, 250, 260, 400)
        for window in (None, 30, 90):
            assert error_of(Case(queries=(1,) * len(contexts), contexts=contexts, window=window), "torch") < 2e-6

    def test_makes_one_mask_a_step_and_none_where_nothing_is_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        masks = record_masks(monkeypatch)
        case = Case(queries=(600, 20, 1), contexts=(0, 0, 0))
        attend(case, inputs_of(case), "torch")
        assert masks == [None, None, None]
        masks.clear()
        case = Case(queries=(600, 20), contexts=(30, 100))
        given = inputs_of(case)
        for _ in range(3):
            attend(case, given, "torch")
        assert len(masks) == 3 * 4
        assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1
        assert masks[0].untyped_storage().nbytes() == 256 * 700 * 4

    def test_cuts_masks_for_a_gpu_that_can_be_read_in_words(self) -> None:
        mask = torch.randn(21, 118, dtype=torch.bfloat16)[5:, 31:]
        assert mask.data_ptr() % 16 and mask.stride(0) * 2 % 16
        cut = aligned(mask)
        assert torch.equal(cut, mask)
        assert cut.data_ptr() % 16 == cut.stride(0) * 2 % 16 == 0

    @pytest.mark.parametrize("head_dim", [16, 40])
    def test_takes_any_head_dim_and_block_size(self, head_dim: int) -> None:
        assert error_of(Case(head_dim=head_dim, block_size=7), "torch") < 2e-6

    def test_is_what_a_cpu_gets(self) -> None:
        given = inputs_of(Case())
        assert torch.equal(prefix_attention(*given.tensors, given.batch), attend(Case(), given, "torch"))


def record_masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    masks: list[Any] = []
    attention = torch_backend.scaled_dot_product_attention

    def recorded(*tensors: Tensor, attn_mask: Tensor | None, **how: Any) -> Tensor:
        masks.append(attn_mask)
        return attention(*tensors, attn_mask=attn_mask, **how)

    monkeypatch.setattr(torch_backend, "scaled_dot_product_attention", recorded)
    return masks


class TestABatch:
    def test_is_packed_from_plain_numbers(self) -> None:
        case = Case()
        given = inputs_of(case)
        tables = [
            table[: -(-context // case.block_size)].tolist()
            for table, context in zip(given.batch.block_tables, case.contexts, strict=True)
        ]
        batch = PackedBatch.pack(case.queries, case.contexts, tables)
        assert batch.spans == given.batch.spans
        assert (batch.longest_query, batch.longest_context) == (21, 97)
        assert torch.equal(attend(case, replace(given, batch=batch), "torch"), attend(case, given, "torch"))

    def test_without_a_token_is_nothing(self) -> None:
        given = inputs_of(Case(queries=(0,), contexts=(20,)))
        assert prefix_attention(*given.tensors, given.batch).shape == (0, 4, 64)
        empty = PackedBatch.pack([], [], [])
        assert prefix_attention(*given.tensors, empty).shape == (0, 4, 64)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"query_starts": torch.tensor([0, 3])}, "query_starts is torch.int64"),
            ({"query_starts": torch.tensor([3], dtype=torch.int32)}, r"give torch.int32 \(2,\)"),
            ({"block_tables": torch.zeros(2, 1, dtype=torch.int32)}, r"give torch.int32 \(1, 1\)"),
            ({"context_lengths": torch.tensor([4], dtype=torch.int32, device="meta")}, "is on cpu, context_lengths on"),
        ],
    )
    def test_refuses_what_does_not_fit_together(self, arguments: dict[str, Tensor], message: str) -> None:
        fitting = PackedBatch.pack([3], [4], [[0]])
        with pytest.raises(ValueError, match=message):
            replace(fitting, **arguments)


class TestArguments:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda _: {"window": 0}, "window is 0"),
            (lambda _: {"softcap": -1.0}, "softcap is -1.0"),
            (lambda _: {"scale": math.inf}, "scale is inf"),
            (lambda _: {"backend": "cuda"}, "no backend 'cuda'"),
            (lambda x: {"q": x.q.double()}, "torch.float64 is not supported: give one of torch.float16"),
            (lambda x: {"k": x.k.half()}, "k is torch.float16, q is torch.float32"),
            (lambda x: {"key_cache": x.key_cache.to("meta")}, "key_cache is on meta, q on cpu"),
            (lambda x: {"q": x.q[0]}, "q has 2 dimensions"),
            (lambda x: {"q": x.q[:, :3]}, "3 query heads cannot share 2 KV heads"),
            (lambda x: {"k": x.k[:-1]}, "have shapes that do not match"),
            (lambda x: {"key_cache": x.key_cache[:, :, :1]}, r"must be \(blocks, block size, 2, 64\)"),
            (
                lambda x: {"batch": replace(x.batch, block_tables=x.batch.block_tables[:, :2])},
                "2 blocks of 16 tokens: too few for a context of 97",
            ),
            (lambda x: {"value_cache": x.value_cache.transpose(2, 3).contiguous().transpose(2, 3)}, "must be contig"),
        ],
    )
    def test_that_cannot_be_are_refused_by_name(self, change: Any, message: str) -> None:
        given = inputs_of(Case())
        named = ("q", "k", "v", "key_cache", "value_cache", "batch")
        with pytest.raises(ValueError, match=message):
            prefix_attention(**{name: getattr(given, name) for name in named} | change(given))

    @pytest.mark.parametrize(
        ("case", "message"),
        [(Case(head_dim=40), "no head dim 40, only 64, 80"), (Case(block_size=24), "no block size 24, only multiples")],
    )
    def test_what_the_kernel_does_not_have_is_refused(self, case: Case, message: str) -> None:
        pytest.importorskip("triton")
        given = inputs_of(case)
        with pytest.raises(ValueError, match=message):
            prefix_attention(*given.tensors, given.batch, backend="triton")


def every_choice() -> Iterator[tuple[str, int, int, int]]:
    for family in ARCHITECTURES:
        for head_dim in HEAD_DIMS:
            for itemsize in (2, 4):
                for rows in (1, 16, 17, 64, 65, 128, 129, 100_000):
                    yield family, head_dim, itemsize, rows


class TestTheTable:
    def test_has_a_tile_for_everything(self) -> None:
        for choice in every_choice():
            tile = choose_tile(*choice)
            assert tile.rows in (16, 32, 64, 128)
            assert tile.keys in (16, 32, 64, 128)
            assert tile.rows <= max(16, 4 * choice[3])

    def test_gives_hopper_tiles_that_its_matrix_instructions_can_use(self) -> None:
        assert all(choose_tile("sm_90", head_dim, 2, 64).rows >= 64 for head_dim in HEAD_DIMS)

    @pytest.mark.parametrize(
        ("capability", "family"),
        [((8, 0), "sm_80"), ((8, 9), "sm_86"), ((9, 0), "sm_90"), ((10, 0), "sm_90"), ((12, 0), "sm_86")],
    )
    def test_knows_families_of_devices(self, capability: tuple[int, int], family: str) -> None:
        assert architecture(capability) == family

    @pytest.mark.parametrize("warps", [4, 8])
    def test_fills_the_device_or_goes_as_far_as_keys_allow(self, warps: int) -> None:
        room = 132 * 8 // warps

        def busy(programs: int, splits: int) -> float:
            return programs * splits / (room * math.ceil(programs * splits / room))

        for programs in range(1, room):
            for keys in (512, 2048, 8192, 32_768):
                splits = choose_splits(Tile(64, 64, warps, 3), programs, keys, multiprocessors=132)
                assert splits == 1 or keys / splits >= 256
                best = max(busy(programs, each) for each in range(1, min(32, keys // 256) + 1))
                assert busy(programs, splits) >= min(0.8, 0.85 * best)

    def test_counts_programs_that_have_rows(self) -> None:
        tile = Tile(64, 64, 4, 3)
        assert count_programs(tile, tokens=64, requests=1, group=4, kv_heads=8) == 4 * 8
        assert count_programs(tile, tokens=65, requests=1, group=4, kv_heads=8) == 5 * 8
        assert count_programs(tile, tokens=8, requests=8, group=4, kv_heads=8) == 8 * 8


TRIED = """
import json, torch
from ragorder.benchmarks.kernels.attention.measuring import _error, reference
from ragorder.benchmarks.kernels.attention.contenders import AttentionShape, make_problem
from ragorder.benchmarks.kernels.attention.tiles import tried
from ragorder.kernels.attention.table import Tile
problem = make_problem(AttentionShape(1, 3, 600, 2, 1, 64, "bf16", 16), torch.device("cpu"), 0)
tiles = (Tile(16, 16, 4, 2), Tile(16, 32, 4, 2), Tile(64, 32, 4, 2))
for line in tried(problem, tiles, lambda call: {"error": _error(call(), reference(problem))}):
    print(json.dumps(line))
"""


@pytest.mark.slow
class TestTheBenchmark:
    """Without a GPU: everything but the times."""

    def test_tries_tiles_and_splits_that_the_table_does_not_have(self, python: Any) -> None:
        pytest.importorskip("triton")
        done = python("-c", TRIED, timeout=300, TRITON_INTERPRET="1")
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(line["tile"], line["splits"]) for line in lines] == [
            (tile, splits) for tile in ([16, 16, 4, 2], [16, 32, 4, 2]) for splits in (1, 2)
        ]
        assert all(line["error"] < TOLERANCE["bfloat16"] for line in lines)
        assert {(line["query"], line["context"], line["heads"][0]) for line in lines} == {(3, 600, 2)}

    def test_does_not_pass_over_a_wrong_result(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from ragorder.benchmarks.kernels.attention import contenders

        monkeypatch.setitem(contenders.CONTENDERS, "torch", lambda problem: lambda: problem.q)
        changes = ("--policy", "torch", "--set", "query=4", "--set", "context=16", "--set", "head_dim=64")
        done = CliRunner().invoke(cli.main, ["eval", "run", "attention-check", "-o", str(tmp_path), *changes])
        assert done.exit_code == 1
        assert "2 of 2 results are wrong" in done.output
        report = CliRunner().invoke(cli.main, ["report", str(tmp_path), "--markdown", "-"]).output
        assert ", wrong |" in report and "Nothing was timed" in report

    def test_counts_what_is_computed_and_moved(self) -> None:
        from ragorder.benchmarks.kernels.attention.contenders import AttentionShape

        shape = AttentionShape(2, 3, 10, heads=8, kv_heads=2, head_dim=64, dtype="bf16", block_size=16)
        assert shape.flops == 4 * 64 * 8 * 2 * (11 + 12 + 13)
        assert shape.bytes == 2 * 2 * 64 * (2 * 13 * 2 + 2 * 3 * 8)


if __name__ == "__main__":
    main()
