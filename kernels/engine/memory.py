"""How much KV fits, where nobody says."""

from __future__ import annotations

import os

import torch

from ragorder.kernels.paging import KVShape

__all__ = ["device_blocks"]

_CPU_PROMPTS = 4
_CPU_SHARE = 0.25
# What a CPU engine takes for a model that tells no greatest length.
_CPU_TOKENS = 32768


def device_blocks(
    shape: KVShape, device: torch.device, device_tokens: int | None, longest: int | None, gpu_share: float
) -> int:
    """Blocks of the pool: those of `device_tokens`, or what fits: on a GPU a share of its free memory, on a CPU four
    prompts of the greatest length, but no more than a quarter of the memory.

    Raises ValueError if that is not one block.
    """
    if device_tokens is not None:
        return max(1, device_tokens // shape.block_size)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        blocks = int(free * gpu_share) // shape.block_bytes
        room = f"{gpu_share:.0%} of the {free} free bytes of {device}"
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        wanted = shape.blocks_for(_CPU_PROMPTS * (longest or _CPU_TOKENS))
        blocks = min(wanted, int(memory * _CPU_SHARE) // shape.block_bytes)
        room = f"{_CPU_SHARE:.0%} of the {memory} bytes of memory"
    if blocks < 1:
        raise ValueError(
            f"{room} hold no KV block of {shape.block_bytes} bytes: give device_tokens, a smaller block_size, or "
            "a smaller model"
        )
    return blocks
