"""What a check of the doctor found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Verdict"]

Verdict = Literal["good", "warning", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. Whatever is not good comes with an `advice` that says what to change."""

    check: str
    verdict: Verdict
    found: str
    advice: str | None = None
