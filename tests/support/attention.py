"""How exact attention is, and a cache of blocks in which nothing may be read that is not a request's."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ragorder.kernels.attention import PackedBatch

TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
FAR_OFF = 0.05


def error(found: Tensor, wanted: Tensor) -> float:
    """The greatest, of numbers above 1 relative to them; what is not a number is infinitely wrong."""
    import torch

    difference = (found.double() - wanted).abs() / wanted.abs().clamp(min=1)
    return float(torch.nan_to_num(difference, nan=math.inf).max()) if found.numel() else 0.0


def make_cache(
    filled: Sequence[int], block_size: int, kv_heads: int, head_dim: int, dtype: Any, rng: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Key cache, value cache and block tables of requests with so many tokens. All else is not a number, or no block,
    but for two blocks that no table names."""
    import torch

    needed = [-(-tokens // block_size) for tokens in filled]
    spare = 2
    # As the engine's pool is: all layers' keys and values of a block in one piece.
    pool = torch.full((sum(needed) + spare, 2, 2, block_size, kv_heads, head_dim), math.nan, dtype=dtype)
    order = torch.randperm(len(pool), generator=rng).tolist()
    pool[order[-spare:], 1] = torch.randn(pool[order[-spare:], 1].shape, generator=rng).to(dtype)
    tables = torch.full((len(needed), max(needed, default=0) + 3), 2**31 - 1, dtype=torch.int32)
    for row, (tokens, blocks) in enumerate(zip(filled, needed, strict=True)):
        table = [order.pop(0) for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(table, dtype=torch.int32)
        for place, block in enumerate(table):
            shape = 2, min(block_size, tokens - place * block_size), kv_heads, head_dim
            pool[block, 1, :, : shape[1]] = torch.randn(shape, generator=rng).to(dtype)
    return pool[:, 1, 0], pool[:, 1, 1], tables


class Named:
    """A case whose name is what it changes of the plain one."""

    def __str__(self) -> str:
        plain = type(self)()
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return " ".join(changed).replace("(", "").replace(")", "") or "plain"


def wrong_block(given: Any) -> Any:
    """The first request with a context looks at another block instead of its first."""
    row = int(given.batch.context_lengths.gt(0).nonzero()[0])
    tables = given.batch.block_tables.clone()
    used = set(tables.flatten().tolist())
    others = (block for block in range(len(given.key_cache)) if block not in used)
    tables[row, 0] = next(block for block in others if not given.key_cache[block].isnan().any())
    return replace(given, batch=replace(given.batch, block_tables=tables))


def interpret(python: Any, file: str) -> list[dict[str, float]]:
    """What the file says, run as a script in Triton's interpreter, case by case."""
    done = python(Path(file), path=(Path(__file__).parents[1],), timeout=580, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on the device, strided as it was, with all that lies between its numbers."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).to(device)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def batch_on(batch: PackedBatch, device: str) -> PackedBatch:
    return replace(
        batch,
        query_starts=batch.query_starts.to(device),
        context_lengths=batch.context_lengths.to(device),
        block_tables=batch.block_tables.to(device),
    )


def paged(cache: Tensor, table: Tensor, tokens: int) -> Tensor:
    """The first tokens of a request, (tokens, KV heads, D)."""
    import torch

    blocks = table[: -(-tokens // cache.shape[1])].tolist()
    return torch.cat([cache[block] for block in blocks] or [cache[:0].flatten(0, 1)])[:tokens]
