"""Connects an orderer to a live vLLM server: `Orderer.for_vllm`."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from ragorder.adapters._server import AddressError
from ragorder.adapters.kv_events import KVEventSubscriber
from ragorder.adapters.vllm import ServerError, read_cache_config
from ragorder.orderer import Orderer
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings
from ragorder.trie.residency import EngineBlocks

__all__ = ["connect"]

OrdererT = TypeVar("OrdererT", bound=Orderer)

_logger = logging.getLogger("ragorder")
_SYNCHRONISE_S = 5.0
_REMEMBERED = 4


def connect(
    orderer_class: type[OrdererT],
    base_url: str,
    *,
    builder: PromptBuilder | None,
    settings: Settings,
    api_key: str | None = None,
) -> OrdererT:
    """What `Orderer.for_vllm` says."""
    missing = []
    try:
        cache = read_cache_config(base_url, api_key=api_key)
    except AddressError:
        raise
    except ServerError as error:
        missing.append(str(error))
    else:
        read = {"block_size": cache.block_size, "capacity_tokens": cache.capacity_tokens}
        settings = settings.model_copy(update={k: v for k, v in read.items() if k not in settings.model_fields_set})
        if cache.prefix_caching is False:
            missing.append("the server reuses nothing: start it with --enable-prefix-caching")
        if cache.engines > 1:
            missing.append(f"the server has {cache.engines} engines with a cache each: route a tenant to one of them")
    if builder is not None and "prefix_tokens" not in settings.model_fields_set:
        settings = settings.model_copy(update={"prefix_tokens": builder.prefix_tokens})
    if settings.events_endpoint is None:
        missing.append("no events_endpoint in the settings")
    if builder is None or not builder.prefix_ids:
        missing.append("no prompt builder with the served model's tokenizer")
    options: dict[str, Any] = {}
    events = None
    if builder is not None:
        options["tokens"] = builder.document_tokens
        if settings.events_endpoint is not None and builder.prefix_ids:
            capacity = settings.capacity_tokens or 0
            blocks = EngineBlocks(settings.block_size, max(1 << 16, _REMEMBERED * capacity // settings.block_size))
            events = KVEventSubscriber(
                blocks, settings.events_endpoint, settings.replay_endpoint, topic=settings.events_topic
            )
            if settings.replay_endpoint is None:
                missing.append("no replay_endpoint in the settings, so that lost events stay lost")
            options |= {"token_ids": builder.document_ids, "prefix_ids": builder.prefix_ids, "blocks": blocks}
            if settings.replay_endpoint is not None and not events.wait_until_synchronised(_SYNCHRONISE_S):
                missing.append("no answer from the replay endpoint yet")
    if missing:
        _logger.warning("the orderer has to guess what the server's cache holds: %s", "; ".join(missing))
    try:
        orderer = orderer_class(settings, **options)
    except BaseException:
        if events is not None:
            events.close()
        raise
    orderer.events = events
    return orderer
