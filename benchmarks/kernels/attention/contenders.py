"""Implementations of attention that are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ragorder.benchmarks.kernels.attention.shapes import AttentionProblem
from ragorder.kernels.attention import prefix_attention, sparse_attention
from ragorder.kernels.attention.attention import Backend
from ragorder.kernels.attention.ranges import Ranges

__all__ = ["CONTENDERS", "Contender", "MissingError"]

Compute = Callable[[], Tensor]
"""Computes (tokens, query heads, D), or what can be viewed so."""

Contender = Callable[[AttentionProblem], Compute]
"""Prepares a problem, outside the measured time. Raises MissingError."""


class MissingError(RuntimeError):
    """Not available, or not for this problem."""


def _triton(splits: int | None) -> Contender:
    def prepare(problem: AttentionProblem) -> Compute:
        _need_kernel(problem)
        from ragorder.kernels.attention.launch import triton_attention, triton_sparse_attention

        if splits is None:
            return _ours(problem, "triton")
        caches, scale = (problem.key_cache, problem.value_cache), 1 / math.sqrt(problem.shape.head_dim)
        if problem.shape.scattered:
            ranges = Ranges.of(problem.batch, problem.positions, None, None)
            return lambda: triton_sparse_attention(problem.q, *caches, problem.batch, ranges, scale, splits=splits)[0]
        return lambda: triton_attention(problem.q, problem.k, problem.v, *caches, problem.batch, scale, splits=splits)

    return prepare


def _torch(problem: AttentionProblem) -> Compute:
    return _ours(problem, "torch")


def _ours(problem: AttentionProblem, backend: Backend) -> Compute:
    caches, batch = (problem.key_cache, problem.value_cache), problem.batch
    if problem.shape.scattered:
        return lambda: sparse_attention(problem.q, *caches, batch, problem.positions, backend=backend)
    return lambda: prefix_attention(problem.q, problem.k, problem.v, *caches, batch, backend=backend)


def _masked(problem: AttentionProblem) -> Compute:
    # The backend that torch takes with a mask.
    q, (k, v), seen = problem.queries(), problem.gather(), problem.seen()
    group = q.shape[1] != k.shape[1]
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=group).transpose(1, 2)


def _sdpa(backend: SDPBackend, gather: bool) -> Contender:
    # torch raises where the backend cannot serve the problem.

    def prepare(problem: AttentionProblem) -> Compute:
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


def _causal(backend: SDPBackend, problem: AttentionProblem) -> dict[str, Any]:
    # `is_causal` alone begins at the upper left: right only where nothing is cached.
    shape = problem.shape
    if shape.scattered and backend is SDPBackend.FLASH_ATTENTION:
        raise MissingError("has no mask for rows at any positions")
    if shape.scattered:
        return {"attn_mask": problem.seen()[None, None]}
    if not shape.context:
        return {"is_causal": True}
    bias = causal_lower_right(shape.query, shape.context + shape.query)
    if backend is SDPBackend.FLASH_ATTENTION:
        return {"attn_mask": bias}
    return {"attn_mask": bias._materialize(problem.q.device)[None, None]}


def _flex(mask_too: bool) -> Contender:
    def prepare(problem: AttentionProblem) -> Compute:
        _need_cuda(problem)
        attention, make_mask = _compiled_flex()
        q = problem.queries()
        k, v = problem.gather()
        positions = problem.positions[: problem.shape.query]

        def mask() -> Any:
            return make_mask(
                lambda _batch, _head, query, key: positions[query] >= key,
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


def _need_cuda(problem: AttentionProblem) -> None:
    if not problem.q.is_cuda:
        raise MissingError("needs a GPU")


def _need_kernel(problem: AttentionProblem) -> None:
    if find_spec("triton") is None:
        raise MissingError("triton is not installed")
    from ragorder.kernels.attention.launch import INTERPRETED

    if not problem.q.is_cuda and not INTERPRETED:
        raise MissingError("needs a GPU, or TRITON_INTERPRET=1 to be checked")


CONTENDERS: dict[str, Contender] = {
    "triton": _triton(None),
    "triton unsplit": _triton(1),
    "torch": _torch,
    "sdpa + mask": _masked,
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION, False),
    "flash + gather": _sdpa(SDPBackend.FLASH_ATTENTION, True),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, False),
    "flex": _flex(False),
    "flex + mask": _flex(True),
}
