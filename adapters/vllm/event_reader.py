"""Decoder of KV event batches from vLLM and SGLang."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ragorder.trie.residency import Place
from ragorder.trie.residency.blocks import EngineBlocks

__all__ = ["LARGEST_MESSAGE_BYTES", "EventCounters", "EventReader"]

LARGEST_MESSAGE_BYTES = 1 << 26
"""Batches have some kilobytes. Without a limit a message is read into memory first."""

_logger = logging.getLogger("ragorder")

# Events are maps; from SGLang and older vLLM, arrays in this order.
_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


# Names of vLLM and SGLang; other media count as the device.
_PLACES: dict[Any, Place] = {
    "GPU": Place.DEVICE,
    "CPU": Place.HOST,
    "CPU_PINNED": Place.HOST,
    "STORAGE": Place.DISK,
    "DISK": Place.DISK,
}
_BELOW = (Place.HOST, Place.DISK)


@dataclass(slots=True)
class EventCounters:
    """`start_overs`: the engine's first events were no longer available; `restarts`: new engines; `silences`: no
    answer; `garbage`: unreadable messages and events; `orphans`: stored blocks with an unknown parent."""

    batches: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    gaps: int = 0
    replays: int = 0
    start_overs: int = 0
    restarts: int = 0
    silences: int = 0
    garbage: int = 0
    other_topics: int = 0
    orphans: int = 0


class EventReader:
    def __init__(self, decode: Callable[[bytes], Any], counters: EventCounters) -> None:
        self.counters = counters
        self._decode = decode
        self._warned_block_size = False

    def read(self, payload: bytes, blocks: EngineBlocks) -> None:
        """Unreadable parts are skipped."""
        self.counters.batches += 1
        try:
            told = self._decode(payload)
            # Some versions of vLLM send the batch as a map, too.
            events = list(told["events"] if isinstance(told, dict) else told[1])
        except Exception:
            self.counters.garbage += 1
            return
        for event in events:
            try:
                self._apply(event, blocks)
            except Exception:
                self.counters.garbage += 1

    def _apply(self, event: Any, blocks: EngineBlocks) -> None:
        kind, fields = _fields(event)
        # Other groups of a hybrid model have their own blocks for the same tokens.
        if fields.get("group_idx") or fields.get("locality") == "REMOTE":
            return
        hashes, medium = fields.get("block_hashes", ()), fields.get("medium")
        medium = _PLACES.get(medium, medium)
        if kind == "BlockStored" and medium in _BELOW and not fields.get("extra_keys"):
            # vLLM omits the salt here: only a block known from the device has known content.
            self.counters.orphans += blocks.keep(hashes, medium)
            self.counters.stored += len(hashes)
        elif kind == "BlockStored":
            parent, token_ids, extra_keys = fields["parent_block_hash"], fields["token_ids"], fields.get("extra_keys")
            self._compare(fields.get("block_size"), len(token_ids), len(hashes), blocks.block_size)
            adapter = fields.get("lora_name") or fields.get("lora_id")
            if adapter:
                # In the extra keys it looks like a salt; older engines omit it there.
                extra_keys = [("LoRA", adapter, *(keys or ())) for keys in extra_keys or [None] * len(hashes)]
            orphans = blocks.orphans
            blocks.store(hashes, parent, token_ids, extra_keys, medium)
            self.counters.orphans += blocks.orphans - orphans
            self.counters.stored += len(hashes)
        elif kind == "BlockRemoved":
            blocks.remove(hashes, medium)
            self.counters.removed += len(hashes)
        elif kind == "AllBlocksCleared":
            blocks.clear()
            self.counters.cleared += 1

    def _compare(self, theirs: Any, tokens: int, blocks: int, ours: int) -> None:
        """A size counts only if the event's own tokens confirm it."""
        if theirs == ours or not (tokens and tokens == theirs * blocks) or self._warned_block_size:
            return
        self._warned_block_size = True
        _logger.warning(
            "the engine's KV blocks have %d tokens, the orderer's %d: give block_size=%d", theirs, ours, theirs
        )


def _fields(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        return event["type"], event
    kind, *values = event
    return kind, dict(zip(_FIELDS.get(kind, ()), values, strict=False))
