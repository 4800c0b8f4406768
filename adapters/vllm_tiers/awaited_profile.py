"""An engine's prefill profile, measured while it runs if missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ragorder.adapters.vllm_tiers.disk_identity import model_facts, this_machine
from ragorder.adapters.vllm_tiers.settings import TierSettings
from ragorder.adapters.vllm_tiers.versions import vllm_version
from ragorder.kernels.profile_cache import ProfileCache, profile_key
from ragorder.trie.profile import LINEAR, PrefillProfile

_logger = logging.getLogger("ragorder")

_NOTE = "ragorder_profile"
_LOOK_S = 5.0


class PrefillCosts(Protocol):
    def cost(self, cached_tokens: int, new_tokens: int) -> float:
        """Seconds per new token."""


class AwaitedProfile:
    """Cached profile of `key`, looked for every 5 s at most; until found, every token costs the same."""

    def __init__(
        self, key: str, cache: ProfileCache | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.key = key
        self._cache = cache or ProfileCache()
        self._clock = clock
        self._found: PrefillProfile | None = None
        self._next_s = float("-inf")
        self._seen_ns: int | None = None
        self._look()

    @property
    def measured(self) -> bool:
        return self._found is not None

    def cost(self, cached_tokens: int, new_tokens: int) -> float:
        self._look()
        return (self._found or LINEAR).cost(cached_tokens, new_tokens)

    def _look(self) -> None:
        if self._found is None and self._clock() >= self._next_s:
            self._next_s = self._clock() + _LOOK_S
            # A damaged file is reported once.
            changed_ns = _changed_ns(self._cache.path(self.key))
            if changed_ns != self._seen_ns:
                self._seen_ns = changed_ns
                self._found = self._cache.find(self.key)


def _changed_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def note_profile(vllm_config: Any) -> None:
    """Add the engine's profile key to `kv_connector_extra_config`. Never raises."""
    try:
        key = profile_key(_identity(vllm_config))
    except Exception as error:
        _logger.warning("this engine's prefill profile has no key (%s): give --profile FILE", type(error).__name__)
        return
    vllm_config.kv_transfer_config.kv_connector_extra_config[_NOTE] = key


def _identity(vllm_config: Any) -> dict[str, Any]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    disks = [tier.get("path") for tier in extra_config.get("secondary_tiers", ())]
    return {
        "engine": "vllm",
        "vllm": vllm_version(),
        "machine": dict(this_machine()),
        "model": model.model,
        "facts": model_facts(vllm_config),
        "eager": model.enforce_eager,
        "parallel": [parallel.world_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "block_size": vllm_config.cache_config.block_size,
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "disk": disks,
    }


def prefill_costs(settings: TierSettings, extra_config: Mapping[str, Any]) -> PrefillCosts:
    """Raises ValueError if the profile's file cannot be read."""
    key = extra_config.get(_NOTE)
    if settings.profile == "auto" and isinstance(key, str):
        return AwaitedProfile(key)
    return settings.prefill_profile()
