"""The cell and the record of a prefill profile."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.trie.profile import PrefillProfile

__all__ = ["ProfileCell", "ProfileRecord"]

_Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, Field(strict=False)]


class ProfileCell(SuiteCell):
    """Numbers of `cached` and `new` tokens (by default a series each), measured in `repeats` rounds; `block_size` of a
    server that does not publish it."""

    cached: _Counts = None
    new: _Counts = None
    repeats: int = Field(5, ge=1)
    block_size: int | None = Field(None, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return False


class ProfileRecord(Record):
    """A server's profile: a row for each pair of `cached_tokens` and `new_tokens`."""

    called: ClassVar[str] = "a prefill profile"
    is_run: ClassVar[bool] = False

    type: Literal["profile"] = "profile"
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        self.profile  # noqa: B018
        return self

    @property
    def profile(self) -> PrefillProfile:
        cached, new = (tuple(dict.fromkeys(map(int, self.rows[name]))) for name in ("cached_tokens", "new_tokens"))
        seconds, width = self.rows["seconds"], len(new)
        rows = [tuple(seconds[start : start + width]) for start in range(0, len(seconds), width)]
        return PrefillProfile(cached, new, tuple(rows), self.facts)

    @staticmethod
    def rows_of(profile: PrefillProfile) -> dict[str, list[Any]]:
        pairs = [(cached, new) for cached in profile.cached_tokens for new in profile.new_tokens]
        cached_tokens, new_tokens = map(list, zip(*pairs, strict=True))
        seconds = [time_s for row in profile.seconds for time_s in row]
        return {"cached_tokens": cached_tokens, "new_tokens": new_tokens, "seconds": seconds}
