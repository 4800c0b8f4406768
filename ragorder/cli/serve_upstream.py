"""The backend of `ragorder serve --upstream`: a server, several replicas, or a router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from ragorder.cli.options import given, spelling
from ragorder.cli.output import log_shown
from ragorder.cli.serve_engine import Backend
from ragorder.cli.serve_options import ORDER_SETTINGS
from ragorder.clouds import Provider
from ragorder.settings import Settings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ragorder.orderer import OrdererLike

__all__ = ["ROUTED", "check_route", "cloud_of", "fleet_of", "server_of", "warn"]

ROUTED = "x-session-id"
"""The header of topics that most routers know."""

_ASSUMED = "assumed"
_CLOUDS: Mapping[str, Provider] = {
    "api.anthropic.com": "anthropic",
    "api.deepseek.com": "deepseek",
    "api.openai.com": "openai",
}
# What finds documents stays: topics are theirs.
_NOT_ROUTED = (
    "tiers",
    "shadow",
    "tokenizer",
    "max_in_flight",
    "data_parallel_ranks",
    "number_by_place",
    "dedup",
    "dedup_text",
    "marks",
    "marks_ttl",
    "prices",
    "document_template",
    "question_template",
    *ORDER_SETTINGS,
)


def check_route(context: click.Context) -> None:
    """Raise click.UsageError for options that `--route` leaves without a meaning."""
    if not context.params["route"]:
        return
    for name in _NOT_ROUTED:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            message = f"{spelling(name)} cannot be combined with --route, which only adds the topic: leave one out"
            raise click.UsageError(message)
    if len(context.params["upstream"]) > 1:
        raise click.UsageError("--route has one --upstream, the router, which knows the replicas")


def cloud_of(upstream: str) -> Provider | None:
    """The provider whose own server this is."""
    try:
        return _CLOUDS.get(urlsplit(upstream).hostname or "")
    except ValueError:
        return None


def server_of(
    upstream: str,
    api_key: str | None,
    settings: Settings,
    tokenizer: Any,
    *,
    ranks: int | None,
    tiers: bool,
    profile: object,
    budget_s: float | None,
    is_known: bool,
) -> Backend:
    """One server, whose metrics complete the settings, or one that has none (`is_known`): a router, or a cloud. Raises
    AddressError."""
    how = {"upstream": upstream, "upstream_api_key": api_key, "send_facts": tiers}
    if is_known:
        return Backend(settings, tokenizer, how, _ASSUMED)
    if tiers and profile in (None, "auto"):
        settings = settings.model_copy(
            update={"profile": settings.profile or _profile_server(upstream, api_key, budget_s)}
        )
    # After that: tiers publish their sizes with an engine's first request.
    known, source = _settings_of_server(settings, upstream, api_key, ranks)
    return Backend(known, tokenizer, how, source)


def fleet_of(
    servers: Sequence[Backend],
    ranks: int | None,
    observed: Callable[[Settings], OrdererLike],
    registry: CollectorRegistry,
) -> tuple[OrdererLike, Backend]:
    """Replicas with the settings of their own servers, and the orderer of the first. Raises click.UsageError."""
    from ragorder.adapters.proxy import Fleet, ReplicaAddress

    addresses = [
        ReplicaAddress(server.options["upstream"], observed(server.settings), rank)
        for server in servers
        for rank in (range(ranks) if ranks else (None,))
    ]
    try:
        fleet = Fleet(addresses, registry=registry)
    except ValueError:
        raise click.UsageError("--upstream: the same server twice: give each replica once") from None
    first = servers[0]
    backend = Backend(first.settings, first.tokenizer, {**first.options, "upstream": fleet}, first.source)
    return addresses[0].orderer, backend


def _settings_of_server(
    settings: Settings, upstream: str, api_key: str | None, ranks: int | None
) -> tuple[Settings, str]:
    """The settings, completed from the server's metrics, and the origin of the sizes. Raises AddressError."""
    from ragorder.adapters.http_client import AddressError
    from ragorder.adapters.vllm.cache_config import ServerError, read_cache_config

    unknown = {"capacity_tokens", "block_size"} - settings.model_fields_set
    if not unknown:
        return settings, _ASSUMED
    try:
        cache = read_cache_config(upstream, api_key=api_key)
    except AddressError:
        raise
    except (ServerError, ImportError) as error:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(unknown, reverse=True))
        warn(f"the size of the server's cache is unknown: give {options} ({error})")
        return settings, _ASSUMED
    if cache.prefix_caching is False:
        warn("the server's prefix cache is off: start it with --enable-prefix-caching")
    if cache.hybrid:
        warn(
            "the server's model is a hybrid one (Mamba, GDN) and resumes only where its state was kept, so predictions "
            "are too high: Orderer.for_vllm orders for that, the proxy does not"
        )
    if ranks is None and cache.engines > 1:
        warn(
            f"the server has {cache.engines} engines, each with its own cache: give "
            f"--data-parallel-ranks {cache.engines}, or route each tenant to one of them"
        )
    elif ranks is not None and cache.engines != ranks:
        warn(f"--data-parallel-ranks {ranks}: the server has {cache.engines}")
    return settings.model_copy(update=cache.completes(settings)), "from the server's /metrics"


def _profile_server(upstream: str, api_key: str | None, budget_s: float | None) -> Path | None:
    """The file of the server's profile, if its tiers await one and it has load times. Raises AddressError."""
    from ragorder.adapters.http_client import AddressError, ServerError
    from ragorder.adapters.vllm.server_profile import profile_server
    from ragorder.kernels.profile_cache import ProfileCache

    cache = ProfileCache()
    try:
        with log_shown("ragorder.profile", "Profile"):
            profile = profile_server(upstream, api_key=api_key, cache=cache, **given({"budget_s": budget_s}))
    except AddressError:
        raise
    except ServerError as error:
        warn(f"the server's prefill times are not measured, every token counts the same there ({error})")
        return None
    return cache.file_of(profile) if profile is not None and profile.loads else None


def warn(message: str) -> None:
    click.echo(f"Warning: {message}", err=True)
