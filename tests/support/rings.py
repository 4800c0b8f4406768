"""How thorough the tests are: `make test-all` sets RAGORDER_TESTS=all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("RAGORDER_TESTS") == "all"


def examples(count: int) -> int:
    """Examples of a property: `count` in `make test-all`, at most 25 otherwise."""
    return count if ALL else min(count, 25)


def grid(cases: Sequence[T], few: int) -> Sequence[T]:
    """Cases of a grid: all of them in `make test-all`, `few` evenly spread ones otherwise."""
    if ALL or len(cases) <= few:
        return cases
    return [cases[(2 * place + 1) * len(cases) // (2 * few)] for place in range(few)]


def length(count: int, few: int) -> int:
    """How long a run is: `count` requests in `make test-all`, `few` otherwise."""
    return count if ALL else few
