"""Settings of the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ragorder.kernels.policies import POLICIES

__all__ = ["EngineSettings"]

_DTYPES = ("float32", "bfloat16", "float16")


class EngineSettings(BaseModel):
    """Sizes of the tiers and of a step. Raises pydantic.ValidationError for unknown names and invalid values.

    EngineSettings(host_bytes=8 << 30, disk_path=Path("/var/cache/kv"))
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens of a KV block.")
    device_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of KV on the device; none: as many as fit."
    )
    device_share: float = Field(
        default=0.8, gt=0, le=1, description="Without device_tokens: the share of a GPU's free memory."
    )
    host_bytes: int = Field(
        default=1 << 30, ge=0, description="Bytes of host memory for KV evicted from the device; 0: no host tier."
    )
    disk_path: Path | None = Field(
        default=None, description="Folder of the disk tier, of one engine only; none: no disk tier."
    )
    disk_bytes: int = Field(default=16 << 30, ge=1, description="Bytes that the disk tier may take.")
    policy: str = Field(default="pgdsf", description=f"Replacement policy of the tiers: {', '.join(POLICIES)}.")
    history: int = Field(default=65536, ge=0, description="Evicted nodes whose use a tier remembers; 0: none.")
    replicate_nodes: int = Field(
        default=0,
        ge=0,
        description="Most used nodes that are copied to the host before they leave the device.",
    )
    profile: Path | None = Field(
        default=None,
        description="Measured prefill times (`ragorder profile`); none: every token costs the same.",
    )
    max_batch_tokens: int = Field(
        default=8192, ge=1, description="Most tokens that one step computes, of all requests."
    )
    max_requests: int = Field(default=64, ge=1, description="Most requests that are computed together.")
    max_model_len: int | None = Field(
        default=None, ge=2, description="Most tokens of prompt and answer; none: the model's."
    )
    device: str | None = Field(
        default=None, description="cpu, cuda or cuda:N; none: the model's, or a GPU if there is one."
    )
    dtype: str | None = Field(default=None, description=f"{', '.join(_DTYPES)}; none: that of the stored weights.")
    chunk_tokens: int = Field(default=256, ge=1, description="Tokens of a node in prompts without document ends.")
    verify: bool = Field(
        default=True, description="Compare the engine with transformers' own attention when it starts."
    )

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, policy: str) -> str:
        if policy not in POLICIES:
            raise ValueError(f"there is no policy {policy!r}: choose one of {', '.join(POLICIES)}")
        return policy

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str | None) -> str | None:
        if dtype is None or dtype == "auto":
            return None
        name = dtype.removeprefix("torch.")
        if name not in _DTYPES:
            raise ValueError(f"there is no dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
        return name

    @model_validator(mode="after")
    def _room_for_a_block(self) -> Self:
        if self.device_tokens is not None and self.device_tokens < self.block_size:
            raise ValueError(
                f"device_tokens is {self.device_tokens}, less than a block (block_size {self.block_size}): give more"
            )
        return self
