"""Attention to contiguous keys in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Rule", "attend", "attend_with_weight", "product"]


_ON_GPU = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN: it reads a mask in words of 16 bytes from any address, a CUDA error that persists in the process."""

_MASK_ALIGNMENT = 8
"""Numbers. A mask's rows begin at multiples on a GPU, as some backends read words without checking."""


@dataclass(frozen=True, slots=True)
class Rule:
    scale: float
    window: int | None
    softcap: float | None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule, *, causal: bool = False) -> Tensor:
    """q (n, query heads, D), k and v (m, KV heads, D), additive mask (n, m); returns (n, query heads, D)."""
    new, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if new == 1 and mask is None:
        # Each head of a group is a query of its one KV head and sees all keys.
        q = q.view(1, kv_heads, group, head_dim)
        found = product(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], None, rule)
        return found.reshape(1, heads, head_dim)
    # A group shares its keys by a stride of 0. KV heads are the batch, so that no backend needs to support groups.
    q = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    k, v = (each.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for each in (k, v))
    found = product(q, k, v, mask, rule, causal=causal)
    return found.permute(2, 0, 1, 3).reshape(new, heads, head_dim)


def product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule, *, causal: bool = False) -> Tensor:
    """(batch, heads, n, D). In float32 with a softcap, which torch's own function lacks."""
    if rule.softcap is None:
        if not q.is_cuda:
            return _sdpa(q, k, v, mask, rule, causal)
        with sdpa_kernel(_ON_GPU):
            return _sdpa(q, k, v, None if mask is None else _aligned(mask), rule, causal)
    scores = _scores(q.float(), k.float(), rule)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)


def attend_with_weight(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """As `attend`; also return each row's log-sum-exp, float32 (n, query heads). Rows without keys: 0 and -inf."""
    new, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    queries = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).reshape(kv_heads, group * new, head_dim)
    keys, values = (each.transpose(0, 1).float() for each in (k, v))
    scores = _scores(queries.float(), keys, rule)
    if mask is not None:
        scores.view(kv_heads, group, *mask.shape).add_(mask)
    top = scores.amax(-1, keepdim=True)
    shares = scores.sub_(top.masked_fill(top == -math.inf, 0)).exp_()
    total = shares.sum(-1, keepdim=True)
    found = torch.matmul(shares, values).div_(total.masked_fill(total == 0, 1))
    found = found.view(kv_heads, group, new, head_dim).permute(2, 0, 1, 3)
    weight = top + total.log()
    weight = weight.view(heads, new).T
    return found.reshape(new, heads, head_dim).to(q.dtype), weight


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule, causal: bool) -> Tensor:
    found: Tensor = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=rule.scale)
    return found


def _aligned(mask: Tensor) -> Tensor:
    """Copy a mask, cut out of the step's mask, into aligned rows."""
    width = mask.shape[-1]
    padded = mask.new_empty(*mask.shape[:-1], -(-width // _MASK_ALIGNMENT) * _MASK_ALIGNMENT)
    return padded[..., :width].copy_(mask)


def _scores(q: Tensor, k: Tensor, rule: Rule) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2))
    if rule.softcap is None:
        return scores.mul_(rule.scale)
    return scores.mul_(rule.scale / rule.softcap).tanh_().mul_(rule.softcap)
