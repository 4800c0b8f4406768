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

from ragorder.eval.experiments.attention.shapes import AttentionProblem
from ragorder.kernels.attention import prefix_attention

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
        from ragorder.kernels.attention.launch import triton_attention

        tensors = problem.q, problem.k, problem.v, problem.key_cache, problem.value_cache
        if splits is None:
            return lambda: prefix_attention(*tensors, problem.batch, backend="triton")
        scale = 1 / math.sqrt(problem.shape.head_dim)
        return lambda: triton_attention(*tensors, problem.batch, scale, splits=splits)

    return prepare


def _torch(problem: AttentionProblem) -> Compute:
    tensors = problem.q, problem.k, problem.v, problem.key_cache, problem.value_cache
    return lambda: prefix_attention(*tensors, problem.batch, backend="torch")


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
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION, False),
    "flash + gather": _sdpa(SDPBackend.FLASH_ATTENTION, True),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, False),
    "flex": _flex(False),
    "flex + mask": _flex(True),
}
