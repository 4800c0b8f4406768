"""Systems that retrieve and generate within a memory budget: the paper's, its ablations, and ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SYSTEMS", "System"]


@dataclass(frozen=True, slots=True)
class System:
    """`serial`: a batch is searched for, then generated. `sizes` of its batches; `placed`: partitions are resident
    where memory is left; `depth`: layers read ahead, None: as many as there is room for. `joined`: requests join
    generation at each step; `kept`: KV of prefixes is shared and kept, with documents by "rank", or "ordered";
    `passes`: requests join retrieval at each partition. `server`: the product's own, with the batches that are joined
    or not, and ordered KV if kept."""

    words: str
    engine: Literal["accelerate", "vllm", "prefetch"] = "prefetch"
    serial: bool = False
    sizes: Literal["backlog", "rate", "fixed"] = "backlog"
    placed: bool = True
    depth: int | None = None
    joined: bool = False
    kept: Literal["", "rank", "ordered"] = ""
    passes: bool = False
    server: bool = False


SYSTEMS = {
    "accrag": System("serial static batches, accelerate (AccRAG)", "accelerate", True, "rate", placed=False),
    "vllmrag": System("serial static batches, vLLM (vLLMRAG)", "vllm", True, "rate", placed=False),
    "flexgen": System("serial static batches, one layer ahead (FlexGen)", "prefetch", True, "rate", False, depth=1),
    "ragdoll": System("RAGDoll"),
    "ragdoll-serial": System("RAGDoll, not pipelined", serial=True),
    "ragdoll-fixed": System("RAGDoll, fixed batches", sizes="fixed"),
    "ragdoll-depth1": System("RAGDoll, one layer ahead (FlexGen)", depth=1),
    "ragdoll-depth0": System("RAGDoll, no prefetch", depth=0),
    "ragdoll-unplaced": System("RAGDoll, no resident partitions", placed=False),
    "server": System("RAGDoll's batches by DecoupledServer", server=True),
    "joined": System("requests join at each step", joined=True),
    "kept": System("and prefixes are kept", joined=True, kept="rank"),
    "ours": System("and documents are ordered (ours)", joined=True, kept="ordered"),
    "ours-server": System("the same by DecoupledServer", joined=True, kept="ordered", server=True),
    "ours+passes": System("ours, and requests join a pass", joined=True, kept="ordered", passes=True),
    "ours-server+passes": System("the same by DecoupledServer", joined=True, kept="ordered", passes=True, server=True),
}
"""By policy; from "joined" each adds to the one before."""
