"""Paged KV: a pool of reference-counted blocks, and copies between pools."""

from ragorder.kernels.paging.layered import LayeredPool
from ragorder.kernels.paging.places import Gathered, Places
from ragorder.kernels.paging.pool import BlockPool, KVShape, OutOfBlocksError, StepBlocks
from ragorder.kernels.paging.transfers import StreamTransfers, ThreadTransfers, Transfer, Transfers, make_transfers

__all__ = [
    "BlockPool",
    "Gathered",
    "KVShape",
    "LayeredPool",
    "OutOfBlocksError",
    "Places",
    "StepBlocks",
    "StreamTransfers",
    "ThreadTransfers",
    "Transfer",
    "Transfers",
    "make_transfers",
]
