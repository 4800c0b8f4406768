"""The command `ragorder serve`: a proxy in front of an OpenAI-compatible server, or of an engine in this process."""

from __future__ import annotations

import logging
import re
import socket
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import Any

import click

from ragorder.cli.options import Command, build, given
from ragorder.cli.output import log_shown
from ragorder.cli.serve_engine import ENGINE_OPTIONS, Backend, check_engine, embedded
from ragorder.cli.serve_options import ServeLimits, check_keys, serve_options
from ragorder.orderer import Orderer
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings

__all__ = ["serve"]

_ASSUMED = "assumed"


@click.command(cls=Command)
@serve_options
@click.pass_context
def serve(
    context: click.Context,
    /,
    upstream: str | None,
    engine: str | None,
    host: str,
    api_key: str | None,
    upstream_api_key: str | None,
    template: str | None,
    number_by_place: bool,
    document_template: str | None,
    question_template: str | None,
    tokenizer: str | None,
    shadow: bool,
    tiers: bool,
    allow_host: tuple[str, ...],
    **options: Any,
) -> None:
    """Order documents in front of an OpenAI-compatible server.

    Documents are tagged in the body of a request to /v1/chat/completions or /v1/completions, {"ragorder": {"documents":
    [{"id", "text", "title", "tokens"}, …], "query", "scope"}}, best document first, which an OpenAI client sends as
    extra_body; or they are found in a message by --template. All other requests, and all answers, are forwarded byte
    by byte. Cached tokens are read from the usage in an answer, which a stream has only if its client requests it
    (stream_options.include_usage). GET /ragorder/openapi.json gives the schema; GET /ragorder/health is for probes, and
    GET /ragorder/ready checks the server as well. The saving is shown at /ragorder (a page), /ragorder/stats (JSON, see
    `ragorder stats`) and /metrics.

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
    metrics = Metrics()
    admission = None
    if limits.max_in_flight is not None:
        admission = AdmissionQueue(limits.max_in_flight, registry=metrics.registry, **queue)
    with ExitStack() as until_served:
        # An address that is not available is an error before a model is loaded.
        listening = until_served.enter_context(_listen(host, limits.port))
        try:
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
                if tiers and engine_settings["profile"] in (None, "auto"):
                    measured = _profile_server(str(upstream), upstream_api_key, engine_settings["profile_budget_s"])
                    settings = settings.model_copy(update={"profile": settings.profile or measured})
                # After that: tiers publish their sizes with an engine's first request.
                known, source = _settings_of_server(settings, str(upstream), upstream_api_key)
                how = {"upstream": upstream, "upstream_api_key": upstream_api_key, "send_facts": tiers}
                backend = Backend(known, loaded, how, source)
            app = make_app(
                ObservedOrderer(Orderer(backend.settings), [metrics], shadow=shadow),
                builder=_builder(backend.tokenizer, **templates),
                tokenizer=backend.tokenizer,
                template=found,
                number_by_place=number_by_place,
                on_passed=metrics.passed,
                on_tbt=metrics.token_times,
                api_key=api_key,
                hosts=THIS_MACHINE.union(allow_host, [host]) if is_loopback(host) or allow_host else None,
                body_limit=limits.body_limit,
                bodies_limit=limits.bodies_limit,
                timeouts=Timeouts(limits.connect_timeout_s, limits.read_timeout_s, limits.client_timeout_s),
                admission=admission,
                routes=stats_routes(metrics, admission),
                **backend.options,
            )
        except AddressError as error:
            raise click.UsageError(f"--upstream: {error}") from None
        if api_key is None and not is_loopback(host):
            _warn(f"every client that reaches {host} can use the server: give --api-key")
        _announce(address_of(listening), backend.settings, settings, backend.source, shadow=shadow)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        run_server(
            backend.wrap(app),
            listening,
            grace_s=ceil(limits.grace_s),
            client_s=limits.client_timeout_s,
            connections=limits.max_connections,
            probes=PROBES,
            on_started=lambda url: click.echo(f"Serving on {url}/v1", err=True),
        )


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


def _settings_of_server(settings: Settings, upstream: str, api_key: str | None) -> tuple[Settings, str]:
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
        _warn(f"the size of the server's cache is unknown: give {options} ({error})")
        return settings, _ASSUMED
    if cache.prefix_caching is False:
        _warn("the server's prefix cache is off: start it with --enable-prefix-caching")
    if cache.engines > 1:
        _warn(f"the server has {cache.engines} engines, each with its own cache: route each tenant to one of them")
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
        _warn(f"the server's prefill times are not measured, every token counts the same there ({error})")
        return None
    return cache.file_of(profile) if profile is not None and profile.loads else None


def _announce(url: str, settings: Settings, asked: Settings, source: str, *, shadow: bool) -> None:

    def origin(name: str) -> str:
        return "given" if name in asked.model_fields_set else source

    capacity = settings.held_tokens
    tokens = "unlimited tokens" if capacity is None else f"{capacity:,} tokens"
    blocks = f"blocks of {settings.block_size} ({origin('block_size')})"
    click.echo(f"Cache: {tokens} ({origin('capacity_tokens')}), {blocks}", err=True)
    if settings.profile is not None and (settings.host_tokens or settings.disk_tokens):
        click.echo(f"Tiers: cached prefixes are compared in seconds, by {settings.profile}", err=True)
    mode = "shadow: documents stay in retrieval order" if shadow else "documents are ordered for the cache"
    click.echo(f"Mode: {mode}", err=True)
    click.echo(f"Page: {url}/ragorder", err=True)


def _warn(message: str) -> None:
    click.echo(f"Warning: {message}", err=True)
