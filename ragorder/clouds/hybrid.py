"""Rules of vLLM's cache for hybrid models (vLLM 0.32, docs/vllm.md).

A layer of Mamba, GDN and the like has one state for a whole prefix, and an engine keeps few states. By default
(`mamba_cache_mode "align"`, `prefix_cache_retention_interval 0`) vLLM keeps the state at the last block of a prompt,
and the state where requests diverge, which it detects at the second one.
"""

from __future__ import annotations

from math import inf

from ragorder.clouds.rules import CacheRules

__all__ = ["hybrid_rules"]

DATE = "2026-11-24"
SOURCE = "vLLM 0.32, v1/core/sched/scheduler.py and v1/core/single_type_kv_cache_manager.py"


def hybrid_rules(block_tokens: int) -> CacheRules:
    """Return the rules of a hybrid model with blocks of this size: `block_size` in its `vllm:cache_config_info`.

        Orderer.for_cloud(rules=hybrid_rules(640), capacity_tokens=…)

    Raises ValueError.
    """
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
