"""How large the tiers are beside the working set: what one measurement is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragorder.eval.tiering.requests import Stream

__all__ = ["CELLS", "TieringCell", "kv_bytes_per_token", "make_cells"]

_ROOM = 1.25
"""What a tier that is to hold the whole working set has, as a multiple of it: the answers and the warm-up need some."""

_SHARES: dict[str, tuple[float, float, float | None]] = {
    "device": (_ROOM, _ROOM, None),
    "host": (0.25, _ROOM, None),
    "beyond": (0.25, 0.5, None),
    "disk": (0.25, 0.5, _ROOM),
}
CELLS = tuple(_SHARES)
"""Where the working set finds room: in the device's pool; in the host; in neither; on the disk."""


@dataclass(frozen=True, slots=True)
class TieringCell:
    """The sizes of all tiers, the device's in blocks, the others' in bytes; `disk_bytes` None: there is no disk."""

    name: str
    blocks: int
    host_bytes: int
    disk_bytes: int | None
    working_set_tokens: int

    def fields(self) -> dict[str, Any]:
        """As they stand in a result."""
        return {
            "tier": self.name,
            "blocks": self.blocks,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "working_set_tokens": self.working_set_tokens,
        }


def make_cells(
    names: Sequence[str], streams: Sequence[Stream], *, block_size: int, bytes_per_token: int
) -> list[TieringCell]:
    """The cells of these names for streams (one a seed) that are served by the same servers.

    Sizes follow the largest working set. The device's pool is never smaller than the longest prompt and its answer; the
    disk is not emptied between the seeds, and has room for all of them.
    """
    largest = max(stream.working_set_tokens for stream in streams)
    every = sum(stream.working_set_tokens for stream in streams)
    least = max(stream.longest_tokens for stream in streams) // block_size + 2
    cells = []
    for name in names:
        device, host, disk = _SHARES[name]
        cells.append(
            TieringCell(
                name,
                max(least, round(largest * device) // block_size),
                round(largest * host) * bytes_per_token,
                None if disk is None else round(every * disk) * bytes_per_token,
                largest,
            )
        )
    return cells


def kv_bytes_per_token(config: Any, value_bytes: int) -> int:
    """Of a model whose layers are all alike, from its configuration as transformers reads it."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * value_bytes)
