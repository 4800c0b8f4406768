"""Result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Verdict"]

Verdict = Literal["good", "warning", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check; `advice` says what to change."""

    check: str
    verdict: Verdict
    found: str
    advice: str | None = None
