"""Connects an orderer to a live vLLM server: `Orderer.for_vllm`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import ref

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.vllm.cache_config import cache_config
from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.orderer import Orderer
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings
from ragorder.trie.residency import EngineBlocks

__all__ = ["connect"]

OrdererT = TypeVar("OrdererT", bound=Orderer)

_TIMEOUT_S = 5.0
_SYNCHRONISE_S = 5.0
_PATIENCE_S = 30.0
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
    if settings.events_endpoint is not None and not (builder is not None and builder.prefix_ids):
        raise ValueError(
            "events_endpoint needs builder=PromptBuilder(tokenizer=…) with the served model's tokenizer: KV events "
            "tell of tokens, by which the orderer finds its documents"
        )
    settings, missing = _ask(base_url, settings, api_key)
    options: dict[str, Any] = {}
    if builder is not None:
        options["tokens"] = builder.document_tokens
        if "prefix_tokens" not in settings.model_fields_set:
            settings = settings.model_copy(update={"prefix_tokens": builder.prefix_tokens})
    if builder is None or settings.events_endpoint is None:
        orderer = orderer_class(settings, **options)
    else:
        orderer = _listening(orderer_class, settings, builder, settings.events_endpoint, options)
        if settings.replay_endpoint is None:
            missing.append("no replay_endpoint: KV events that are lost stay lost")
        elif not orderer.events.wait_until_synchronised(_SYNCHRONISE_S):
            missing.append("no answer from replay_endpoint yet: an LRU mirror stands in for it; ask ragorder doctor")
    for reason in missing:
        orderer.degrade(reason)
    return orderer


def _ask(base_url: str, settings: Settings, api_key: str | None) -> tuple[Settings, list[str]]:
    """The settings with what the server tells of its cache, and what it does not. Raises ServerError where there is
    no server."""
    missing = []
    with Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
        try:
            server.get("/health")
        except ServerError as error:
            # Any answer in HTTP is one.
            if error.status is None:
                raise
        try:
            cache = cache_config(server)
        except ServerError as error:
            if not {"block_size", "capacity_tokens"} <= settings.model_fields_set:
                missing.append(str(error))
            return settings, missing
    read = {"block_size": cache.block_size, "capacity_tokens": cache.capacity_tokens}
    settings = settings.model_copy(update={k: v for k, v in read.items() if k not in settings.model_fields_set})
    if cache.prefix_caching is False:
        missing.append("the server reuses nothing: start it with --enable-prefix-caching")
    if cache.engines > 1:
        missing.append(f"the server has {cache.engines} engines with a cache each: route a tenant to one of them")
    return settings, missing


def _listening(
    orderer_class: type[OrdererT], settings: Settings, builder: PromptBuilder, endpoint: str, options: dict[str, Any]
) -> OrdererT:
    """An orderer that follows the server's KV events."""
    capacity = settings.capacity_tokens or 0
    blocks = EngineBlocks(settings.block_size, max(1 << 16, _REMEMBERED * capacity // settings.block_size))
    options |= {"token_ids": builder.document_ids, "prefix_ids": builder.prefix_ids, "blocks": blocks}
    orderer = orderer_class(settings, **options)
    orderer.events = KVEventSubscriber(
        blocks,
        endpoint,
        settings.replay_endpoint,
        topic=settings.events_topic,
        on_pause=_degrade_in_silence(orderer),
    )
    return orderer


def _degrade_in_silence(orderer: Orderer) -> Callable[[KVEventSubscriber], None]:
    """Tells the orderer if the server has been silent for long: since it is in use, or since it answered last."""
    # The subscriber's thread must not keep an orderer alive that is used no more.
    told = ref(orderer)
    spoken = time.monotonic()

    def look(events: KVEventSubscriber) -> None:
        nonlocal spoken
        now, known = time.monotonic(), told()
        if known is None or (events.counters.batches and events.synchronised) or not known.tree_size:
            spoken = now
        elif now - spoken > _PATIENCE_S:
            known.degrade(
                "no KV events: the server has told nothing of what it computes; compare events_endpoint, "
                "replay_endpoint and events_topic with its --kv-events-config, or ask ragorder doctor"
            )

    return look
