"""Options of a request besides its question."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypedDict

__all__ = ["RunOptions", "checked_options"]


class RunOptions(TypedDict, total=False):
    """`state`: values for the graph's `inputs`; `scope`: the tenant, whose cached prefixes are its own."""

    state: Mapping[str, Any] | None
    scope: Hashable


def checked_options(options: RunOptions) -> RunOptions:
    """Raises TypeError for others: without its scope a request would share the prefixes of those that have none."""
    unknown = options.keys() - RunOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a request has no {', '.join(sorted(unknown))}: its options are state and scope")
    return options
