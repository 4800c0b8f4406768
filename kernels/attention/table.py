"""Tiles and splits by rows, head dim, dtype and device (docs/kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

HEAD_DIMS = (64, 80, 96, 128, 256)

BLOCK_SIZES = tuple(range(16, 129, 16))

ROWS = (16, 32, 64, 256, 512)
"""Upper bounds of row classes; the last also serves more rows."""

SCATTERED_ROWS = 64
"""Largest class for rows at any positions: fewer rows mask fewer keys."""

MAX_SPLITS = 32

ARCHITECTURES = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_90": 227 * 1024}
"""Bytes of shared memory of a program: A100, consumer cards from Ampere, H100 and later."""

_MIN_SPLIT_TOKENS = 256
"""Smaller splits are mostly overhead."""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    keys: int
    warps: int
    stages: int


# By family, head dim and bytes per number: a tile per class of ROWS; the last one also serves larger classes. Measured
# on an H200: sm_90 with head dim 128, and with 64 up to 16 rows and from 65 (docs/kernels-h200.md).
_TILES: dict[tuple[str, int, int], tuple[Tile, ...]] = {
    ("sm_90", 64, 2): (
        *(Tile(16, 128, 4, 4), Tile(32, 128, 4, 4), Tile(64, 128, 4, 3)),
        *(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3)),
    ),
    ("sm_90", 80, 2): (Tile(16, 64, 4, 4), Tile(32, 64, 4, 4), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("sm_90", 96, 2): (Tile(16, 64, 4, 4), Tile(32, 64, 4, 4), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("sm_90", 128, 2): (Tile(16, 64, 4, 4), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("sm_90", 256, 2): (Tile(16, 32, 4, 4), Tile(32, 32, 4, 4), Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)),
    ("sm_80", 64, 2): (Tile(16, 64, 4, 4), Tile(32, 64, 4, 4), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("sm_80", 80, 2): (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("sm_80", 96, 2): (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("sm_80", 128, 2): (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 32, 4, 3), Tile(128, 64, 8, 3)),
    ("sm_80", 256, 2): (Tile(16, 32, 4, 3), Tile(32, 32, 4, 3), Tile(64, 32, 8, 3), Tile(64, 32, 8, 3)),
    ("sm_86", 64, 2): (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("sm_86", 80, 2): (Tile(16, 64, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)),
    ("sm_86", 96, 2): (Tile(16, 32, 4, 3), Tile(32, 32, 4, 3), Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)),
    ("sm_86", 128, 2): (Tile(16, 32, 4, 3), Tile(32, 64, 4, 3), Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)),
    ("sm_86", 256, 2): (Tile(16, 16, 4, 3), Tile(32, 16, 4, 3), Tile(64, 16, 4, 3), Tile(64, 16, 4, 3)),
}

# Single precision has no tensor cores; these are for checks.
_SINGLE: dict[int, tuple[Tile, ...]] = {
    64: (Tile(16, 32, 4, 2), Tile(32, 32, 8, 2)),
    80: (Tile(16, 32, 4, 2), Tile(32, 32, 8, 2)),
    96: (Tile(16, 32, 8, 2), Tile(32, 32, 8, 2)),
    128: (Tile(16, 32, 8, 2),),
    256: (Tile(16, 16, 8, 2), Tile(32, 16, 8, 2)),
}


def architecture(capability: tuple[int, int]) -> str:
    """Return the family, for an unknown device the one with the least memory."""
    major, minor = capability
    if major in (9, 10):
        return "sm_90"
    return "sm_80" if (major, minor) in ((8, 0), (8, 7)) else "sm_86"


def choose_tile(family: str, head_dim: int, itemsize: int, rows: int) -> Tile:
    """Return the tile for up to `rows` rows. Raises KeyError."""
    tiles = _SINGLE[head_dim] if itemsize == 4 else _TILES[family, head_dim, itemsize]
    return next((tile for tile, most in zip(tiles, ROWS, strict=False) if rows <= most), tiles[-1])


def halves(head_dim: int) -> tuple[int, int]:
    """Split into powers of two, the second possibly 0: 80 = 64 + 16."""
    main = 1 << (head_dim.bit_length() - 1)
    return main, head_dim - main


def count_programs(tile: Tile, tokens: int, requests: int, group: int, kv_heads: int) -> int:
    return max(-(-tokens * group // tile.rows), requests) * kv_heads


@lru_cache(maxsize=4096)
def choose_splits(tile: Tile, programs: int, keys: int, multiprocessors: int) -> int:
    """Return the splits that keep all multiprocessors busy, as in FlashAttention."""
    # The registers of eight warps fill a multiprocessor.
    room = multiprocessors * max(1, 8 // tile.warps)
    # The fewest splits that fill the last wave of programs within 15 % of the best.
    if programs >= 0.8 * room:
        return 1
    most = min(MAX_SPLITS, keys // _MIN_SPLIT_TOKENS)
    if most <= 1:
        return 1
    waves = [programs * splits / room for splits in range(1, most + 1)]
    filled = [wave / -(-wave // 1) for wave in waves]
    good = 0.85 * max(filled)
    return next(splits for splits, share in enumerate(filled, 1) if share >= good)
