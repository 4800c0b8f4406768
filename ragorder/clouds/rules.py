"""Rules of a cache that resumes at breakpoints or intervals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple


class UsageFields(NamedTuple):
    """Names of reported counts, with dots between members. If `additive`, `prompt` excludes `read` and `written`."""

    read: str
    written: str
    prompt: str
    additive: bool = False


@dataclass(frozen=True, slots=True)
class CacheRules:
    """A cache's limits, TTL and prices.

        CacheRules("mine", minimum_tokens=1024, marks=4, ttl_s=300, write=1.25, read=0.1)

    - `minimum_tokens`: shorter prefixes are not cached, without an error
    - `resume`: a request resumes at breakpoints of earlier ones ("marks"), at any multiple of `interval_tokens`
      ("interval"), or at the last multiple in an earlier prompt and where requests diverged before ("junctions")
    - `marks`: maximum breakpoints per request
    - `read_marks`: (first, latest) numbers of breakpoints that are looked up if there are more than `marks`; default:
      such a request is refused
    - `lookback_parts`: content parts before each breakpoint at whose ends an entry is looked up
    - `ttl_s`: seconds from the start of the last request that used an entry; `ttl`: the provider's name of it
    - `write`, `read`: prices in multiples of the plain input price
    - `readable`: an entry can be read from its writer's "first token", or from its "start"
    - `usage`: names of the reported counts (default: OpenAI's)
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
            raise ValueError("interval_tokens and lookback_parts must be at least 1")
        if self.read_marks is not None and not (min(self.read_marks) >= 0 and self.read_marks[1] >= self.marks):
            raise ValueError(
                f"read_marks are (first, latest), and latest is at least {self.marks}, got {self.read_marks}"
            )
        if not self.ttl_s > 0:
            raise ValueError(f"ttl_s must be positive, got {self.ttl_s}")
        if not (0 <= self.write < inf and 0 <= self.read < inf):
            raise ValueError("write and read are multiples of the plain input price: give finite numbers, 0 or more")
        if self.resume == "marks" and not self.marks:
            raise ValueError("marks is 0, but the cache resumes at marks: give 1 or more")

    def cost(self, prompt_tokens: float, cached_tokens: float = 0, written_tokens: float = 0) -> float:
        return prompt_tokens + (self.read - 1) * cached_tokens + (self.write - 1) * written_tokens


_VERSION = r"(?:-20\d{6}|-20\d\d-\d\d-\d\d|-latest|-v\d+|:\d+|@20\d{6})*"
_VARIANT = r"(?:-[a-z]+)*"
# Clients choose the text, and matching takes quadratic time.
_LONGEST_NAME = 256


def generation(model: str, known: Iterable[str], *, variants: bool = False) -> str | None:
    """Return the longest known name that the model's name begins with, or None.

    Only a date or version may follow, with `variants` also words. Prefixes of gateways and regions are ignored.
    """
    name = model.lower().rpartition("/")[2]
    if len(name) > _LONGEST_NAME:
        return None
    name = re.sub(r"^(?:[a-z-]+\.)+(?=[a-z])", "", name)
    rest = (_VARIANT if variants else "") + _VERSION
    fitting = [each for each in known if re.fullmatch(re.escape(each) + rest, name)]
    return max(fitting, key=len, default=None)
