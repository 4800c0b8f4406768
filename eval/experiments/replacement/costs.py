"""Prefill times on the machine of RAGCache's evaluation."""

from __future__ import annotations

from ragorder.kernels.profile import PrefillProfile

__all__ = ["A10G"]

_CACHED = (0, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
_NEW = (1, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)


def _seconds(cached: int, new: int) -> float:
    return 0.025 + 2.2e-4 * new + 3.2e-8 * new * (cached + new / 2)


A10G = PrefillProfile(
    cached_tokens=_CACHED,
    new_tokens=_NEW,
    seconds=tuple(tuple(_seconds(cached, new) for new in _NEW) for cached in _CACHED),
    facts={"engine": "estimated, not measured", "model": "Mistral-7B", "device": "NVIDIA A10G"},
)
"""Mistral-7B on an NVIDIA A10G, estimated from operations and not measured: 14.5 GFLOP a token at half of the peak in
the layers, 0.52 MFLOP a pair of tokens in the attention. A prompt of 4,000 tokens takes 1.2 s; the paper (section 3.1)
says one second for more than 4,000."""
