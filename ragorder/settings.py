"""Settings of the orderer, from keyword arguments or the environment."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypedDict

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ragorder.counts import parse_count
from ragorder.guards import Guards
from ragorder.trie.search import SearchName, searches
from ragorder.trie.tail import TailName, tails

__all__ = ["OrdererOptions", "Settings"]


class Settings(BaseSettings):
    """Properties of the engine and the prompt, and policies of the orderer, also from the environment
    (RAGORDER_CAPACITY_TOKENS=…). Raises pydantic.ValidationError for an unknown name or value.

        Settings(capacity_tokens=262_144, block_size=16, tail="rank")
    """

    model_config = SettingsConfigDict(env_prefix="RAGORDER_", extra="forbid", frozen=True)

    capacity_tokens: int | None = Field(
        262_144, ge=1, description="Tokens that the engine's KV cache holds, or unlimited."
    )
    block_size: int = Field(16, ge=1, description="Tokens in one KV block of the engine.")
    prefix_tokens: int = Field(0, ge=0, description="Tokens of the prompt in front of the first document.")
    suffix_tokens: int = Field(64, ge=0, description="Tokens of question and answer, which fill the cache as well.")

    search: Annotated[SearchName, AfterValidator(searches.check)] = Field(
        "best",
        description=f"Cached prefix that a request extends. {searches.help}.",
        json_schema_extra={"enum": [*searches.names]},
    )
    tail: Annotated[TailName, AfterValidator(tails.check)] = Field(
        "auto",
        description=f"Order of the documents beyond the cached prefix. {tails.help}.",
        json_schema_extra={"enum": [*tails.names]},
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
        None, ge=0, description="Positions by which a document may move from its rank; none: any number."
    )
    keep_groups: bool = Field(False, description='Keep the order of documents with the same metadata "source".')

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

    @field_validator("capacity_tokens", mode="before")
    @classmethod
    def _unlimited(cls, value: object) -> object:
        if value in ("none", "unlimited"):
            return None
        return parse_count(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.keep_first and self.keep_last:
            raise ValueError("keep_first and keep_last exclude each other: keep the top documents at one end")
        return self

    @property
    def guards(self) -> Guards:
        return Guards(self.keep_first, self.keep_last, self.max_displacement, self.keep_groups)


class OrdererOptions(TypedDict, total=False):
    """The fields of `Settings` as keyword arguments."""

    capacity_tokens: int | None
    block_size: int
    prefix_tokens: int
    suffix_tokens: int
    search: SearchName
    tail: TailName
    residency: Literal["lru", "none"]
    feedback: bool
    partial_blocks_first: bool
    search_budget: int
    keep_first: int
    keep_last: int
    max_displacement: int | None
    keep_groups: bool
    events_endpoint: str | None
    replay_endpoint: str | None
    events_topic: str
    max_nodes: int
    max_scopes: int
    strict: bool
