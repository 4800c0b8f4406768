"""The vLLM engine of this process's server."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any, NamedTuple

from starlette.types import Scope

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.proxy.bodies.followed_tokens import FollowedTokens
from ragorder.adapters.proxy.bodies.token_counter import TokenCounter
from ragorder.adapters.vllm.cache_config import CacheConfig, engine_cache_config
from ragorder.adapters.vllm.connect import following_events
from ragorder.adapters.vllm.kv_events import endpoint_of_rank
from ragorder.common.counts import KnownTokens
from ragorder.document import Document
from ragorder.orderer import Orderer
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings

_ANY_ADDRESS = re.compile(r"^tcp://(?:\*|0\.0\.0\.0|\[::\])(?=:)")


class OwnEngine(NamedTuple):
    """`settings` have the engine's sizes. With `events_endpoint` KV events can be followed, by `tokens`."""

    settings: Settings
    missing: list[str]
    builder: PromptBuilder
    tokens: TokenCounter

    def orderer(self) -> Orderer:
        endpoint = self.settings.events_endpoint
        if endpoint is not None:
            try:
                return following_events(Orderer, self.settings, endpoint, {"token_ids": _ids_of, "prefix_ids": None})
            except (ImportError, ValueError) as error:
                self.missing.append(f"KV events are not followed: {error}")
        return Orderer(self.settings)


def has_engine(scope: Scope) -> bool:
    return _config(scope) is not None


def own_engine(own: Settings, scope: Scope, *, shared_orders: bool) -> OwnEngine:
    """Only vLLM's engine has sizes. It is not followed if orders are shared."""
    config, builder = _config(scope), PromptBuilder("")
    unfollowed = own.model_copy(update={"events_endpoint": None})
    plain = OwnEngine(unfollowed, [], builder, TokenCounter(builder))
    if config is None:
        unknown = {"capacity_tokens", "block_size"} - own.model_fields_set
        names = " and ".join(f"RAGORDER_{name.upper()}" for name in sorted(unknown, reverse=True))
        missing = [f"the size of the server's cache is unknown: set {names}"] if unknown else []
        return plain._replace(missing=missing)
    try:
        cache = engine_cache_config(config)
    except (ServerError, AttributeError) as error:
        return plain._replace(missing=[f"the size of the server's cache is unknown: {error}"])
    engine = plain._replace(missing=_missing(cache), settings=unfollowed.model_copy(update=cache.completes(own)))
    if shared_orders:
        return engine
    endpoints = None if cache.engines > 1 or cache.hybrid else _endpoints(own, config)
    if endpoints is not None:
        try:
            return _followed(engine, scope["app"].state, endpoints)
        except Exception as error:
            reason = f"KV events are not followed: the server's tokenizer cannot be used ({type(error).__name__})"
            engine.missing.append(reason)
    processes = getattr(config.parallel_config, "_api_process_count", 1)
    if processes > 1:
        engine.missing.append(
            f"{processes} API server processes order for one cache, each by what it has served itself: publish KV "
            "events (--kv-events-config) or set RAGORDER_SHARED_ORDERS=redis://HOST:PORT/0, or fewer tokens may be "
            "cached than in retrieval order"
        )
    return engine


def _config(scope: Scope) -> Any:
    return getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)


def _missing(cache: CacheConfig) -> list[str]:
    missing = []
    if cache.prefix_caching is False:
        missing.append("the server's prefix cache is off: start it with --enable-prefix-caching")
    if cache.hybrid:
        missing.append(
            "the server's model is a hybrid one (Mamba, GDN) and resumes only where its state was kept, so predictions "
            "are too high: Orderer.for_vllm orders for that"
        )
    if cache.engines > 1:
        missing.append(
            f"the server has {cache.engines} engines, each with its own cache: `ragorder serve --data-parallel-ranks "
            f"{cache.engines}` knows them apart"
        )
    return missing


def _endpoints(own: Settings, config: Any) -> dict[str, Any] | None:
    if own.events_endpoint is not None:
        return {"events_endpoint": own.events_endpoint}
    events = getattr(config, "kv_events_config", None)
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return None
    rank = getattr(config.parallel_config, "data_parallel_index", 0)
    replay = None if events.replay_endpoint is None else _here(events.replay_endpoint, rank)
    return {"events_endpoint": _here(events.endpoint, rank), "replay_endpoint": replay, "events_topic": events.topic}


def _here(endpoint: str, rank: int) -> str:
    return endpoint_of_rank(_ANY_ADDRESS.sub("tcp://127.0.0.1", endpoint), rank)


def _followed(engine: OwnEngine, state: Any, endpoints: dict[str, Any]) -> OwnEngine:
    # The server's own one may be in use in another thread, with other options.
    tokenizer = deepcopy(state.engine_client.get_tokenizer())
    models = frozenset(each.name for each in state.openai_serving_models.base_model_paths)
    builder = PromptBuilder("", tokenizer=tokenizer)
    settings = engine.settings.model_copy(update=endpoints)
    return OwnEngine(settings, engine.missing, builder, FollowedTokens(builder, tokenizer, models))


def _ids_of(document: Document) -> Any:
    return document.token_count.ids if isinstance(document.token_count, KnownTokens) else ()
