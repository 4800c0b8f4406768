"""Settings of the orderer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ragorder.common.counts import parse_count
from ragorder.guards import Guards
from ragorder.trie.search import SearchName, searches
from ragorder.trie.tail import MIN_GAIN, TailName, tails

_MOVES = ("earned", "free", "prefix")


class Settings(BaseSettings):
    """Properties of the engine and the prompt, and policies of the orderer.

        Settings(capacity_tokens=262_144, block_size=16, moves="prefix")

    The environment sets them too (RAGORDER_CAPACITY_TOKENS=…).
    """

    model_config = SettingsConfigDict(env_prefix="RAGORDER_", extra="forbid", frozen=True)

    # vLLM evicts partly filled blocks first. The evaluation also simulates an engine that does not.
    partial_blocks_first: ClassVar[bool] = True

    capacity_tokens: int | None = Field(
        262_144, ge=1, description="Capacity of the engine's KV cache in tokens, or unlimited."
    )
    host_tokens: int = Field(
        0, ge=0, description="Capacity of the engine's host memory tier in tokens; 0: no such tier."
    )
    disk_tokens: int = Field(0, ge=0, description="Capacity of its disk tier in tokens; 0: no such tier.")
    tier_policy: str = Field("pgdsf", validate_default=False, description="Replacement policy of the tiers.")
    tier_copies: Literal["computed", "evicted"] = Field(
        "computed",
        description="KV that the engine copies to host memory and disk: all computed KV, like vLLM with ragorder's "
        "tiers, or KV evicted from the tier above, like the embedded engine.",
    )
    profile: Path | None = Field(
        None,
        description="File of prefill and load times on this engine, from `ragorder profile`. Cached prefixes are then "
        "compared in seconds.",
        json_schema_extra={"unset": "in tokens"},
    )
    block_size: int = Field(16, ge=1, description="Tokens in one KV block of the engine.")
    prefix_tokens: int = Field(0, ge=0, description="Tokens of the prompt before the first document.")
    suffix_tokens: int = Field(64, ge=0, description="Tokens of question and answer, which also use the cache.")

    search: Annotated[SearchName, AfterValidator(searches.check)] = Field(
        "best",
        description=f"Cached prefix that a request extends. {searches.help}.",
        json_schema_extra={"enum": [*searches.names]},
    )
    moves: Annotated[TailName, AfterValidator(tails.check)] = Field(
        "earned",
        description=f"Which documents move after the cached prefix. {tails.help_of(_MOVES)}. For comparison: "
        f"{tails.help_of(name for name in tails.names if name not in _MOVES)}.",
        json_schema_extra={"enum": [*tails.names]},
    )
    min_gain: float = Field(
        MIN_GAIN,
        ge=0,
        description="Tokens that moving a document forward must be expected to save, in the next 300 requests, for "
        "each position that it moves after the cached prefix.",
    )
    best: Literal["any", "first", "last"] = Field(
        "any",
        description="Preferred position of the most relevant document: first, last (next to the question), or any. "
        "Models differ: `ragorder eval quality --places` measures it.",
    )
    best_tokens: int = Field(128, ge=0, description="Maximum cached tokens that a request may lose for this position.")
    reuse: Literal["exact", "fused"] = Field(
        "exact",
        description="exact: the engine reuses only exact prefixes; fused: it also reuses documents computed in other "
        "prompts (embedded engine, see docs/fusion.md).",
    )
    recompute: float = Field(
        0.15, ge=0, le=1, description="Share of the tokens reused outside the prefix that a fused request recomputes."
    )
    copies: Literal["served", "all"] = Field(
        "served",
        description="Documents that can be reused outside the prefix: those in the engine's cache, or all (after "
        "`ragorder fuse build`).",
    )
    invest: bool = Field(
        True,
        description="With copies of all documents: whether to recompute documents of many requests exactly, so that "
        "later requests find them in an exact prefix.",
    )
    residency: Literal["lru", "none"] = Field(
        "lru", description="Model of the engine's evictions: least recently used first, or no evictions."
    )
    feedback: bool = Field(True, description="Whether the engine's reported cached tokens correct this model.")

    keep_first: int = Field(0, ge=0, description="Number of top-ranked documents that stay first.")
    keep_last: int = Field(
        0, ge=0, description="Number of top-ranked documents that come last, rank 1 next to the question."
    )
    max_displacement: int | None = Field(
        None,
        ge=0,
        description="Maximum positions that a document may move from its rank.",
        json_schema_extra={"unset": "any number"},
    )
    keep_groups: bool = Field(False, description='Keep the order of documents with the same metadata "source".')
    max_gain_lost: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Maximum share of retrieval order's discounted cumulative gain (nDCG, relevance 1/rank) that "
        "may be lost.",
        json_schema_extra={"unset": "any share"},
    )

    events_endpoint: str | None = Field(None, description="ZMQ endpoint of vLLM's KV events, such as tcp://host:5557.")
    replay_endpoint: str | None = Field(None, description="ZMQ endpoint that replays lost KV events.")
    events_topic: str = Field("", description="Topic of the KV events; empty: any.")

    strict: bool = Field(False, description="Raise internal errors instead of falling back to retrieval order.")

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, given: Any) -> Any:
        if isinstance(given, dict):
            _check_names(given, cls.model_fields)
        return given

    @field_validator("capacity_tokens", mode="before")
    @classmethod
    def _unlimited(cls, value: object) -> object:
        return None if value in ("none", "unlimited") else _count(value)

    @field_validator("host_tokens", "disk_tokens", mode="before")
    @classmethod
    def _with_unit(cls, value: object) -> object:
        return _count(value)

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.keep_first and self.keep_last:
            raise ValueError("keep_first and keep_last exclude each other: keep the top documents at one end")
        for kept, end, other in ((self.keep_first, "last", "first"), (self.keep_last, "first", "last")):
            if kept and self.best == end:
                raise ValueError(f"best={end!r} and keep_{other} exclude each other: give keep_{end}, or leave one out")
        return self

    @model_validator(mode="after")
    def _fused_in_process(self) -> Self:
        if self.reuse == "fused" and self.events_endpoint is not None:
            raise ValueError(
                "reuse='fused' needs the embedded engine, which has no KV events: leave events_endpoint out"
            )
        return self

    @property
    def held_tokens(self) -> int | None:
        if self.capacity_tokens is None:
            return None
        tiers = self.capacity_tokens, self.host_tokens, self.disk_tokens
        return max(tiers) if self.tier_copies == "computed" else sum(tiers)

    @property
    def guards(self) -> Guards:
        return Guards(self.keep_first, self.keep_last, self.max_displacement, self.keep_groups, self.max_gain_lost)

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values, which are not validated."""
        _check_names(changes, type(self).model_fields)
        return self.model_copy(update=changes)


def _check_names(given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            raise ValueError(f"there is no setting {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def _count(value: object) -> object:
    return parse_count(value) if isinstance(value, str) else value


class OrdererOptions(TypedDict, total=False):
    """The fields of `Settings` as keyword arguments."""

    capacity_tokens: int | None
    host_tokens: int
    disk_tokens: int
    tier_policy: str
    tier_copies: Literal["computed", "evicted"]
    profile: Path | None
    block_size: int
    prefix_tokens: int
    suffix_tokens: int
    search: SearchName
    moves: TailName
    min_gain: float
    best: Literal["any", "first", "last"]
    best_tokens: int
    reuse: Literal["exact", "fused"]
    recompute: float
    copies: Literal["served", "all"]
    invest: bool
    residency: Literal["lru", "none"]
    feedback: bool
    keep_first: int
    keep_last: int
    max_displacement: int | None
    keep_groups: bool
    max_gain_lost: float | None
    events_endpoint: str | None
    replay_endpoint: str | None
    events_topic: str
    strict: bool


def either(settings: Settings | None, options: OrdererOptions) -> Settings:
    if settings is None:
        return Settings(**options)
    if options:
        raise TypeError(f"give either settings or options, not both: {', '.join(sorted(options))}")
    return settings
