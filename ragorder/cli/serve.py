"""The command `ragorder serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ragorder.cli.documents import documents_of, prompt_options, template_option
from ragorder.cli.options import (
    Command,
    build_orderer,
    given,
    is_given,
    option,
    options_from,
    section,
    with_environment,
)
from ragorder.cli.output import log_shown
from ragorder.cli.proxy import (
    Backend,
    ProxyServer,
    announce_cache,
    client_options,
    process_options,
    secret_option,
    server_options,
    topics_of,
    upstream_key_option,
    warn,
    with_loads,
)
from ragorder.cli.values import Choice, Count, ProfileSource, load_tokenizer
from ragorder.clouds import Provider
from ragorder.common.extras import install_hint
from ragorder.orderer import Orderer
from ragorder.settings import Settings
from ragorder.topic import Topics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp

    from ragorder.adapters.cloud_orderers import CloudOrderers
    from ragorder.adapters.observing.observed import ObservedOrderer
    from ragorder.adapters.observing.prometheus import Metrics
    from ragorder.adapters.shared_orders import SharedOrderer
    from ragorder.protocols import OrdererLike

_ASSUMED = "assumed"
_CLOUDS: Mapping[str, Provider] = {
    "api.anthropic.com": "anthropic",
    "api.deepseek.com": "deepseek",
    "api.openai.com": "openai",
}


@with_environment("RAGORDER_SERVE")
@click.command(
    cls=Command,
    examples=[
        "ragorder serve --upstream http://127.0.0.1:8000",
        "ragorder serve --upstream http://gpu1:8000 --upstream http://gpu2:8000",
        "ragorder serve --upstream https://api.anthropic.com --marks-ttl 1h",
        "ragorder serve --upstream http://127.0.0.1:8000 \\\n"
        "  --template '<document id=\"{id}\">\\n{text}\\n</document>'",
    ],
)
@section(
    "Server",
    option(
        "--upstream",
        metavar="URL",
        multiple=True,
        required=True,
        help="The server that the proxy forwards to, with OpenAI's or Anthropic's API, such as http://HOST:8000. "
        "Repeatable: replicas of one model, each with its own tree; a request goes to the best by cached tokens and "
        "load.",
    ),
    option(
        "--data-parallel-ranks",
        type=Count(2),
        metavar="N",
        help="The server, or each of them, has N data-parallel ranks with a cache each: keep a tree for each, and send "
        "the header X-data-parallel-rank.",
        unset="one",
    ),
    upstream_key_option(),
    option(
        "--tokenizer",
        metavar="FOLDER|NAME",
        help="The served model's tokenizer, by folder or name on the Hub, to count tokens.",
        unset="estimated",
    ),
    option(
        "--tiers",
        is_flag=True,
        help="The server is a vLLM with ragorder tiers: send it the document boundaries (with --tokenizer) and a "
        "digest of the tenant. Other servers may refuse such requests.",
    ),
    option(
        "--profile",
        type=ProfileSource(),
        metavar=ProfileSource.name,
        help="With --tiers: prefill and load times of the server, to compare cached prefixes in seconds: auto, "
        "measured at the first start; none; or a file from `ragorder profile --loads`.",
        unset="auto",
    ),
    option(
        "--topic-header",
        metavar="NAME",
        help="Also send the topic of a request's documents in this header, for a router that chooses among replicas.",
        unset="no topic is sent",
    ),
    secret_option(),
    server_options("max_in_flight", "max_waiting", "read_timeout_s", "tries_timeout_s"),
)
@section(
    "Documents and prompts",
    template_option(),
    prompt_options(),
    option(
        "--stable-tools",
        is_flag=True,
        help="Send the tools of each request in the order of their names, with and without documents: tools come first "
        "in a prompt, so another order of the same tools ends every cached prefix. The new order can change which "
        "tool a model chooses.",
    ),
    option(
        "--marks/--no-marks",
        default=None,
        help="The server resumes its cache only at cache breakpoints (Anthropic's API, OpenAI's from GPT-5.6 on): set "
        "them where they are expected to pay by the rules of the request's model, unless the client sets any. Writing "
        "to such a cache costs more than not using it, so some requests get none. Documents of a request whose client "
        "sets breakpoints keep their order, unless the size of the cache is known or --no-marks says that the cache "
        "finds any common prefix.",
        unset="if the server is api.anthropic.com, api.openai.com or api.deepseek.com",
    ),
    option(
        "--marks-ttl",
        type=Choice(["5m", "1h", "30m"]),
        help="With --marks: lifetime (TTL) of the cache breakpoints, for models that have this one.",
        unset="the provider's shortest",
    ),
)
@section(
    "Order",
    options_from(
        Settings,
        "capacity_tokens",
        "block_size",
        "keep_first",
        "keep_last",
        "max_displacement",
        "max_gain_lost",
        "moves",
        "best",
        capacity_tokens={"unset": "the server's /metrics"},
        block_size={"unset": "the server's /metrics"},
    ),
    option(
        "--shared-orders",
        metavar="URL",
        envvar="RAGORDER_SHARED_ORDERS",
        show_envvar=True,
        help="Share orders with other proxies of the same server through a Valkey or Redis server, such as "
        "redis://127.0.0.1:6379/0.",
        unset="not shared",
    ),
    option(
        "--shadow",
        is_flag=True,
        help="Serve documents in retrieval order, and compute what ragorder's order would save. Without --template, "
        "also learn how the application joins documents into its prompts, and suggest a template: see `ragorder "
        "template --from`.",
    ),
)
@client_options("body_limit", "bodies_limit", "client_timeout_s", "max_connections")
@process_options("workers")
@click.pass_context
def serve(
    context: click.Context,
    /,
    upstream: tuple[str, ...],
    data_parallel_ranks: int | None,
    upstream_api_key: str | None,
    tokenizer: str | None,
    tiers: bool,
    profile: Path | str | None,
    topic_header: str | None,
    topic_secret: str | None,
    template: str | None,
    number_by_place: bool,
    dedup: str | None,
    stable_tools: bool,
    marks: bool | None,
    marks_ttl: str | None,
    document_template: str | None,
    question_template: str | None,
    shared_orders: str | None,
    shadow: bool,
    **options: Any,
) -> None:
    """Run a proxy that orders documents for a server with OpenAI's or Anthropic's API.

    Documents are tagged in the body of a request to /v1/chat/completions, /v1/completions, /v1/responses or
    /v1/messages, {"ragorder": {"documents": [{"id", "text", "title", "tokens"}, …], "query", "scope"}}, best document
    first, which a client sends as "extra_body"; or --template finds them in a message. All other requests, and all
    answers, are forwarded byte for byte. Cached tokens are read from an answer's usage, which a stream has only if its
    client requests it ("stream_options": {"include_usage": true}).

    GET /ragorder/openapi.json gives the schema; GET /ragorder/health is for probes, and GET /ragorder/ready checks the
    server as well. The saving is shown at /ragorder (a page), /ragorder/stats (JSON, see `ragorder stats`) and
    /metrics.

    Every option may also come from the environment, as RAGORDER_SERVE_ and its name (RAGORDER_SERVE_READ_TIMEOUT=60s)
    unless it names another variable below, or from a file (--config). The command line comes first, then the
    environment. Settings of the order that are no options come from the environment alone (RAGORDER_MIN_GAIN=8).
    """
    server = ProxyServer(context, options)
    limits = server.settings
    has_replicas = len(upstream) > 1 or data_parallel_ranks is not None
    if limits.tries_timeout_s is not None and not has_replicas:
        raise click.UsageError("--tries-timeout requires several replicas: --upstream twice, or --data-parallel-ranks")
    if shared_orders is not None and (has_replicas or shadow):
        raise click.UsageError("--shared-orders is for several proxies of one server with one cache: leave it out")
    if limits.max_waiting is not None and limits.max_in_flight is None:
        raise click.UsageError("--max-waiting requires --max-in-flight")
    if limits.workers > 1:
        _check_workers(limits.max_in_flight, has_replicas=has_replicas, are_shared=shared_orders is not None)
    if profile is not None and not tiers:
        raise click.UsageError("--profile requires --tiers")
    if topic_header is None and is_given(context, "topic_secret"):
        raise click.UsageError("--topic-secret requires --topic-header")
    topics = None if topic_header is None else topics_of(topic_header, topic_secret)
    if isinstance(profile, Path):
        options["profile"] = with_loads(profile)
        if options["profile"] is None:
            raise click.UsageError(
                f"--profile: {profile} has no load times: measure them with `ragorder profile --loads`. A profile by "
                "which a server evicts is an option of `ragorder tiers config`"
            )
    settings = build_orderer(options).settings
    documents = documents_of(
        template,
        number_by_place,
        dedup,
        document_template=document_template,
        question_template=question_template,
    )
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    provider: Provider | None = next(filter(None, map(_cloud_of, upstream)), None)
    finds_any_prefix = marks is False and provider is None
    marks = provider is not None if marks is None else marks
    if marks_ttl is not None and not marks:
        raise click.UsageError("--marks-ttl requires --marks")
    if marks and limits.workers > 1:
        raise click.UsageError("--workers: a process knows only its own breakpoints at a cloud: leave --workers out")
    asked = settings
    if marks:
        # Such a cache holds only marked prefixes: fewer cached tokens than expected say nothing about its size.
        settings = settings.model_copy(update={"feedback": False})

    # An address that is not available is an error before a server is asked.
    with server.listening() as sockets:
        servers = _servers_of(
            upstream,
            upstream_api_key,
            settings,
            loaded,
            ranks=data_parallel_ranks,
            tiers=tiers,
            measures=profile in (None, "auto"),
            is_known=marks or provider is not None,
        )
        # A server that says the size of its cache, or whose size is given, finds any common prefix.
        finds_any_prefix = finds_any_prefix or (
            provider is None and not marks and {"capacity_tokens", "block_size"} <= servers[0].settings.model_fields_set
        )

        def make(metrics: Metrics) -> ASGIApp:
            from ragorder.adapters.observing.observed import ObservedOrderer
            from ragorder.adapters.proxy import AdmissionQueue

            def observed(settings: Settings, by: Orderer | None = None) -> ObservedOrderer:
                return ObservedOrderer(by or Orderer(settings, **given({"topics": topics})), [metrics], shadow=shadow)

            admission = None
            if limits.max_in_flight is not None:
                waiting = given({"max_waiting": limits.max_waiting})
                admission = AdmissionQueue(limits.max_in_flight, registry=metrics.registry, **waiting)
            clouds = None
            if marks:
                watched = partial(ObservedOrderer, watchers=[metrics], shadow=shadow)
                clouds = _clouds_of(provider, marks_ttl, asked, watched)
            backend = servers[0]
            shared: SharedOrderer | None = None
            orderer: OrdererLike
            if has_replicas:
                orderer, backend = _fleet_of(servers, data_parallel_ranks, observed, metrics.registry)
            else:
                if shared_orders is not None:
                    shared = _sharing(shared_orders, backend.settings, topics)
                orderer = observed(backend.settings, shared)
            return server.app(
                metrics,
                orderer,
                backend,
                documents,
                admission=admission,
                marks=marks or (False if finds_any_prefix else None),
                clouds=clouds,
                topic_header=topic_header,
                stable_tools=stable_tools,
                learns=shadow and template is None,
                on_sent=None if shared is None else shared.share,
            )

        cloud = "by the rules of each request's model; of unknown models " if marks else ""
        announce_cache(servers[0], settings, cloud=cloud)
        mode = "shadow: documents stay in retrieval order" if shadow else "documents are ordered for the cache"
        set_too = "; cache_control and its like are set where the client sets none" if marks else ""
        server.run(make, sockets, f"Mode: {mode}{set_too}")


def _check_workers(max_in_flight: int | None, *, has_replicas: bool, are_shared: bool) -> None:
    if has_replicas:
        raise click.UsageError(
            "--workers: each worker would know the load of its own requests alone: give one --upstream, or put "
            "`ragorder route` with workers before a router"
        )
    if max_in_flight is not None:
        raise click.UsageError("--max-in-flight is a limit of one queue, and --workers have no common one: drop one")
    if not are_shared:
        raise click.UsageError(
            "--workers: workers that do not share orders lose cache hits (a third with 4): give --shared-orders "
            "redis://HOST:6379/0, or use `ragorder route` before a proxy beside each engine"
        )


def _cloud_of(upstream: str) -> Provider | None:
    try:
        return _CLOUDS.get(urlsplit(upstream).hostname or "")
    except ValueError:
        return None


def _clouds_of(
    provider: Provider | None, ttl: str | None, settings: Settings, wrap: Callable[[Orderer], OrdererLike]
) -> CloudOrderers:
    from ragorder.adapters.cloud_orderers import CloudOrderers
    from ragorder.clouds.tables import PROVIDERS

    if ttl is not None and provider is not None and ttl not in PROVIDERS[provider].ttls:
        known = " or ".join(PROVIDERS[provider].ttls)
        raise click.UsageError(f"--marks-ttl: {provider} has no TTL {ttl!r}: use {known}")
    # A cloud's cache is limited by time, not by size.
    settings = settings.model_copy(update={"capacity_tokens": None})
    try:
        return CloudOrderers(provider, ttl=ttl, settings=settings, wrap=wrap)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--marks: {error}") from None


def _sharing(url: str, settings: Settings, topics: Topics | None) -> SharedOrderer:
    try:
        from ragorder.adapters.shared_orders import SharedOrderer

        return SharedOrderer(url, settings, at_once=False, topics=topics)
    except ImportError as error:
        raise click.ClickException(f"--shared-orders needs {error.name}: {install_hint('proxy')}") from None
    except ValueError:
        # The error itself may quote a password of the URL.
        raise click.UsageError("--shared-orders: not a URL such as redis://127.0.0.1:6379/0") from None


def _servers_of(
    upstreams: Sequence[str],
    api_key: str | None,
    settings: Settings,
    tokenizer: Any,
    *,
    ranks: int | None,
    tiers: bool,
    measures: bool,
    is_known: bool,
) -> list[Backend]:
    """Return the servers with `settings` completed from their metrics, or unchanged if `is_known` (a cloud)."""
    from ragorder.adapters.http_client import AddressError

    def server_of(upstream: str) -> Backend:
        how = {"upstream": upstream, "upstream_api_key": api_key, "send_facts": tiers}
        if is_known:
            return Backend(settings, tokenizer, how, _ASSUMED)
        known = settings
        if tiers and measures:
            known = known.model_copy(update={"profile": known.profile or _profile_server(upstream, api_key)})
        # After the profile: tiers publish their sizes with an engine's first request.
        known, source = _settings_of_server(known, upstream, api_key, ranks)
        return Backend(known, tokenizer, how, source)

    try:
        return [server_of(each) for each in upstreams]
    except AddressError as error:
        raise click.UsageError(f"--upstream: {error}") from None


def _fleet_of(
    servers: Sequence[Backend],
    ranks: int | None,
    observed: Callable[[Settings], OrdererLike],
    registry: CollectorRegistry,
) -> tuple[OrdererLike, Backend]:
    """Return the first replica's orderer, and a backend of all replicas."""
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
    """Complete the settings from the server's metrics; return the origin of the sizes, too. Raises AddressError."""
    from ragorder.adapters.http_client import AddressError, ServerError
    from ragorder.adapters.vllm.cache_config import read_cache_config

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


def _profile_server(upstream: str, api_key: str | None) -> Path | None:
    """Return the profile's file; None without load times, or if the server awaits none. Raises AddressError."""
    from ragorder.adapters.http_client import AddressError, ServerError
    from ragorder.adapters.vllm.server_profile import profile_server
    from ragorder.kernels.profile_cache import ProfileCache

    cache = ProfileCache()
    try:
        with log_shown("ragorder.profile", "Profile"):
            profile = profile_server(upstream, api_key=api_key, cache=cache)
    except AddressError:
        raise
    except ServerError as error:
        warn(f"the server's prefill times are not measured, so every token counts the same there ({error})")
        return None
    return cache.file_of(profile) if profile is not None and profile.loads else None
