"""Paged KV: pools of reference-counted blocks, and copies between them."""

from ragorder.kernels.paging.layered import LayeredPool
from ragorder.kernels.paging.places import Gathered, KVPositions
from ragorder.kernels.paging.pool import BlockPool, KVShape, OutOfBlocksError, StepBlocks
from ragorder.kernels.paging.transfers import StreamTransfers, ThreadTransfers, Transfer, Transfers, make_transfers

__all__ = [
    "BlockPool",
    "Gathered",
    "KVPositions",
    "KVShape",
    "LayeredPool",
    "OutOfBlocksError",
    "StepBlocks",
    "StreamTransfers",
    "ThreadTransfers",
    "Transfer",
    "Transfers",
    "make_transfers",
]
