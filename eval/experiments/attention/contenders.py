"""Implementations that are measured: each turns a problem into a call that computes it, and names what its time
covers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ragorder.eval.experiments.attention.shapes import Problem
from ragorder.kernels.attention import prefix_attention

__all__ = ["CONTENDERS", "Contender", "MissingError"]

Run = Callable[[], Tensor]


class MissingError(RuntimeError):
    """Not there, or not for this problem. The message says why."""


@dataclass(frozen=True, slots=True)
class Contender:
    """`prepare` gives what is timed; it returns (tokens, query heads, D), or whatever can be viewed so.
    Raises MissingError."""

    name: str
    timed: str
    prepare: Callable[[Problem], Run]
    gathers: bool = False


def _triton(splits: int | None) -> Callable[[Problem], Run]:
    def prepare(problem: Problem) -> Run:
        _need_kernel(problem)
        from ragorder.kernels.attention.launch import triton_attention

        tensors = problem.q, problem.k, problem.v, problem.key_cache, problem.value_cache
        if splits is None:
            return lambda: prefix_attention(*tensors, problem.batch, backend="triton")
        scale = 1 / math.sqrt(problem.shape.head_dim)
        return lambda: triton_attention(*tensors, problem.batch, scale, splits=splits)

    return prepare


def _torch(problem: Problem) -> Run:
    tensors = problem.q, problem.k, problem.v, problem.key_cache, problem.value_cache
    return lambda: prefix_attention(*tensors, problem.batch, backend="torch")


def _sdpa(backend: SDPBackend, gather: bool) -> Callable[[Problem], Run]:
    """Under this backend or not at all: torch raises where it cannot be."""

    def prepare(problem: Problem) -> Run:
        _need_cuda(problem)
        q = problem.queries()
        gathered = problem.gather()
        how = _causal(backend, problem)

        def run() -> Tensor:
            k, v = problem.gather() if gather else gathered
            with sdpa_kernel([backend]):
                found = scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how)
            return found.transpose(1, 2)

        return run

    return prepare


def _causal(backend: SDPBackend, problem: Problem) -> dict[str, Any]:
    """`is_causal` alone begins at the upper left: right only where nothing is cached."""
    shape = problem.shape
    if not shape.context:
        return {"is_causal": True}
    bias = causal_lower_right(shape.query, shape.context + shape.query)
    if backend is SDPBackend.FLASH_ATTENTION:
        return {"attn_mask": bias}
    return {"attn_mask": bias._materialize(problem.q.device)[None, None]}


def _flex(mask_too: bool) -> Callable[[Problem], Run]:
    def prepare(problem: Problem) -> Run:
        _need_cuda(problem)
        attention, make_mask = _compiled_flex()
        q = problem.queries()
        k, v = problem.gather()
        context = problem.shape.context

        def mask() -> Any:
            return make_mask(
                lambda _batch, _head, query, key: query + context >= key,
                None,
                None,
                q.shape[2],
                k.shape[2],
                device=q.device,
            )

        made = mask()

        def run() -> Tensor:
            block_mask = mask() if mask_too else made
            found: Tensor = attention(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])
            return found.transpose(1, 2)

        return run

    return prepare


@lru_cache
def _compiled_flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), create_block_mask


def _need_cuda(problem: Problem) -> None:
    if not problem.q.is_cuda:
        raise MissingError("needs a GPU")


def _need_kernel(problem: Problem) -> None:
    if find_spec("triton") is None:
        raise MissingError("triton is not installed")
    from ragorder.kernels.attention.launch import INTERPRETED

    if not problem.q.is_cuda and not INTERPRETED:
        raise MissingError("needs a GPU, or TRITON_INTERPRET=1 to be checked")


CONTENDERS = (
    Contender("triton", "the kernel, split as the table says", _triton(None)),
    Contender("triton unsplit", "the kernel without split keys", _triton(1)),
    Contender("torch", "our reference, blocks gathered", _torch, gathers=True),
    Contender("flash", "SDPA flash, keys in one piece already", _sdpa(SDPBackend.FLASH_ATTENTION, False)),
    Contender("flash + gather", "SDPA flash, blocks gathered", _sdpa(SDPBackend.FLASH_ATTENTION, True), gathers=True),
    Contender(
        "cudnn", "SDPA cuDNN, keys in one piece already, mask made already", _sdpa(SDPBackend.CUDNN_ATTENTION, False)
    ),
    Contender("flex", "FlexAttention compiled, keys in one piece and mask made already", _flex(False)),
    Contender("flex + mask", "FlexAttention compiled, the block mask made, too", _flex(True)),
)
