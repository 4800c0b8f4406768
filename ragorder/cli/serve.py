"""The command `ragorder serve`: a proxy in front of an OpenAI-compatible server, or of an engine in this process."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.config_file import with_environment
from ragorder.cli.options import Command, build, build_orderer, given
from ragorder.cli.serve_engine import ENGINE_OPTIONS, Backend, check_engine, embedded
from ragorder.cli.serve_limits import ServeLimits, check_connections
from ragorder.cli.serve_options import check_keys, serve_options
from ragorder.cli.serve_parts import builder_of, clouds_of, load_named, naming, sharing, topics_of, with_loads
from ragorder.cli.serve_running import Running, certificate_of, check_workers, listening_on, log_to, run
from ragorder.cli.serve_upstream import ROUTED, check_route, cloud_of, fleet_of, server_of, warn
from ragorder.extras import install_hint
from ragorder.orderer import Orderer
from ragorder.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ragorder.adapters.observing.observed import ObservedOrderer
    from ragorder.adapters.observing.prometheus import Metrics
    from ragorder.adapters.shared_orders import SharedOrderer
    from ragorder.clouds import Provider

__all__ = ["serve"]

_MODES = {
    "order": "documents are ordered for the cache",
    "route": "requests get their topic, documents stay in retrieval order",
    "shadow": "shadow: documents stay in retrieval order",
}


@with_environment("RAGORDER_SERVE")
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
    """Proxy of a server with OpenAI's or Anthropic's API that orders documents.

    Documents are tagged in the body of a request to /v1/chat/completions, /v1/completions, /v1/responses or
    /v1/messages, {"ragorder": {"documents": [{"id", "text", "title", "tokens"}, …], "query", "scope"}}, best document
    first, which a client sends as "extra_body"; or they are found in a message by --template. All other requests, and
    all answers, are forwarded byte by byte. Cached tokens are read from the usage in an answer, which a stream has
    only if its client requests it ("stream_options": {"include_usage": true}). GET /ragorder/openapi.json gives the
    schema; GET /ragorder/health is for probes, and GET /ragorder/ready checks the server as well. The saving is shown
    at /ragorder (a page), /ragorder/stats (JSON, see `ragorder stats`) and /metrics.

    With --engine torch the model runs in this process, without another server, and keeps documents' KV on the device,
    in host memory and on disk (see `ragorder tiers stats`).

    Every option may also come from the environment, as RAGORDER_SERVE_ and its name (RAGORDER_SERVE_READ_TIMEOUT=60s)
    unless it names another variable below, or from a file (--config). The command line comes first, then the
    environment.
    """
    engine_settings = {name: options.pop(name) for name in ENGINE_OPTIONS}
    limits = build(ServeLimits, {name: options.pop(name) for name in ServeLimits.model_fields})
    running = build(Running, {name: options.pop(name) for name in Running.model_fields})
    in_process = check_engine(context) == "torch"
    try:
        from ragorder.adapters.http_server.access_log import AccessLog
        from ragorder.adapters.http_server.server import address_of, is_loopback
        from ragorder.adapters.observing.observed import ObservedOrderer
        from ragorder.adapters.observing.prometheus import Metrics
        from ragorder.adapters.proxy import AdmissionQueue, DocumentTemplate, TemplateError, Timeouts, make_app
        from ragorder.adapters.proxy.access import THIS_MACHINE
        from ragorder.adapters.proxy.app import PROBES
        from ragorder.adapters.proxy.pages import StatsPages
    except ImportError as error:
        raise click.ClickException(f"serving needs {error.name}: {install_hint('proxy')}") from None
    from ragorder.adapters.http_client import AddressError

    check_keys(context)
    check_route(context)
    has_replicas = len(upstream) > 1 or data_parallel_ranks is not None
    if limits.tries_timeout_s is not None and not has_replicas:
        raise click.UsageError("--tries-timeout requires several replicas: --upstream twice, or --data-parallel-ranks")
    if shared_orders is not None and (has_replicas or route or shadow):
        raise click.UsageError("--shared-orders is for several proxies of one server with one cache: leave it out")
    check_workers(context, running.workers, in_process=in_process, has_replicas=has_replicas)
    certificate = certificate_of(running)
    topics = topics_of(topic_header, topic_secret, route=route)
    if allow_host and api_key is not None:
        raise click.UsageError(
            "--allow-host cannot be combined with --api-key: requests with the key are accepted for any host"
        )
    queue = given({"reorder_window": limits.reorder_window, "max_waiting": limits.max_waiting})
    if limits.max_in_flight is None and (stray := [name for name in queue if name != "max_waiting" or not in_process]):
        raise click.UsageError(f"--{stray[0].replace('_', '-')} requires --max-in-flight")
    if isinstance(profile := engine_settings["profile"], Path):
        options["profile"] = with_loads(profile, needed=not in_process)
    settings = build_orderer(options).settings
    loaded = None if tokenizer is None else load_named(tokenizer)
    templates = {"document_template": document_template, "question_template": question_template}
    builder_of(None, **templates)
    try:
        found = None if template is None else DocumentTemplate(template)
    except TemplateError as error:
        raise click.UsageError(f"--template: {error}") from None
    if number_by_place and found is not None and not found.shows_id:
        raise click.UsageError("--number-by-place: --template has no {id} to replace")
    if not dedup and dedup_text is not None:
        raise click.UsageError("--dedup-text requires --dedup")
    repeated = naming(found, dedup_text, number_by_place=number_by_place) if dedup else None
    provider: Provider | None = next(filter(None, map(cloud_of, upstream)), None)
    is_engine = in_process or (marks is False and provider is None)
    marks = provider is not None if marks is None else marks
    if marks_ttl is not None and not marks:
        raise click.UsageError("--marks-ttl requires --marks")
    if marks and running.workers > 1:
        raise click.UsageError("--workers: a process knows only its own breakpoints at a cloud: leave --workers out")
    asked_settings = settings
    if marks:
        # Such a cache holds what was marked: that it has less than was sent says nothing about its size.
        settings = settings.model_copy(update={"feedback": False})
    hosts = THIS_MACHINE.union(allow_host, [host]) if is_loopback(host) or allow_host else None
    connections = check_connections(context, limits.max_connections)
    metrics = Metrics() if running.workers == 1 else None

    with ExitStack() as until_served:
        # An address that is not available is an error before a model is loaded.
        sockets = until_served.enter_context(listening_on(host, limits.port, running.workers))
        try:
            if in_process:
                assert metrics is not None
                servers = [
                    until_served.enter_context(
                        embedded(
                            engine_settings,
                            settings,
                            metrics.registry,
                            max_waiting=limits.max_waiting,
                            body_limit=limits.body_limit,
                            web_pages=api_key is not None or hosts is not None,
                        )
                    )
                ]
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
                        is_known=route or marks or provider is not None,
                    )
                    for each in upstream
                ]
        except AddressError as error:
            raise click.UsageError(f"--upstream: {error}") from None
        # A server that says the size of its cache, or whose size is given, finds any common prefix.
        is_engine = is_engine or (provider is None and not marks and _has_sizes(servers[0].settings))

        def make(metrics: Metrics) -> ASGIApp:
            """In the process that serves."""

            def observed(settings: Settings, by: Orderer | None = None) -> ObservedOrderer:
                return ObservedOrderer(by or Orderer(settings, **given({"topics": topics})), [metrics], shadow=shadow)

            metrics.read_process()
            admission = None
            if limits.max_in_flight is not None:
                admission = AdmissionQueue(limits.max_in_flight, registry=metrics.registry, **queue)
            clouds = None
            if marks:
                watched = partial(ObservedOrderer, watchers=[metrics], shadow=shadow)
                clouds = clouds_of(provider, marks_ttl, prices, asked_settings, watched)
            backend = servers[0]
            shared: SharedOrderer | None = None
            if has_replicas:
                orderer, backend = fleet_of(servers, data_parallel_ranks, observed, metrics.registry)
            else:
                if shared_orders is not None:
                    shared = sharing(shared_orders, backend.settings, topics)
                orderer = observed(backend.settings, shared)
            pages = StatsPages(metrics, admission)
            try:
                app = make_app(
                    orderer,
                    builder=builder_of(backend.tokenizer, **templates),
                    tokenizer=backend.tokenizer,
                    template=found,
                    number_by_place=number_by_place,
                    repeated=repeated,
                    marks=marks or (False if is_engine else None),
                    clouds=clouds,
                    topic_header=topic_header or (ROUTED if route else None),
                    route=route,
                    on_passed=metrics.passed,
                    on_tbt=metrics.token_times,
                    on_sent=None if shared is None else shared.share,
                    api_key=api_key,
                    hosts=hosts,
                    body_limit=limits.body_limit,
                    bodies_limit=limits.bodies_limit,
                    timeouts=Timeouts(
                        limits.connect_timeout_s, limits.read_timeout_s, limits.client_timeout_s, limits.tries_timeout_s
                    ),
                    admission=admission,
                    routes=pages.routes,
                    background=[pages.history.keep],
                    **backend.options,
                )
            except AddressError as error:
                raise click.UsageError(f"--upstream: {error}") from None
            app = backend.wrap(app)
            return AccessLog(app) if running.access_log else app

        if api_key is None and not is_loopback(host):
            warn(f"every client that reaches {host} can use the server: give --api-key")
        if route:
            click.echo(f"Topics: in the header {topic_header or ROUTED}", err=True)
        else:
            _announce_cache(servers[0], settings, marks=marks)
        mode = "route" if route else "shadow" if shadow else "order"
        set_too = "; cache_control and its like are set where the client sets none" if marks else ""
        click.echo(f"Mode: {_MODES[mode]}{set_too}", err=True)
        url = address_of(sockets[0], "http" if certificate is None else "https")
        click.echo(f"Page: {url}/ragorder", err=True)
        log_to(running)
        run(
            make,
            sockets,
            metrics,
            grace_s=ceil(limits.grace_s),
            client_s=limits.client_timeout_s,
            connections=connections,
            probes=PROBES,
            certificate=certificate,
            on_started=lambda: click.echo(f"Serving on {url}/v1", err=True),
        )


def _has_sizes(settings: Settings) -> bool:
    return {"capacity_tokens", "block_size"} <= settings.model_fields_set


def _announce_cache(server: Backend, asked: Settings, *, marks: bool) -> None:
    settings = server.settings

    def origin(name: str) -> str:
        return "given" if name in asked.model_fields_set else server.source

    capacity = settings.held_tokens
    tokens = "unlimited tokens" if capacity is None else f"{capacity:,} tokens"
    blocks = f"blocks of {settings.block_size} ({origin('block_size')})"
    cloud = "by the rules of each request's model; of unknown models " if marks else ""
    click.echo(f"Cache: {cloud}{tokens} ({origin('capacity_tokens')}), {blocks}", err=True)
    if server.tokenizer is None:
        click.echo("Lengths: estimated at four characters a token (--tokenizer MODEL counts them)", err=True)
    if settings.profile is not None and (settings.host_tokens or settings.disk_tokens):
        click.echo(f"Tiers: cached prefixes are compared in seconds, by {settings.profile}", err=True)
