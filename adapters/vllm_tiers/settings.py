"""Settings of the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from ragorder.kernels.tier_settings import KVTierSettings

_PACKAGE = "ragorder.adapters.vllm_tiers"
_KEY = "ragorder"


class TierSettings(KVTierSettings):
    """Settings of the tiers in vLLM, and its --kv-transfer-config.

        vllm.LLM(model, kv_transfer_config=TierSettings(host_bytes=8 << 30).kv_transfer_config())

    Raises pydantic.ValidationError for unknown names and values out of range.
    """

    host_bytes: int = Field(ge=1, description="Host memory for KV, for all GPUs of one engine together.")
    device_order: bool = Field(True, description="Evict by the policy from the device's own pool as well.")
    blocks_per_chunk: int = Field(1, ge=1, description="KV blocks of the device in one chunk of host and disk.")
    io_threads: int = Field(2, ge=1, description="Threads that read and write the disk.")

    @model_validator(mode="after")
    def _whole_disk(self) -> Self:
        if self.disk_path is not None and self.disk_bytes is None:
            raise ValueError("disk_path without disk_bytes: give the space that the disk tier may take (disk_bytes)")
        if self.disk_bytes is not None and self.disk_path is None:
            raise ValueError("disk_bytes without disk_path: give the folder of the disk tier (disk_path)")
        return self

    def kv_transfer_config(self) -> dict[str, Any]:
        settings = self.model_copy(update={"disk_path": _absolute(self.disk_path), "profile": _absolute(self.profile)})
        extra: dict[str, Any] = {
            "spec_name": "TierSpec",
            "spec_module_path": f"{_PACKAGE}.spec",
            "cpu_bytes_to_use": self.host_bytes,
            "blocks_per_chunk": self.blocks_per_chunk,
            "eviction_policy": "HostPolicy",
            "cache_policy_module_path": f"{_PACKAGE}.policy",
            # KV events then name the tier of a chunk, if the server publishes events.
            "self_describing_kv_events": True,
            "secondary_tiers": [] if settings.disk_path is None else [settings._disk()],
            _KEY: settings.model_dump(mode="json"),
        }
        return {
            "kv_connector": "OrderedTierConnector" if self.device_order else "TierConnector",
            "kv_connector_module_path": f"{_PACKAGE}.{'ordered_connector' if self.device_order else 'connector'}",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def _disk(self) -> dict[str, Any]:
        return {
            "type": "DiskTier",
            "module_path": f"{_PACKAGE}.disk",
            "path": str(self.disk_path),
            "bytes": self.disk_bytes,
            "policy": self.policy,
            "history": self.history,
            "io_threads": self.io_threads,
            "enable_kv_events": True,
        }

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Self:
        """Raises ValueError if there are no settings."""
        if not isinstance(extra_config.get(_KEY), Mapping):
            raise ValueError(
                f"kv_connector_extra_config has no {_KEY!r}: take the whole --kv-transfer-config that "
                "`ragorder tiers config` prints"
            )
        return cls.model_validate(dict(extra_config[_KEY]))


def _absolute(path: Path | str | None) -> Path | str | None:
    return path.expanduser().absolute() if isinstance(path, Path) else path
