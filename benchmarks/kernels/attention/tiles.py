"""Times of other tiles than the table's, on a GPU.

`python -m ragorder.benchmarks.kernels.attention.tiles > tiles.jsonl`

For changes of `kernels/attention/table.py`. Its choices for Hopper rest on docs/kernels-h200-tiles.jsonl.xz.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import click
import torch

from ragorder.benchmarks.kernels.attention.contenders import AttentionProblem, AttentionShape, make_problem
from ragorder.benchmarks.kernels.attention.measuring import splits_of
from ragorder.kernels.attention.table import Tile

TILES = (
    *(Tile(16, keys, 4, stages) for keys, stages in ((32, 4), (64, 4), (128, 3))),
    *(Tile(32, keys, 4, 4) for keys in (64, 128)),
    *(Tile(64, keys, 4, stages) for keys, stages in ((32, 4), (64, 3), (128, 3))),
    *(Tile(128, keys, 8, 3) for keys in (64, 128)),
)
_CALLS = 16
_REPLAYS = 5
Measure = Callable[[Callable[[], Any]], dict[str, float]]


@click.command()
@click.option(
    "--query", "queries", multiple=True, type=click.IntRange(min=1), help="New tokens. [default: 1, 32, 256, 1024]"
)
@click.option(
    "--context", "contexts", multiple=True, type=click.IntRange(min=0), help="Cached tokens. [default: 2048, 8192]"
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests.")
@click.option("--heads", type=int, default=32, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=int, default=8, show_default=True, help="KV heads, a divisor of the others.")
@click.option("--head-dim", type=click.Choice([64, 128]), default=128, show_default=True, help="Of a head.")
def main(queries: Sequence[int], contexts: Sequence[int], batch: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """Time tiles and splits of the attention kernel, a line of JSON each: on the device alone, and of one call."""
    if not torch.cuda.is_available():
        raise click.ClickException("times need a GPU, and there is none here")
    if kv_heads < 1 or heads % kv_heads:
        raise click.UsageError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    for query in queries or (1, 32, 256, 1024):
        for context in contexts or (2048, 8192):
            shape = AttentionShape(batch, query, context, heads, kv_heads, head_dim, "bf16", 16)
            problem = make_problem(shape, torch.device("cuda"), 0)
            for line in tried(problem, TILES, _times):
                click.echo(json.dumps(line))


def tried(problem: AttentionProblem, tiles: Sequence[Tile], measure: Measure) -> Iterator[dict[str, Any]]:
    """Tiles of no more than four times the problem's rows, with some numbers of splits. `measure`: times of a call."""
    from ragorder.kernels.attention.launch import triton_attention

    shape = problem.shape
    scale = 1 / math.sqrt(shape.head_dim)
    given = (problem.q, problem.k, problem.v, problem.key_cache, problem.value_cache, problem.batch, scale)
    of_table = splits_of(shape, problem.q.device)
    most = max(1, shape.total // 256)
    for tile in tiles:
        if tile.rows > max(16, 4 * shape.query * shape.heads // shape.kv_heads):
            continue
        for splits in sorted({1, 2, 4, 8, 16, of_table}):
            if splits <= most:
                times = measure(partial(triton_attention, *given, tile=tile, splits=splits))
                named = {"query": shape.query, "context": shape.context, "batch": shape.batch, "splits": splits}
                heads = {"heads": [shape.heads, shape.kv_heads], "head_dim": shape.head_dim}
                yield {**named, **heads, "tile": astuple(tile), "splits_of_table": of_table, **times}


def _times(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds: by replays of a CUDA graph, which the host does not slow down; and of calls one after another."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    graph.replay()
    found = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / _CALLS)
    began = time.perf_counter()
    for _ in range(_CALLS):
        call()
    torch.cuda.synchronize()
    called = 1000 * (time.perf_counter() - began) / _CALLS
    return {"device_ms": round(statistics.median(found), 4), "call_ms": round(called, 4)}


if __name__ == "__main__":
    main()
