"""Connection of an orderer to a live vLLM server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import ref

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.vllm.cache_config import CacheConfig, cache_config
from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.clouds import hybrid_rules
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings
from ragorder.trie.residency.blocks import EngineBlocks

__all__ = ["connect"]


class _LiveOrderer(Protocol):
    """The used part of `Orderer`: importing the class would close a circle."""

    events: Any

    @property
    def tree_size(self) -> int: ...

    def degrade(self, reason: str) -> None: ...


OrdererT = TypeVar("OrdererT", bound=_LiveOrderer)

_logger = logging.getLogger("ragorder.vllm")

_TIMEOUT_S = 5.0
_SYNCHRONISE_S = 5.0
_PATIENCE_S = 30.0
_REMEMBERED = 4
# Settings under which a hybrid model is ordered for as an ordinary one.
_ORDINARY = ("events_endpoint", "host_tokens", "disk_tokens", "profile", "reuse", "residency")


def connect(
    orderer_class: Callable[..., OrdererT],
    base_url: str,
    *,
    for_cloud: Callable[..., OrdererT],
    builder: PromptBuilder | None,
    settings: Settings,
    api_key: str | None = None,
) -> OrdererT:
    """`Orderer.for_vllm`."""
    if settings.events_endpoint is not None and not (builder is not None and builder.prefix_ids):
        raise ValueError(
            "events_endpoint needs builder=PromptBuilder(tokenizer=…) with the served model's tokenizer: KV events "
            "carry tokens, by which the orderer finds its documents"
        )
    settings, missing, hybrid = _read_settings(base_url, settings, api_key)
    if hybrid:
        return _for_hybrid(for_cloud, settings, builder, missing)
    options: dict[str, Any] = {}
    if builder is not None:
        options["tokens"] = builder.document_tokens
        if "prefix_tokens" not in settings.model_fields_set:
            settings = settings.model_copy(update={"prefix_tokens": builder.prefix_tokens})
    if builder is None or settings.events_endpoint is None:
        orderer = orderer_class(settings, **options)
    else:
        orderer = _following_events(orderer_class, settings, builder, settings.events_endpoint, options)
        if settings.replay_endpoint is None:
            missing.append("no replay_endpoint: KV events that are lost stay lost")
        elif not orderer.events.wait_until_synchronised(_SYNCHRONISE_S):
            missing.append("no answer from replay_endpoint yet: an LRU mirror stands in for it; ask ragorder doctor")
    for reason in missing:
        orderer.degrade(reason)
    return orderer


def _for_hybrid(
    for_cloud: Callable[..., OrdererT], settings: Settings, builder: PromptBuilder | None, missing: list[str]
) -> OrdererT:
    """Where such a model resumes is no matter of blocks alone: an orderer by `hybrid_rules`."""
    rules = hybrid_rules(settings.block_size)
    orderer = for_cloud(rules=rules, settings=settings, builder=builder)
    for reason in missing:
        orderer.degrade(reason)
    return orderer


def _read_settings(base_url: str, settings: Settings, api_key: str | None) -> tuple[Settings, list[str], bool]:
    """With what the server tells, what it lacks, and whether its model is ordered for as a hybrid one."""
    missing = []
    with Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
        try:
            server.get("/health")
        except ServerError as error:
            # Any HTTP answer will do.
            if error.status is None:
                raise
        try:
            cache = cache_config(server)
        except ServerError as error:
            if _is_proxy(server):
                missing.append(
                    f"{server.root} is ragorder serve, which orders by itself: give the address of the server, its "
                    "--upstream, or send it requests as they are"
                )
            elif not {"block_size", "capacity_tokens"} <= settings.model_fields_set:
                missing.append(str(error))
            return settings, missing, False
    settings = settings.model_copy(update=cache.completes(settings))
    if cache.prefix_caching is False:
        missing.append("the server reuses nothing: start it with --enable-prefix-caching")
    if cache.engines > 1:
        missing.append(f"the server has {cache.engines} engines with a cache each: route a tenant to one of them")
    return settings, missing, _is_hybrid(cache, settings, missing)


def _is_proxy(server: Server) -> bool:
    """Whether it is `ragorder serve`, whatever has become of its own servers."""
    try:
        server.get_json("/ragorder/health")
    except ServerError:
        return False
    return True


def _is_hybrid(cache: CacheConfig, settings: Settings, missing: list[str]) -> bool:
    if cache.hybrid is None:
        _logger.info(
            "the server does not say whether its model is a hybrid one (Mamba, GDN): if it is, use "
            "Orderer.for_cloud(rules=hybrid_rules(block_size))"
        )
    usual = type(settings).model_fields
    kept = [name for name in _ORDINARY if getattr(settings, name) != usual[name].default]
    if cache.hybrid and kept:
        missing.append(
            f"a hybrid model resumes only where its state was kept, and {', '.join(kept)} cannot be followed there: "
            "predictions are too high; leave it out"
        )
    return bool(cache.hybrid) and not kept


def _following_events(
    orderer_class: Callable[..., OrdererT],
    settings: Settings,
    builder: PromptBuilder,
    endpoint: str,
    options: dict[str, Any],
) -> OrdererT:
    capacity = settings.held_tokens or 0
    blocks = EngineBlocks(settings.block_size, max(1 << 16, _REMEMBERED * capacity // settings.block_size))
    options |= {"token_ids": builder.document_ids, "prefix_ids": builder.prefix_ids, "blocks": blocks}
    orderer = orderer_class(settings, **options)
    orderer.events = KVEventSubscriber(
        blocks,
        endpoint,
        settings.replay_endpoint,
        topic=settings.events_topic,
        on_pause=_degrade_on_silence(orderer),
    )
    return orderer


def _degrade_on_silence(orderer: _LiveOrderer) -> Callable[[KVEventSubscriber], None]:
    """Degrades the orderer after a long silence, since its first use or the last event."""
    # The subscriber's thread must not keep a dropped orderer alive.
    reference = ref(orderer)
    last_event = time.monotonic()

    def look(events: KVEventSubscriber) -> None:
        nonlocal last_event
        now, alive = time.monotonic(), reference()
        if alive is None or (events.counters.batches and events.synchronised) or not alive.tree_size:
            last_event = now
        elif now - last_event > _PATIENCE_S:
            if events.counters.other_topics:
                alive.degrade("no KV events of this topic: leave events_topic empty, which means any, or correct it")
            else:
                alive.degrade(
                    "no KV events: the server has published none; compare events_endpoint, "
                    "replay_endpoint and events_topic with its --kv-events-config, or run ragorder doctor"
                )

    return look
