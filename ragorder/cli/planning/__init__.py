"""Plans of batches larger than memory: requests are spilled as numbers, dealt to shards, and planned shard by shard."""

from __future__ import annotations

from ragorder.cli.planning.folder import PlanError
from ragorder.cli.planning.run import PlanOptions, plan_file

__all__ = ["PlanError", "PlanOptions", "plan_file"]
