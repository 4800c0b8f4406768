"""Failed steps: their causes, and what may be tried again (RAGCache section 6)."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

from ragorder.kernels.engine.request import Fault
from ragorder.kernels.offload.checkpoint import LayerReadError

__all__ = ["DeviceLostError", "describe", "fault_of"]

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED|can't start new thread")


class DeviceLostError(RuntimeError):
    """The device answers this process no more, as after most CUDA errors: start another process."""


def fault_of(error: Exception) -> Fault:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "memory"
    if isinstance(error, LayerReadError):
        return "disk"
    # torch raises plain RuntimeErrors for devices, and for some mistakes of models too: retries are bounded.
    if not isinstance(error, RuntimeError) or isinstance(error, (NotImplementedError, RecursionError)):
        return "other"
    return "memory" if _NO_MEMORY.search(str(error)) else "device"


def describe(error: BaseException, what: str) -> str:
    """`what` failed and where: the message of an error may quote a prompt, the place where it was raised does not."""
    if isinstance(error, LayerReadError):
        # It names a file.
        return f"{what}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what} ({type(error).__name__} in {Path(place.filename).name}, line {place.lineno})"
