"""Settings shared by the embedded engine and vLLM's tiers, without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ragorder.common.counts import parse_size
from ragorder.trie.policies import POLICIES
from ragorder.trie.profile import LINEAR, PrefillProfile


class KVTierSettings(BaseModel):
    """Sizes (also as text, "24GiB") and replacement of the tiers below the device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_bytes: int = Field(
        default=1 << 30, ge=0, description="Host memory for KV evicted from the device; 0 disables this tier."
    )
    disk_path: Path | None = Field(
        default=None,
        description="Folder of the disk tier, used by one engine at a time.",
        json_schema_extra={"unset": "no disk"},
    )
    disk_bytes: int | None = Field(default=None, ge=1, description="Maximum size of the disk tier.")
    policy: str = Field(
        default="pgdsf", description="Replacement policy of the tiers.", json_schema_extra={"enum": list(POLICIES)}
    )
    history: int = Field(
        default=65536, ge=0, description="Number of evicted documents whose uses a tier keeps; 0 keeps none."
    )
    max_cached_documents: int | None = Field(
        default=None,
        ge=1,
        description="Number of first documents of a request that are cached; the others are computed each time.",
        json_schema_extra={"unset": "all"},
    )
    profile: Path | Literal["auto"] | None = Field(
        default=None,
        description="Prefill times on this engine: auto (measured once per model and machine), none (the same for "
        "each token), or a file from `ragorder profile`.",
    )

    # A subclass has the other fields.
    @field_validator(
        "device_bytes", "host_bytes", "disk_bytes", "disk_backlog_bytes", mode="before", check_fields=False
    )
    @classmethod
    def _sizes_as_text(cls, size: object) -> object:
        return parse_size(size) if isinstance(size, str) else size

    @field_validator("profile", mode="before")
    @classmethod
    def _none_by_name(cls, profile: object) -> object:
        return None if profile == "none" else profile

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, policy: str) -> str:
        if policy not in POLICIES:
            raise ValueError(f"there is no policy {policy!r}: choose one of {', '.join(POLICIES)}")
        return policy

    def prefill_profile(self, measured: Callable[[], PrefillProfile] = lambda: LINEAR) -> PrefillProfile:
        """Return `measured()` for "auto", LINEAR for none. Raises ValueError for an unreadable file."""
        if self.profile is None:
            return LINEAR
        return measured() if self.profile == "auto" else PrefillProfile.from_file(self.profile)
