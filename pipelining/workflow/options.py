"""What a request gives besides its question."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypedDict

__all__ = ["RunOptions"]


class RunOptions(TypedDict, total=False):
    """`state`: values for the graph's `inputs`; `scope`: the tenant, whose cached prefixes are its own."""

    state: Mapping[str, Any] | None
    scope: Hashable
