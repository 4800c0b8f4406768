"""Settings of the embedded engine, readable without torch."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from ragorder.kernels.tier_settings import KVTierSettings

__all__ = ["EngineSettings"]

_DTYPES = ("float32", "bfloat16", "float16")


class EngineSettings(KVTierSettings):
    """Sizes of the tiers and of a step.

        EngineSettings(device_tokens=100_000, host_bytes=8 << 30, policy="lru")

    Raises pydantic.ValidationError for an unknown name or a value out of range.
    """

    disk_bytes: int = Field(default=16 << 30, ge=1, description="Space that the disk tier may take.")

    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens in one KV block.")
    device_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of KV on the device; none: as many as fit."
    )
    device_share: float = Field(
        default=0.8, gt=0, le=1, description="Share of a GPU's free memory for KV, without device_tokens."
    )
    replicate_nodes: int = Field(
        default=0,
        ge=0,
        description="Number of most used nodes that are copied to the host before they leave the device.",
    )
    max_batch_tokens: int = Field(
        default=8192, ge=1, description="Most tokens that one step computes for all requests."
    )
    max_requests: int = Field(default=64, ge=1, description="Most requests computed at the same time.")
    max_model_len: int | None = Field(
        default=None, ge=2, description="Most tokens of prompt and answer; none: the model's limit."
    )
    device: str | None = Field(
        default=None, description="cpu, cuda or cuda:N; none: the model's, or a GPU if there is one."
    )
    dtype: str | None = Field(default=None, description=f"{', '.join(_DTYPES)}; none: as the weights are stored.")
    chunk_tokens: int = Field(
        default=256, ge=1, description="Tokens of a node in prompts whose documents are not marked."
    )
    verify: bool = Field(default=True, description="Compare a new engine with transformers' own attention.")

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str | None) -> str | None:
        if dtype is None or dtype == "auto":
            return None
        name = dtype.removeprefix("torch.")
        if name not in _DTYPES:
            raise ValueError(f"KV cannot have dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
        return name

    @model_validator(mode="after")
    def _room_for_a_block(self) -> Self:
        if self.device_tokens is not None and self.device_tokens < self.block_size:
            raise ValueError(
                f"device_tokens is {self.device_tokens}, less than a block (block_size {self.block_size}): give more"
            )
        return self
