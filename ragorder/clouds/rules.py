"""Rules of a cache that resumes a prefix only at marks, or at intervals."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

__all__ = ["CacheRules", "UsageFields"]


class UsageFields(NamedTuple):
    """Names of reported token counts, members separated by dots.

    Of `prompt` tokens some are read and some written (inclusive), or `prompt` are those that are neither (`additive`).
    """

    read: str
    written: str
    prompt: str
    additive: bool = False


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What a cache keeps, for how long, and what it charges.

        CacheRules("mine", minimum_tokens=1024, marks=4, ttl_s=300, write=1.25, read=0.1)

    - `minimum_tokens`: shorter prefixes are not kept, and nothing says so
    - `resume`: a request resumes at "marks" that earlier ones have set, or at any multiple of `interval_tokens`
      ("interval"), or at the last of these in an earlier prompt and where requests have parted before ("junctions")
    - `marks`: at most so many a request
    - `read_marks`: (first, latest): a request may have more marks, of which the latest `marks` are written, and so many
      are looked at. None: more are refused
    - `lookback_parts`: content parts in front of each mark, its own counted, at whose ends an entry is looked for
    - `ttl_s`: life of an entry from the start of a request; requests that read it renew it. `ttl`: as the provider
      spells it
    - `write`, `read`: prices in multiples of the plain input price
    - `readable`: from its writer's "first token" on, or from its "start", an entry can be read
    - `usage`: names of the reported counts; None: OpenAI's
    - `source`, `date`: where the figures were read, and when

    Raises ValueError for figures that cannot be.
    """

    name: str
    minimum_tokens: int = 0
    resume: Literal["marks", "interval", "junctions"] = "marks"
    interval_tokens: int = 1
    marks: int = 4
    read_marks: tuple[int, int] | None = None
    lookback_parts: int = 1
    ttl_s: float = 300.0
    ttl: str | None = None
    write: float = 1.25
    read: float = 0.1
    readable: Literal["first token", "start"] = "first token"
    usage: UsageFields | None = None
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if self.resume not in ("marks", "interval", "junctions"):
            raise ValueError(f"resume must be 'marks', 'interval' or 'junctions', got {self.resume!r}")
        if self.readable not in ("first token", "start"):
            raise ValueError(f"readable must be 'first token' or 'start', got {self.readable!r}")
        if self.minimum_tokens < 0 or self.marks < 0:
            raise ValueError("minimum_tokens and marks must not be negative")
        if self.interval_tokens < 1 or self.lookback_parts < 1:
            raise ValueError("interval_tokens and lookback_parts must be 1 at least")
        if self.read_marks is not None and not (min(self.read_marks) >= 0 and self.read_marks[1] >= self.marks):
            raise ValueError(
                f"read_marks are (first, latest), and latest is at least {self.marks}, got {self.read_marks}"
            )
        if not self.ttl_s > 0:
            raise ValueError(f"ttl_s must be positive, got {self.ttl_s}")
        if not (0 <= self.write < inf and 0 <= self.read < inf):
            raise ValueError("write and read are multiples of the plain input price: neither may be negative")
        if self.resume == "marks" and not self.marks:
            raise ValueError("a cache that resumes at marks takes one at least: raise marks")

    @property
    def break_even(self) -> float:
        """Expected reads of what is written, above which writing it saves money."""
        if self.write <= 1:
            return 0.0
        return (self.write - 1) / (1 - self.read) if self.read < 1 else inf

    def cost(self, prompt_tokens: float, cached_tokens: float = 0, written_tokens: float = 0) -> float:
        """Of a prompt, in input tokens at the plain price."""
        return prompt_tokens + (self.read - 1) * cached_tokens + (self.write - 1) * written_tokens
