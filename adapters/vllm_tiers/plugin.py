"""Entry point `vllm.general_plugins`, called by vLLM's processes even without tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from ragorder.adapters.vllm_tiers.versions import UnsupportedVLLMError, check_vllm

# A child of vLLM's logger: an engine's process does not configure ours.
_log = logging.getLogger("vllm.ragorder.plugin")
_PACKAGE = "ragorder.adapters.vllm_tiers"


def register() -> None:
    """Register with vLLM's factories. Idempotent; never raises."""
    try:
        check_vllm()
        _register()
    except UnsupportedVLLMError as error:
        _log.debug("not registered: %s", error)
    except Exception:
        _log.warning("ragorder's tiers could not be registered with vLLM", exc_info=True)


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    names: list[tuple[Callable[[str, str, str], None], str, str]] = [
        (KVConnectorFactory.register_connector, "connector", "TierConnector"),
        (KVConnectorFactory.register_connector, "ordered_connector", "OrderedTierConnector"),
        (OffloadingSpecFactory.register_spec, "spec", "TierSpec"),
        (CachePolicyFactory.register_cache_policy, "policy", "HostPolicy"),
        (SecondaryTierFactory.register_tier, "disk", "DiskTier"),
    ]
    for add, module, name in names:
        # It is registered already.
        with suppress(ValueError):
            add(name, f"{_PACKAGE}.{module}", name)
