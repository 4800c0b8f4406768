"""Parts of the proxy, made of the options of `ragorder serve`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.options import given, is_given
from ragorder.cli.serve_upstream import ROUTED, warn
from ragorder.extras import install_hint
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings
from ragorder.topic import Topics, checked_header

if TYPE_CHECKING:
    from ragorder.adapters.cloud_orderers import CloudOrderers
    from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments
    from ragorder.adapters.shared_orders import SharedOrderer
    from ragorder.clouds import Provider
    from ragorder.orderer import Orderer, OrdererLike

__all__ = ["builder_of", "clouds_of", "load_named", "naming", "sharing", "topics_of", "with_loads"]


def naming(template: DocumentTemplate | None, text: str | None, *, number_by_place: bool) -> RepeatedDocuments:
    """Raises click.UsageError."""
    from ragorder.adapters.proxy import RepeatedDocuments, TemplateError

    if template is None:
        raise click.UsageError("--dedup requires --template, which finds the documents of earlier messages")
    if number_by_place:
        raise click.UsageError("--dedup: a number of --number-by-place names nothing in another message")
    try:
        return RepeatedDocuments(template, **given({"reference": text}))
    except TemplateError as error:
        raise click.UsageError(f"{'--dedup' if text is None else '--dedup-text'}: {error}") from None


def clouds_of(
    provider: Provider | None,
    ttl: str | None,
    prices: str | None,
    settings: Settings,
    wrap: Callable[[Orderer], OrdererLike],
) -> CloudOrderers:
    """Orderers of the models that clouds have. Raises click.UsageError."""
    from ragorder.adapters.cloud_orderers import CloudOrderers
    from ragorder.clouds.tables import PROVIDERS

    if ttl is not None and provider is not None and ttl not in PROVIDERS[provider].TTLS:
        known = " or ".join(PROVIDERS[provider].TTLS)
        raise click.UsageError(f"--marks-ttl: {provider} has no TTL {ttl!r}: use {known}")
    # A cloud has room for everything, for a time.
    settings = settings.model_copy(update={"capacity_tokens": None})
    try:
        return CloudOrderers(provider, ttl=ttl, prices=prices, settings=settings, wrap=wrap)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--marks: {error}") from None


def sharing(url: str, settings: Settings, topics: Topics | None) -> SharedOrderer:
    """Raises click.UsageError."""
    try:
        from ragorder.adapters.shared_orders import SharedOrderer

        return SharedOrderer(url, settings, at_once=False, topics=topics)
    except ImportError as error:
        raise click.ClickException(f"--shared-orders needs {error.name}: {install_hint('shared')}") from None
    except ValueError:
        # What it quotes may have a password in it.
        raise click.UsageError("--shared-orders: not a URL such as redis://127.0.0.1:6379/0") from None


def topics_of(header: str | None, secret: str | None, *, route: bool) -> Topics | None:
    """Raises click.UsageError for a header that cannot be, or a secret of no use."""
    if header is None and not route:
        if secret is not None and is_given(click.get_current_context(), "topic_secret"):
            raise click.UsageError("--topic-secret requires --topic-header or --route")
        return None
    try:
        checked_header(header or ROUTED)
    except ValueError as error:
        raise click.UsageError(f"--topic-header: {error}") from None
    if secret is None:
        warn("topics are of this process alone: give all that should agree the same --topic-secret")
    return Topics(secret)


def with_loads(profile: Path, *, needed: bool) -> Path | None:
    """The profile, if it has load times. Raises click.UsageError if it cannot be read, or needs to have them."""
    from ragorder.trie.profile import PrefillProfile

    try:
        loads = PrefillProfile.from_file(profile).loads
    except ValueError as error:
        raise click.UsageError(f"--profile: {error}") from None
    if needed and not loads:
        raise click.UsageError(
            f"--profile: {profile} has no load times: measure them with `ragorder profile --loads`. A profile by which "
            "a server evicts is an option of `ragorder tiers config`"
        )
    return profile if loads else None


def builder_of(tokenizer: Any, **templates: str | None) -> PromptBuilder:
    try:
        return PromptBuilder("", tokenizer=tokenizer, **given(templates))
    except ValueError as error:
        raise click.UsageError(re.sub(r"^(\w+)_template", r"--\1-template", str(error))) from None


def load_named(tokenizer: str) -> Any:
    from ragorder.adapters.openai.tokenizer import load_tokenizer

    try:
        return load_tokenizer(tokenizer)
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(f"--tokenizer: {error}") from None
