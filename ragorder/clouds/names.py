"""Generations of models, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["generation"]

_VERSION = r"(?:-20\d{6}|-20\d\d-\d\d-\d\d|-latest|-v\d+|:\d+|@20\d{6})*"
_VARIANT = r"(?:-[a-z]+)*"


def generation(model: str, known: Iterable[str], *, variants: bool = False) -> str | None:
    """Return the longest known name that the model's name begins with, or None.

    Only a date or a version may follow, or with `variants` also a word. Prefixes of gateways and regions
    ("openrouter/", "eu.anthropic.") are ignored.
    """
    name = model.lower().rpartition("/")[2]
    name = re.sub(r"^(?:[a-z-]+\.)+(?=[a-z])", "", name)
    rest = (_VARIANT if variants else "") + _VERSION
    fitting = [each for each in known if re.fullmatch(re.escape(each) + rest, name)]
    return max(fitting, key=len, default=None)
