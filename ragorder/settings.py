"""Settings of the orderer, from keyword arguments or the environment."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ragorder.counts import parse_count
from ragorder.guards import Guards
from ragorder.trie.search import SearchName, searches
from ragorder.trie.tail import MIN_GAIN, TailName, tails

__all__ = ["OrdererOptions", "Settings"]

_MOVES = ("earned", "free", "prefix")


class Settings(BaseSettings):
    """Properties of the engine and the prompt, and policies of the orderer, also from the environment
    (RAGORDER_CAPACITY_TOKENS=…). Raises pydantic.ValidationError for an unknown name or value.

        Settings(capacity_tokens=262_144, block_size=16, moves="prefix")
    """

    model_config = SettingsConfigDict(env_prefix="RAGORDER_", extra="forbid", frozen=True)

    capacity_tokens: int | None = Field(
        262_144, ge=1, description="Tokens that the engine's KV cache holds, or unlimited."
    )
    host_tokens: int = Field(
        0, ge=0, description="Tokens that the engine holds in host memory, the tier after that cache; 0: no such tier."
    )
    disk_tokens: int = Field(0, ge=0, description="Tokens that it holds on disk; 0: no such tier.")
    tier_policy: str = Field("pgdsf", validate_default=False, description="Replacement policy of the tiers.")
    tier_copies: Literal["computed", "evicted"] = Field(
        "computed",
        description="What the engine copies to host memory and disk: all that it computes, as vLLM with ragorder's "
        "tiers does, or what the tier above evicts, as the embedded engine does.",
    )
    profile: Path | None = Field(
        None,
        description="Prefill and load times on this engine, from `ragorder profile`: cached prefixes are then "
        "compared in seconds.",
        json_schema_extra={"unset": "in tokens"},
    )
    block_size: int = Field(16, ge=1, description="Tokens in one KV block of the engine.")
    prefix_tokens: int = Field(0, ge=0, description="Tokens of the prompt before the first document.")
    suffix_tokens: int = Field(64, ge=0, description="Tokens of question and answer, which fill the cache as well.")

    search: Annotated[SearchName, AfterValidator(searches.check)] = Field(
        "best",
        description=f"Cached prefix that a request extends. {searches.help}.",
        json_schema_extra={"enum": [*searches.names]},
    )
    moves: Annotated[TailName, AfterValidator(tails.check)] = Field(
        "earned",
        description=f"Which documents move beyond the cached prefix. {tails.help_of(_MOVES)}. For comparison: "
        f"{tails.help_of(name for name in tails.names if name not in _MOVES)}.",
        json_schema_extra={"enum": [*tails.names]},
    )
    min_gain: float = Field(
        MIN_GAIN,
        ge=0,
        description="Tokens that a document must be expected to save, in the next 300 requests, for each place that it "
        "moves ahead of its rank beyond the cached prefix.",
    )
    best: Literal["any", "first", "last"] = Field(
        "any",
        description="Where the most relevant document should stand: first, last (next to the question), or anywhere. "
        "Models differ: `ragorder eval quality --places` measures it.",
    )
    best_tokens: int = Field(
        128,
        ge=0,
        description="Cached tokens that a request gives up at most to have its most relevant document there.",
    )
    reuse: Literal["exact", "fused"] = Field(
        "exact",
        description="exact: the engine reuses documents in an exact prefix only; fused: it also reuses those that it "
        "computed in other prompts (the embedded engine, see docs/fusion.md).",
    )
    recompute: float = Field(
        0.15, ge=0, le=1, description="Share of the tokens reused off the prefix that a fused request recomputes."
    )
    copies: Literal["served", "all"] = Field(
        "served",
        description="Documents that can be reused off the prefix: those in the engine's cache, or all (of `ragorder "
        "fuse build`).",
    )
    invest: bool = Field(
        True,
        description="With copies of all documents: whether documents of many requests are recomputed exactly, so "
        "that later requests find them in an exact prefix.",
    )
    residency: Literal["lru", "none"] = Field("lru", description="How evictions of the engine are followed.")
    feedback: bool = Field(True, description="Whether the cached tokens that the engine reports correct the residency.")
    partial_blocks_first: bool = Field(
        True, description="Whether the engine reuses blocks that were not filled before all others, as vLLM does."
    )
    search_budget: int = Field(1024, ge=1, description="Nodes that one prefix search may look at.")

    keep_first: int = Field(0, ge=0, description="Number of top-ranked documents that stay first.")
    keep_last: int = Field(
        0, ge=0, description="Number of top-ranked documents that stand last, rank 1 next to the question."
    )
    max_displacement: int | None = Field(
        None,
        ge=0,
        description="Positions by which a document may move from its rank.",
        json_schema_extra={"unset": "any number"},
    )
    keep_groups: bool = Field(False, description='Keep the order of documents with the same metadata "source".')
    max_gain_lost: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of retrieval order's discounted cumulative gain (nDCG, relevance 1/rank) that the "
        "order may lose.",
        json_schema_extra={"unset": "any share"},
    )

    events_endpoint: str | None = Field(
        None, description="ZMQ endpoint of the engine's KV events (tcp://host:5557), for Orderer.for_vllm."
    )
    replay_endpoint: str | None = Field(None, description="ZMQ endpoint that replays lost KV events.")
    events_topic: str = Field("", description="Topic of the KV events; empty: any.")

    max_nodes: int = Field(100_000, ge=1, description="Nodes of all scopes' trees together, whatever the capacity.")
    max_scopes: int = Field(
        1024, ge=1, description="Scopes remembered; beyond that the least recently used is forgotten."
    )
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
                "reuse 'fused' is of the embedded engine, which has no KV events: leave events_endpoint out"
            )
        return self

    @property
    def held_tokens(self) -> int | None:
        """Those of all tiers, each counted once."""
        if self.capacity_tokens is None:
            return None
        tiers = self.capacity_tokens, self.host_tokens, self.disk_tokens
        return max(tiers) if self.tier_copies == "computed" else sum(tiers)

    @property
    def guards(self) -> Guards:
        return Guards(self.keep_first, self.keep_last, self.max_displacement, self.keep_groups, self.max_gain_lost)

    def changed(self, **changes: Any) -> Self:
        """A copy with other values, which are not checked. Raises ValueError for an unknown name."""
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
    partial_blocks_first: bool
    search_budget: int
    keep_first: int
    keep_last: int
    max_displacement: int | None
    keep_groups: bool
    max_gain_lost: float | None
    events_endpoint: str | None
    replay_endpoint: str | None
    events_topic: str
    max_nodes: int
    max_scopes: int
    strict: bool
