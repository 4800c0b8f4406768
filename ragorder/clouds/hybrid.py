"""Rules of vLLM's cache for hybrid models, read in vLLM 0.32 and measured on it (docs/vllm.md).

Layers of Mamba, GDN and the like have one state for a whole prefix, of which an engine keeps few: vLLM
(`mamba_cache_mode "align"`, `prefix_cache_retention_interval 0`, its defaults) that at the last block of a prompt, and
that where a request parts from earlier ones, which it finds out with the second one.
"""

from __future__ import annotations

from math import inf

from ragorder.clouds.rules import CacheRules

__all__ = ["hybrid_rules"]

DATE = "2026-11-24"
SOURCE = "vLLM 0.32, v1/core/sched/scheduler.py and v1/core/single_type_kv_cache_manager.py"


def hybrid_rules(block_tokens: int) -> CacheRules:
    """For `Orderer.for_cloud(rules=hybrid_rules(640), capacity_tokens=…)`, an engine whose hybrid model has blocks of
    so many tokens: `block_size` in its `vllm:cache_config_info`. Raises ValueError."""
    return CacheRules(
        f"hybrid model, blocks of {block_tokens}",
        resume="junctions",
        interval_tokens=block_tokens,
        marks=0,
        ttl_s=inf,
        write=1.0,
        read=0.0,
        readable="start",
        source=SOURCE,
        date=DATE,
    )
