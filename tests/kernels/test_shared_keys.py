"""Attention to shared documents: both backends against keys rotated one by one to where they are read.

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
from support.attention import FAR_OFF, Named, error, interpret
from support.rings import ALL

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
from torch import Tensor

from ragorder.kernels.attention import sparse_attention
from ragorder.kernels.attention.batch import PackedBatch, Ranges
from ragorder.kernels.attention.table import Tile
from ragorder.kernels.fusion.assemble import Layout, Rows
from ragorder.kernels.fusion.rotation import Rope, Rotation
from ragorder.kernels.models.batch import PackedStep, Piece, pack
from ragorder.kernels.paging import BlockPool, Gathered, KVShape

SYSTEM = 21
EXACT = 1e-5


@dataclass(frozen=True)
class Request(Named):
    """Documents in their order, tokens recomputed of 100, and rows: the recomputed and the last ones, or one."""

    documents: tuple[int, ...] = (0, 1, 2)
    share: int = 15
    rows: int = 5
    decodes: bool = False


@dataclass(frozen=True)
class Case(Named):
    """Requests for documents of so many tokens, each computed directly after the system prompt. `rotary` dimensions
    of `head_dim` rotate; 0: none. `splits` and `tile`: instead of the table's."""

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    rotary: int = 64
    adjacent: bool = False
    lengths: tuple[int, ...] = (37, 16, 70)
    requests: tuple[Request, ...] = (Request(), Request((2, 0, 1)), Request((1, 2), 0, 1, True))
    block_size: int = 16
    softcap: float | None = None
    splits: int | None = None
    tile: Tile | None = None
    seed: int = 0


def any_case(seed: int) -> Case:
    rng = random.Random(seed)
    group, kv_heads = rng.randint(1, 6), rng.randint(1, 2)
    head_dim = rng.choice((64, 80, 96))
    lengths = tuple(rng.choice((1, rng.randint(1, 40), rng.randint(60, 130))) for _ in range(rng.randint(1, 4)))

    def any_request() -> Request:
        documents = tuple(rng.sample(range(len(lengths)), rng.randint(1, len(lengths))))
        return Request(documents, rng.choice((0, 15, 40, 100)), rng.randint(1, 9), rng.random() < 0.4)

    requests = tuple(any_request() for _ in range(rng.randint(1, 4)))
    return Case(
        heads=(group * kv_heads, kv_heads),
        head_dim=head_dim,
        rotary=rng.choice((0, 10, 32, head_dim)),
        adjacent=rng.random() < 0.5,
        lengths=lengths,
        requests=requests,
        block_size=rng.choice((1, 16, 48)),
        softcap=rng.choice((None, None, 10.0)),
        splits=rng.choice((None, rng.randint(2, 5))),
        tile=Tile(rng.choice((16, 32)), rng.choice((16, 32, 64)), 4, 2),
        seed=seed,
    )


CASES = [
    Case(),
    Case(heads=(7, 1), rotary=20, splits=3, tile=Tile(16, 16, 4, 2)),
    Case(head_dim=96, rotary=96, adjacent=True, block_size=48, tile=Tile(32, 64, 4, 2)),
    Case(
        requests=(Request(decodes=True), Request((2, 0), decodes=True), Request((1,), 100, decodes=True)), softcap=5.0
    ),
    *map(any_case, range(60 if ALL else 6)),
]


@dataclass
class Inputs:
    pool: BlockPool
    pieces: list[Piece]
    q: Tensor

    def step(self) -> PackedStep:
        return pack(self.pieces, self.pool)


def inputs_of(case: Case) -> Inputs:
    """All that no request may read is not a number."""
    generator, rng = torch.Generator().manual_seed(case.seed), np.random.default_rng(case.seed)
    shape = KVShape(2, case.heads[1], case.head_dim, case.block_size)
    most = SYSTEM + sum(case.lengths) + 10
    documents = sum(len(shape.covering(SYSTEM, length)) for length in case.lengths)
    pool = BlockPool(shape, documents + len(case.requests) * shape.blocks_for(most) + 1)
    pool.kv.fill_(math.nan)
    blocks = [pool.allocate(len(shape.covering(SYSTEM, length))) for length in case.lengths]
    frequencies = 100.0 ** -(torch.arange(0, case.rotary, 2) / max(1, case.rotary))
    rotation = Rotation([None, Rope(frequencies, case.adjacent) if case.rotary else None])
    pieces = []
    for request in case.requests:
        spans, shared, start = [], [], SYSTEM
        for document in request.documents:
            spans.append((start, start + case.lengths[document]))
            shared.append(Rows(blocks[document], SYSTEM, case.lengths[document], start))
            start = spans[-1][1]
        total = start + request.rows
        chosen = np.sort(SYSTEM + rng.permutation(start - SYSTEM)[: request.share * (start - SYSTEM) // 100])
        layout = Layout(total, spans, rotation)
        layout.take(chosen)
        table = np.array(pool.allocate(shape.blocks_for(layout.room(total))), dtype=np.int32)
        places = layout.places(total, table.tolist(), shared, case.block_size)
        rows = np.concatenate((chosen, np.arange(start, total)))
        rows = rows[-1:] if request.decodes else rows
        pieces.append(Piece([0] * len(rows), int(rows[0]), table, True, rows, places))
        pool.kv[places.blocks, :, :, places.offsets] = torch.randn(
            total, 2, 2, *case.heads[1:], case.head_dim, generator=generator
        )
    q = torch.randn(sum(len(piece.token_ids) for piece in pieces), case.heads[0], case.head_dim, generator=generator)
    return Inputs(pool, pieces, q)


def reference(case: Case, given: Inputs) -> Tensor:
    """Attention to keys and values in the order of their positions, each key rotated."""
    lengths = [piece.context for piece in given.pieces]
    gathered = Gathered(given.pool, [piece.places for piece in given.pieces if piece.places is not None], lengths)
    counts = [len(piece.token_ids) for piece in given.pieces]
    batch = PackedBatch.pack(counts, lengths, [table.tolist() for table in gathered.tables])
    positions = torch.from_numpy(np.concatenate([piece.rows for piece in given.pieces])).int()
    return sparse_attention(given.q, *gathered.layer(1), batch, positions, softcap=case.softcap, backend="torch")


def attend(case: Case, given: Inputs, backend: Literal["torch", "triton"], *, turns: bool = True) -> Tensor:
    scattered = given.step().attention.scattered
    assert scattered is not None and scattered.turn is not None
    caches = given.pool.views.key_rows[1].unsqueeze(1), given.pool.views.value_rows[1].unsqueeze(1)
    turn = scattered.turn.queries(1, case.head_dim) if turns else None
    batch, positions, runs = scattered.batch, scattered.positions, scattered.runs
    if backend == "torch" or (case.splits is None and case.tile is None):
        how = {"runs": runs, "turn": turn, "softcap": case.softcap, "backend": backend}
        return sparse_attention(given.q, *caches, batch, positions, **how)
    from ragorder.kernels.attention.launch import triton_sparse_attention

    ranges, scale = Ranges.of(batch, positions), 1 / math.sqrt(case.head_dim)
    how = {"splits": case.splits, "tile": case.tile}
    return triton_sparse_attention(given.q, *caches, batch, ranges, scale, case.softcap, runs, turn, **how)


def error_of(case: Case, backend: Literal["torch", "triton"], *, turns: bool = True) -> float:
    given = inputs_of(case)
    return error(attend(case, given, backend, turns=turns), reference(case, given))


def main() -> None:
    """In a process of its own: the error of each case, and of the first one without rotation."""
    for number, case in enumerate(CASES):
        line = {"error": error_of(case, "triton")}
        if not number:
            line["unturned"] = error_of(case, "triton", turns=False)
        sys.stdout.write(json.dumps(line) + "\n")


@pytest.fixture(params=range(len(CASES)), ids=[str(case) for case in CASES])
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.merge
class TestTheKernel:
    @pytest.fixture(scope="class")
    def interpreted(self, python: Any) -> list[dict[str, float]]:
        pytest.importorskip("triton")
        return interpret(python, __file__)

    def test_rotates_queries_as_keys_would_be(self, number: int, interpreted: list[dict[str, float]]) -> None:
        assert interpreted[number]["error"] < EXACT

    def test_would_be_wrong_without(self, interpreted: list[dict[str, float]]) -> None:
        assert interpreted[0]["unturned"] > FAR_OFF


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnAGpu:
    def test_the_kernel_rotates_queries_as_keys_would_be(self, number: int) -> None:
        case = CASES[number]
        given = inputs_of(case)
        pool = BlockPool(given.pool.shape, given.pool.blocks, "cuda")
        pool.kv.copy_(given.pool.kv)
        found = attend(case, Inputs(pool, given.pieces, given.q.cuda()), "triton").cpu()
        assert error(found, reference(case, given)) < EXACT


class TestTorch:
    def test_rotates_queries_as_keys_would_be(self, number: int) -> None:
        assert error_of(CASES[number], "torch") < EXACT

    def test_would_be_wrong_without(self) -> None:
        assert error_of(CASES[0], "torch", turns=False) > FAR_OFF

    def test_takes_any_head_dim(self) -> None:
        assert error_of(replace(CASES[0], head_dim=40, rotary=40), "torch") < EXACT


if __name__ == "__main__":
    main()
