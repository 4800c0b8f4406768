"""Settings of a build, readable without torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PreprocessingSettings"]


class PreprocessingSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    neighbours: int = Field(
        default=10, ge=0, description="Similar documents to compute each document after; 0: only the system prompt."
    )
    batch_documents: int = Field(default=10, ge=1, description="Documents computed together.")
    host_bytes: int = Field(
        default=1 << 30, ge=0, description="Host memory for neighbours' KV; further KV is recomputed."
    )
