"""Settings of the embedded engine, without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ragorder.kernels.fusion.selection import SELECTIONS, Fusion, selections
from ragorder.kernels.tier_settings import KVTierSettings

_DTYPES = ("float32", "bfloat16", "float16")


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


class EngineSettings(KVTierSettings):
    """The engine's tiers, steps and behaviour.

        EngineSettings(device_tokens=100_000, host_bytes="8GiB", policy="lru")
        EngineSettings(device_bytes="6GiB", host_bytes="24GiB")  # streams weights that do not fit

    Raises pydantic.ValidationError.
    """

    device_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Device memory for weights, KV and workspace; on a CPU main memory beside that of the host tier. "
        "Weights that do not fit stream from host memory and from the model's files.",
        json_schema_extra={"unset": "enough for the whole model and its KV"},
    )
    host_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Host memory for KV evicted from the device; 0 disables this tier. Beside a device budget it holds "
        "first, with a corpus, its index, then KV of running requests and the layers that stream.",
    )
    disk_bytes: int = Field(default=16 << 30, ge=1, description="Maximum size of the disk tier.")
    disk_backlog_bytes: int = Field(
        default=1 << 28,
        ge=1,
        description="Memory for documents waiting to be written to the disk; further ones are dropped.",
    )
    profile_budget_s: float = Field(
        default=10.0, gt=0, description="Maximum time for measuring prefill times at the first start."
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens in one KV block.")
    device_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of KV of running requests. Within a device budget, KV that does not fit on the device is "
        "in host memory.",
        json_schema_extra={"unset": "the number that fits"},
    )
    device_share: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of a GPU's free memory for KV, if the number of tokens is not given.",
    )
    replicate_nodes: int = Field(
        default=32,
        ge=0,
        description="Number of most used documents with a copy in host memory (up to half of it), in case the "
        "device fails.",
    )
    max_batch_tokens: int = Field(
        default=8192, ge=1, description="Maximum number of tokens that one step computes for all requests."
    )
    max_requests: int = Field(default=64, ge=1, description="Maximum number of requests computed at the same time.")
    schedule: Literal["cached-first", "fcfs"] = Field(
        default="cached-first",
        description="Next waiting request: cached-first, the one with the largest ratio of cached to uncached tokens; "
        "fcfs, the oldest.",
    )
    schedule_window: int = Field(
        default=32, ge=0, description="With cached-first, no request is overtaken by more than N later ones."
    )
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Maximum time from a request's arrival to its last token.",
        json_schema_extra={"unset": "no limit"},
    )
    max_retries: int = Field(
        default=3, ge=0, description="Maximum number of retries of a request after steps in which the device failed."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Maximum number of tokens of a prompt with its answer.",
        json_schema_extra={"unset": "the model's limit"},
    )
    device: str | None = Field(
        default=None,
        description="cpu, cuda or cuda:N.",
        json_schema_extra={"unset": "the model's, or a GPU if there is one"},
    )
    dtype: str | None = Field(
        default=None, description=f"{', '.join(_DTYPES)}.", json_schema_extra={"unset": "as the weights are stored"}
    )
    chunk_tokens: int = Field(default=256, ge=1, description="Tokens per chunk in prompts without marked documents.")
    verify: bool = Field(default=True, description="Compare logits with transformers' own attention at the start.")
    reuse: Literal["exact", "fused"] = Field(
        default="exact",
        description="exact: a document is reused only after the same preceding documents, and answers equal "
        "the model's; fused: anywhere in a prompt, and answers approximate the model's (FusionRAG).",
    )
    recompute: float = Field(
        default=0.15,
        ge=0,
        le=1,
        description="Fused reuse: share of the tokens reused outside the prefix that is recomputed.",
    )
    select: Annotated[str, AfterValidator(selections.check)] = Field(
        default="query",
        description=f"Fused reuse: the tokens to recompute. {selections.help_of(SELECTIONS)}.",
        json_schema_extra={"enum": [*SELECTIONS]},
    )

    select_rounds: int = Field(
        default=1,
        ge=1,
        description="Fused reuse: rounds of selection; later rounds use the attention of the tokens chosen so far.",
    )

    @property
    def fusion(self) -> Fusion | None:
        return Fusion(self.recompute, self.select, rounds=self.select_rounds) if self.reuse == "fused" else None

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
