"""The command `ragorder serve`: a proxy in front of an OpenAI-compatible server, or of an engine in this process."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ragorder.cli.options import Command, build, given
from ragorder.cli.serve_engine import ENGINE_OPTIONS, Backend, check_engine, embedded
from ragorder.cli.serve_options import ServeLimits, check_connections, check_keys, serve_options
from ragorder.cli.serve_upstream import ROUTED, check_route, cloud_of, fleet_of, server_of, warn
from ragorder.orderer import Orderer
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings
from ragorder.topic import Topics, checked_header

if TYPE_CHECKING:
    from ragorder.adapters.cloud_orderers import CloudOrderers
    from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments
    from ragorder.clouds import Provider
    from ragorder.orderer import OrdererLike

__all__ = ["serve"]

_GIVEN = ParameterSource.COMMANDLINE
_MODES = {
    "order": "documents are ordered for the cache",
    "route": "requests get their topic, documents stay in retrieval order",
    "shadow": "shadow: documents stay in retrieval order",
}


@click.command(cls=Command)
@serve_options
@click.pass_context
def serve(
    context: click.Context,
    /,
    upstream: tuple[str, ...],
    data_parallel_ranks: int | None,
    topic_header: str | None,
    topic_secret: str | None,
    route: bool,
    engine: str | None,
    host: str,
    api_key: str | None,
    upstream_api_key: str | None,
    template: str | None,
    number_by_place: bool,
    dedup: bool,
    dedup_text: str | None,
    marks: bool | None,
    marks_ttl: str | None,
    prices: str | None,
    document_template: str | None,
    question_template: str | None,
    tokenizer: str | None,
    shadow: bool,
    shared_orders: str | None,
    tiers: bool,
    allow_host: tuple[str, ...],
    **options: Any,
) -> None:
    """Order documents in front of a server with OpenAI's or Anthropic's API.

    Documents are tagged in the body of a request to /v1/chat/completions, /v1/completions, /v1/responses or
    /v1/messages, {"ragorder": {"documents": [{"id", "text", "title", "tokens"}, …], "query", "scope"}}, best document
    first, which a client sends as extra_body; or they are found in a message by --template. All other requests, and all
    answers, are forwarded byte by byte. Cached tokens are read from the usage in an answer, which a stream has only if
    its client requests it (stream_options.include_usage). GET /ragorder/openapi.json gives the schema; GET
    /ragorder/health is for probes, and GET /ragorder/ready checks the server as well. The saving is shown at /ragorder
    (a page), /ragorder/stats (JSON, see `ragorder stats`) and /metrics.

    With --engine torch the model runs in this process, without another server, and keeps documents' KV on the device,
    in host memory and on disk (see `ragorder tiers stats`).
    """
    engine_settings = {name: options.pop(name) for name in ENGINE_OPTIONS}
    limits = build(ServeLimits, {name: options.pop(name) for name in ServeLimits.model_fields})
    in_process = check_engine(context) == "torch"
    try:
        from ragorder.adapters.http_server.server import address_of, is_loopback, run_server
        from ragorder.adapters.observing.observed import ObservedOrderer
        from ragorder.adapters.observing.prometheus import Metrics
        from ragorder.adapters.proxy import AdmissionQueue, DocumentTemplate, TemplateError, Timeouts, make_app
        from ragorder.adapters.proxy.access import THIS_MACHINE
        from ragorder.adapters.proxy.app import PROBES
        from ragorder.adapters.proxy.pages import stats_routes
    except ImportError as error:
        raise click.ClickException(f"serving needs {error.name}: pip install 'ragorder[proxy]'") from None
    from ragorder.adapters.http_client import AddressError

    check_keys(context)
    check_route(context)
    has_replicas = len(upstream) > 1 or data_parallel_ranks is not None
    if limits.tries_timeout_s is not None and not has_replicas:
        raise click.UsageError("--tries-timeout requires several replicas: --upstream twice, or --data-parallel-ranks")
    if shared_orders is not None and (has_replicas or route or shadow):
        raise click.UsageError("--shared-orders is for proxies that order in front of one server with one cache")
    topics = _topics(topic_header, topic_secret, route=route)
    if allow_host and api_key is not None:
        raise click.UsageError(
            "--allow-host cannot be combined with --api-key: requests with the key are accepted for any host"
        )
    queue = given({"reorder_window": limits.reorder_window, "max_waiting": limits.max_waiting})
    if limits.max_in_flight is None and (stray := [name for name in queue if name != "max_waiting" or not in_process]):
        raise click.UsageError(f"--{stray[0].replace('_', '-')} requires --max-in-flight")
    if isinstance(profile := engine_settings["profile"], Path):
        options["profile"] = _with_loads(profile, needed=not in_process)
    settings = build(Settings, options)
    loaded = None if tokenizer is None else _load(tokenizer)
    templates = {"document_template": document_template, "question_template": question_template}
    _builder(None, **templates)
    try:
        found = None if template is None else DocumentTemplate(template)
    except TemplateError as error:
        raise click.UsageError(f"--template: {error}") from None
    if number_by_place and found is not None and not found.shows_id:
        raise click.UsageError("--number-by-place: --template has no {id} to replace")
    if not dedup and dedup_text is not None:
        raise click.UsageError("--dedup-text requires --dedup")
    repeated = _naming(found, dedup_text, number_by_place=number_by_place) if dedup else None
    provider: Provider | None = next(filter(None, map(cloud_of, upstream)), None)
    marks = provider is not None if marks is None else marks
    if marks_ttl is not None and not marks:
        raise click.UsageError("--marks-ttl requires --marks")
    clouds = None
    asked_settings = settings
    if marks:
        # Such a cache holds what was marked: that it has less than was sent says nothing about its size.
        settings = settings.model_copy(update={"feedback": False})
    connections = check_connections(context, limits.max_connections)
    metrics = Metrics()

    def observed(settings: Settings) -> ObservedOrderer:
        options = given({"topics": topics})
        orderer = Orderer(settings, **options) if shared_orders is None else _sharing(shared_orders, settings, options)
        return ObservedOrderer(orderer, [metrics], shadow=shadow)

    if marks:
        watched = partial(ObservedOrderer, watchers=[metrics], shadow=shadow)
        clouds = _clouds(provider, marks_ttl, prices, asked_settings, watched)
    admission = None
    if limits.max_in_flight is not None:
        admission = AdmissionQueue(limits.max_in_flight, registry=metrics.registry, **queue)
    with ExitStack() as until_served:
        # An address that is not available is an error before a model is loaded.
        listening = until_served.enter_context(_listen(host, limits.port))
        try:
            servers: list[Backend] = []
            if in_process:
                backend = until_served.enter_context(
                    embedded(
                        engine_settings,
                        settings,
                        metrics.registry,
                        max_waiting=limits.max_waiting,
                        body_limit=limits.body_limit,
                    )
                )
            else:
                servers = [
                    server_of(
                        each,
                        upstream_api_key,
                        settings,
                        loaded,
                        ranks=data_parallel_ranks,
                        tiers=tiers,
                        profile=engine_settings["profile"],
                        budget_s=engine_settings["profile_budget_s"],
                        is_known=route or provider is not None,
                    )
                    for each in upstream
                ]
                backend = servers[0]
            if has_replicas:
                orderer, backend = fleet_of(servers, data_parallel_ranks, observed, metrics.registry)
            else:
                orderer = observed(backend.settings)
            app = make_app(
                orderer,
                builder=_builder(backend.tokenizer, **templates),
                tokenizer=backend.tokenizer,
                template=found,
                number_by_place=number_by_place,
                repeated=repeated,
                marks=marks,
                clouds=clouds,
                topic_header=topic_header or (ROUTED if route else None),
                route=route,
                on_passed=metrics.passed,
                on_tbt=metrics.token_times,
                api_key=api_key,
                hosts=THIS_MACHINE.union(allow_host, [host]) if is_loopback(host) or allow_host else None,
                body_limit=limits.body_limit,
                bodies_limit=limits.bodies_limit,
                timeouts=Timeouts(
                    limits.connect_timeout_s, limits.read_timeout_s, limits.client_timeout_s, limits.tries_timeout_s
                ),
                admission=admission,
                routes=stats_routes(metrics, admission),
                **backend.options,
            )
        except AddressError as error:
            raise click.UsageError(f"--upstream: {error}") from None
        if api_key is None and not is_loopback(host):
            warn(f"every client that reaches {host} can use the server: give --api-key")
        if route:
            click.echo(f"Topics: in the header {topic_header or ROUTED}", err=True)
        else:
            _announce_cache(backend.settings, settings, backend.source)
        mode = "route" if route else "shadow" if shadow else "order"
        click.echo(f"Mode: {_MODES[mode]}", err=True)
        click.echo(f"Page: {address_of(listening)}/ragorder", err=True)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        run_server(
            backend.wrap(app),
            listening,
            grace_s=ceil(limits.grace_s),
            client_s=limits.client_timeout_s,
            connections=connections,
            probes=PROBES,
            on_started=lambda url: click.echo(f"Serving on {url}/v1", err=True),
        )


def _naming(template: DocumentTemplate | None, text: str | None, *, number_by_place: bool) -> RepeatedDocuments:
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


def _clouds(
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
        known = ", ".join(PROVIDERS[provider].TTLS)
        raise click.UsageError(f"--marks-ttl: {provider} has no life {ttl!r}, but {known}")
    # A cloud has room for everything, for a time.
    settings = settings.model_copy(update={"capacity_tokens": None})
    try:
        return CloudOrderers(provider, ttl=ttl, prices=prices, settings=settings, wrap=wrap)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--marks: {error}") from None


def _sharing(url: str, settings: Settings, options: dict[str, Any]) -> Orderer:
    try:
        from ragorder.adapters.shared_orders import SharedOrderer

        return SharedOrderer(url, settings, **options)
    except ImportError as error:
        raise click.ClickException(f"--shared-orders needs {error.name}: pip install 'ragorder[shared]'") from None
    except ValueError:
        # What it quotes may have a password in it.
        raise click.UsageError("--shared-orders: not a URL such as redis://127.0.0.1:6379/0") from None


def _topics(header: str | None, secret: str | None, *, route: bool) -> Topics | None:
    """Raises click.UsageError for a header that cannot be, or a secret of no use."""
    if header is None and not route:
        if secret is not None and click.get_current_context().get_parameter_source("topic_secret") is _GIVEN:
            raise click.UsageError("--topic-secret requires --topic-header or --route")
        return None
    try:
        checked_header(header or ROUTED)
    except ValueError as error:
        raise click.UsageError(f"--topic-header: {error}") from None
    if secret is None:
        warn("topics are of this process alone: give all that should agree the same --topic-secret")
    return Topics(secret)


def _with_loads(profile: Path, *, needed: bool) -> Path | None:
    """The profile, if it has load times. Raises click.UsageError if it cannot be read, or needs to have them."""
    from ragorder.kernels.profile import PrefillProfile

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


def _listen(host: str, port: int) -> socket.socket:
    from ragorder.adapters.http_server.server import listen

    try:
        return listen(host, port)
    except OSError as error:
        raise click.ClickException(f"{host} port {port}: {error.strerror}: give another --host or --port") from None


def _builder(tokenizer: Any, **templates: str | None) -> PromptBuilder:
    try:
        return PromptBuilder("", tokenizer=tokenizer, **given(templates))
    except ValueError as error:
        raise click.UsageError(re.sub(r"^(\w+)_template", r"--\1-template", str(error))) from None


def _load(tokenizer: str) -> Any:
    from ragorder.adapters.openai.tokenizer import load_tokenizer

    try:
        return load_tokenizer(tokenizer)
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(f"--tokenizer: {error}") from None


def _announce_cache(settings: Settings, asked: Settings, source: str) -> None:
    def origin(name: str) -> str:
        return "given" if name in asked.model_fields_set else source

    capacity = settings.held_tokens
    tokens = "unlimited tokens" if capacity is None else f"{capacity:,} tokens"
    blocks = f"blocks of {settings.block_size} ({origin('block_size')})"
    click.echo(f"Cache: {tokens} ({origin('capacity_tokens')}), {blocks}", err=True)
    if settings.profile is not None and (settings.host_tokens or settings.disk_tokens):
        click.echo(f"Tiers: cached prefixes are compared in seconds, by {settings.profile}", err=True)
