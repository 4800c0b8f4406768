"""Connection of an orderer to a live vLLM server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar
from weakref import ref

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.vllm.cache_config import CacheConfig, cache_config
from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings
from ragorder.trie.residency.blocks import EngineBlocks

if TYPE_CHECKING:
    from ragorder.clouds import CacheRules

__all__ = ["connect", "following_events", "hybrid_rules"]


class _LiveOrderer(Protocol):
    """Used part of `Orderer`, whose import would be a cycle."""

    events: Any

    def __init__(self, settings: Settings, **options: Any) -> None: ...

    @property
    def tree_size(self) -> int: ...

    def degrade(self, reason: str) -> None: ...

    @classmethod
    def for_rules(cls, rules: CacheRules, *, settings: Settings, builder: PromptBuilder | None) -> Self: ...


OrdererT = TypeVar("OrdererT", bound=_LiveOrderer)

_logger = logging.getLogger("ragorder.vllm")

_TIMEOUT_S = 5.0
_SYNCHRONISE_S = 5.0
_PATIENCE_S = 30.0
_REMEMBERED = 4
# Settings with which a hybrid model is treated as an ordinary one.
_ORDINARY = ("events_endpoint", "host_tokens", "disk_tokens", "profile", "reuse", "residency")


def connect(
    orderer_class: type[OrdererT],
    base_url: str,
    *,
    builder: PromptBuilder | None,
    settings: Settings,
    api_key: str | None = None,
) -> OrdererT:
    if settings.events_endpoint is not None and not (builder is not None and builder.prefix_ids):
        raise ValueError(
            "events_endpoint needs builder=PromptBuilder(tokenizer=…) with the served model's tokenizer: KV events "
            "carry tokens, which identify the documents"
        )
    settings, missing, hybrid = _read_settings(base_url, settings, api_key)
    options: dict[str, Any] = {}
    if builder is not None and not hybrid:
        options["tokens"] = builder.document_tokens
        if "prefix_tokens" not in settings.model_fields_set:
            settings = settings.model_copy(update={"prefix_tokens": builder.prefix_tokens})
    if hybrid:
        orderer = orderer_class.for_rules(hybrid_rules(settings.block_size), settings=settings, builder=builder)
    elif builder is None or settings.events_endpoint is None:
        orderer = orderer_class(settings, **options)
    else:
        options |= {"token_ids": builder.document_ids, "prefix_ids": builder.prefix_ids}
        orderer = following_events(orderer_class, settings, settings.events_endpoint, options)
        if settings.replay_endpoint is None:
            missing.append("no replay_endpoint: lost KV events cannot be replayed")
        elif not orderer.events.wait_until_synchronised(_SYNCHRONISE_S):
            missing.append("no answer from replay_endpoint yet: an LRU mirror is used instead; run ragorder doctor")
    for reason in missing:
        orderer.degrade(reason)
    return orderer


def hybrid_rules(block_tokens: int) -> CacheRules:
    """Return the cache rules of a hybrid model (vLLM 0.32, docs/vllm.md).

    A layer of Mamba, GDN or the like has one state for a whole prefix. By default (`mamba_cache_mode "align"`,
    `prefix_cache_retention_interval 0`) vLLM keeps states at a prompt's last block and where requests diverge, which it
    detects at the second one.
    """
    from ragorder.clouds import CacheRules

    return CacheRules(
        f"hybrid model, blocks of {block_tokens}",
        resume="junctions",
        interval_tokens=block_tokens,
        marks=0,
        ttl_s=inf,
        write=1.0,
        read=0.0,
        readable="start",
        source="vLLM 0.32, v1/core/sched/scheduler.py and v1/core/single_type_kv_cache_manager.py",
        date="2026-11-24",
    )


def _read_settings(base_url: str, settings: Settings, api_key: str | None) -> tuple[Settings, list[str], bool]:
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
                    f"{server.root} is ragorder serve, which orders itself: give the address of its --upstream, or "
                    "send it unordered requests"
                )
            elif not {"block_size", "capacity_tokens"} <= settings.model_fields_set:
                missing.append(str(error))
            return settings, missing, False
    settings = settings.model_copy(update=cache.completes(settings))
    if cache.prefix_caching is False:
        missing.append("the server's prefix cache is off: start it with --enable-prefix-caching")
    if cache.engines > 1:
        missing.append(f"the server has {cache.engines} engines with a cache each: route a tenant to one of them")
    return settings, missing, _is_hybrid(cache, settings, missing)


def _is_proxy(server: Server) -> bool:
    """Return True even if its servers do not answer."""
    try:
        server.get_json("/ragorder/health")
    except ServerError:
        return False
    return True


def _is_hybrid(cache: CacheConfig, settings: Settings, missing: list[str]) -> bool:
    if cache.hybrid is None:
        _logger.info(
            "the server does not publish whether its model is hybrid (Mamba, GDN): if it is, Orderer.for_vllm needs a "
            "newer vLLM, or use Orderer.for_rules with hybrid_rules(block_size) of ragorder.adapters.vllm.connect"
        )
    usual = type(settings).model_fields
    kept = [name for name in _ORDINARY if getattr(settings, name) != usual[name].default]
    if cache.hybrid and kept:
        missing.append(
            f"a hybrid model resumes only at stored states, which {', '.join(kept)} cannot track: predictions are too "
            "high; leave it out"
        )
    return bool(cache.hybrid) and not kept


def following_events(
    orderer_class: Callable[..., OrdererT], settings: Settings, endpoint: str, options: dict[str, Any]
) -> OrdererT:
    capacity = settings.held_tokens or 0
    blocks = EngineBlocks(settings.block_size, max(1 << 16, _REMEMBERED * capacity // settings.block_size))
    orderer = orderer_class(settings, **options, blocks=blocks)
    orderer.events = KVEventSubscriber(
        blocks, endpoint, settings.replay_endpoint, topic=settings.events_topic, on_pause=_degrade_on_silence(orderer)
    )
    return orderer


def _degrade_on_silence(orderer: _LiveOrderer) -> Callable[[KVEventSubscriber], None]:
    """Degrade the orderer after a long silence since first use or the last event."""
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
                alive.degrade("no KV events of this topic: correct events_topic, or leave it empty for any topic")
            else:
                alive.degrade(
                    "no KV events: the server has published none; compare events_endpoint, "
                    "replay_endpoint and events_topic with its --kv-events-config, or run ragorder doctor"
                )

    return look
