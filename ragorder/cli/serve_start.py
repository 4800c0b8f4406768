"""What `ragorder serve` knows of the cache when it starts, and what it says of itself."""

from __future__ import annotations

import click

from ragorder.settings import Settings

__all__ = ["announce", "settings_of_server", "warn"]

_ASSUMED = "assumed"


def settings_of_server(settings: Settings, upstream: str, api_key: str | None) -> tuple[Settings, str]:
    """The settings, with what the server says of its cache in the place of what was not given; and where that is from.

    Raises AddressError for a malformed address.
    """
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
        warn(f"the size of the server's cache is not known, give {options} ({error})")
        return settings, _ASSUMED
    if cache.prefix_caching is False:
        warn("the server reuses nothing: start it with --enable-prefix-caching")
    if cache.engines > 1:
        warn(f"the server has {cache.engines} engines with a cache each: route a tenant to one of them")
    return settings.model_copy(update={name: getattr(cache, name) for name in unknown}), "from the server's /metrics"


def announce(url: str, settings: Settings, given: Settings, source: str, *, shadow: bool) -> None:
    """Say what is served: the cache that is reckoned with, where its sizes are from (`source`, unless they were
    `given`), the mode and the page."""

    def origin(name: str) -> str:
        return "given" if name in given.model_fields_set else source

    capacity = settings.capacity_tokens
    tokens = "unlimited tokens" if capacity is None else f"{capacity:,} tokens"
    blocks = f"blocks of {settings.block_size} ({origin('block_size')})"
    click.echo(f"Cache: {tokens} ({origin('capacity_tokens')}), {blocks}", err=True)
    mode = "shadow, documents stay in retrieval order" if shadow else "documents are put in cache order"
    click.echo(f"Mode: {mode}", err=True)
    click.echo(f"Page: {url}/ragorder", err=True)


def warn(message: str) -> None:
    """Say what is probably not as it is meant."""
    click.echo(f"Warning: {message}", err=True)
