"""Connection of an orderer to a live vLLM server: `Orderer.for_vllm`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.vllm.cache_config import cache_config
from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings
from ragorder.trie.residency import EngineBlocks

__all__ = ["VLLMConnection", "connect"]

_TIMEOUT_S = 5.0
_SYNCHRONISE_S = 5.0
_PATIENCE_S = 30.0
_REMEMBERED = 4


class ConnectedOrderer(Protocol):
    """The part of `Orderer` that a connection uses. The class itself imports this module."""

    events: Any

    @property
    def tree_size(self) -> int: ...

    def degrade(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class VLLMConnection:
    """Settings and further constructor arguments of an orderer for a server, and what the server lacks."""

    settings: Settings
    arguments: dict[str, Any]
    missing: list[str]

    def attach(self, orderer: ConnectedOrderer) -> None:
        """Subscribe the orderer, made from these settings and arguments, to the server's KV events."""
        missing = list(self.missing)
        blocks: EngineBlocks | None = self.arguments.get("blocks")
        if blocks is not None and self.settings.events_endpoint is not None:
            orderer.events = KVEventSubscriber(
                blocks,
                self.settings.events_endpoint,
                self.settings.replay_endpoint,
                topic=self.settings.events_topic,
                on_pause=_degrade_in_silence(orderer),
            )
            if self.settings.replay_endpoint is None:
                missing.append("no replay_endpoint: KV events that are lost stay lost")
            elif not orderer.events.wait_until_synchronised(_SYNCHRONISE_S):
                missing.append(
                    "no answer from replay_endpoint yet: an LRU mirror stands in for it; ask ragorder doctor"
                )
        for reason in missing:
            orderer.degrade(reason)


def connect(
    base_url: str, *, builder: PromptBuilder | None, settings: Settings, api_key: str | None = None
) -> VLLMConnection:
    """Read the server's cache configuration. Raises what `Orderer.for_vllm` does."""
    if settings.events_endpoint is not None and not (builder is not None and builder.prefix_ids):
        raise ValueError(
            "events_endpoint needs builder=PromptBuilder(tokenizer=…) with the served model's tokenizer: KV events "
            "tell of tokens, by which the orderer finds its documents"
        )
    settings, missing = _read_settings(base_url, settings, api_key)
    arguments: dict[str, Any] = {}
    if builder is not None:
        arguments["tokens"] = builder.document_tokens
        if "prefix_tokens" not in settings.model_fields_set:
            settings = settings.model_copy(update={"prefix_tokens": builder.prefix_tokens})
    if builder is not None and settings.events_endpoint is not None:
        capacity = settings.capacity_tokens or 0
        blocks = EngineBlocks(settings.block_size, max(1 << 16, _REMEMBERED * capacity // settings.block_size))
        arguments |= {"token_ids": builder.document_ids, "prefix_ids": builder.prefix_ids, "blocks": blocks}
    return VLLMConnection(settings, arguments, missing)


def _read_settings(base_url: str, settings: Settings, api_key: str | None) -> tuple[Settings, list[str]]:
    """The settings, completed from the server's cache configuration, and what the server lacks. Raises ServerError if
    there is no server."""
    missing = []
    with Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
        try:
            server.get("/health")
        except ServerError as error:
            # Any HTTP answer shows a server.
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


def _degrade_in_silence(orderer: ConnectedOrderer) -> Callable[[KVEventSubscriber], None]:
    """Degrades the orderer if the server sends no event for `_PATIENCE_S` while the orderer is in use."""
    # The subscriber's thread must not keep an unused orderer alive.
    weak = ref(orderer)
    last_s = time.monotonic()

    def check(events: KVEventSubscriber) -> None:
        nonlocal last_s
        now, known = time.monotonic(), weak()
        if known is None or (events.counters.batches and events.synchronised) or not known.tree_size:
            last_s = now
        elif now - last_s > _PATIENCE_S:
            known.degrade(
                "no KV events: the server has told nothing of what it computes; compare events_endpoint, "
                "replay_endpoint and events_topic with its --kv-events-config, or ask ragorder doctor"
            )

    return check
