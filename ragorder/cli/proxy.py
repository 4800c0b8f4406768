"""The proxy of `serve`, `engine` and `route`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from pydantic import BaseModel, ConfigDict, Field

from ragorder.cli.options import Decorator, build, config_option, is_given, option, options_from, section, spelling
from ragorder.cli.values import Size
from ragorder.common.extras import install_hint
from ragorder.settings import Settings
from ragorder.topic import SECRET_VARIABLE, Topics, checked_header

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp

    from ragorder.adapters.http_server.server import Certificate
    from ragorder.adapters.observing.prometheus import Metrics
    from ragorder.adapters.proxy import AdmissionQueue
    from ragorder.cli.documents import Documents
    from ragorder.protocols import OrdererLike

ROUTED = "x-session-id"
_KEYS = ("api_key", "upstream_api_key", "topic_secret")
_MEBIBYTES = {"type": Size(1, unit=1 << 20), "metavar": "SIZE"}
_FILE: Mapping[str, Any] = {"type": click.Path(path_type=Path, dir_okay=False, exists=True), "metavar": "FILE"}


class ServerSettings(BaseModel):
    """Limits, log, certificate and processes of the proxy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    port: int = Field(default=8100, ge=0, le=65535, description="Port to listen on; 0: a free one.")
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="Send at most N requests at a time to the server. The waiting request with the largest cached "
        "share is sent next; at most 32 later requests may overtake one.",
        json_schema_extra={"unset": "all at once"},
    )
    max_waiting: int | None = Field(
        default=None,
        ge=0,
        description="Requests that may wait to be sent; the next one is answered with 503.",
        json_schema_extra={"unset": "1000"},
    )
    read_timeout_s: float = Field(
        default=600.0, gt=0, description="Maximum time from one byte of an answer to the next."
    )
    tries_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="With several replicas: maximum time until an answer begins, over all replicas that a request is "
        "tried on.",
        json_schema_extra={"unset": "10m, or --read-timeout if that is longer"},
    )
    client_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Maximum time for a client to send its headers, to send 256 KiB of a body, and to read a part of "
        "the answer.",
    )
    body_limit: int = Field(
        default=32 << 20, ge=1, description="Maximum size of a request's body; a plain number is in MiB."
    )
    bodies_limit: int = Field(
        default=256 << 20,
        ge=1,
        description="Memory for the bodies of all requests together; a request that exceeds it is answered with 503.",
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        description="Maximum number of client connections at a time; a new one replaces an idle one.",
    )
    grace_s: float = Field(
        default=30.0,
        ge=0,
        description="Time for requests in flight to end when the proxy is stopped (SIGTERM, SIGHUP, SIGINT).",
    )
    workers: int = Field(
        default=1, ge=1, description="Processes that serve on the port, each with its own limits (Linux)."
    )
    log_level: Literal["error", "warning", "info"] = Field(
        default="warning", description="Lowest level that is logged."
    )
    access_log: bool = Field(
        default=False,
        description="Log a line for each answer: method, path, status and seconds, and nothing of a prompt.",
    )
    ssl_certfile: Path | None = Field(
        default=None,
        description="Serve HTTPS with this certificate, followed by those of its authorities (PEM).",
        json_schema_extra={"unset": "HTTP"},
    )
    ssl_keyfile: Path | None = Field(
        default=None,
        description="The certificate's key, not encrypted (PEM).",
        json_schema_extra={"unset": "in --ssl-certfile"},
    )


def server_options(*names: str) -> Decorator:
    known: dict[str, Mapping[str, Any]] = {"body_limit": _MEBIBYTES, "bodies_limit": _MEBIBYTES}
    known |= {"access_log": {"is_flag": True}, "ssl_certfile": _FILE, "ssl_keyfile": _FILE}
    return options_from(ServerSettings, *names, **{name: known[name] for name in names if name in known})


def client_options(*limits: str) -> Decorator:
    return section(
        "Clients",
        option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on."),
        server_options("port"),
        option(
            "--api-key",
            metavar="KEY",
            envvar="RAGORDER_PROXY_API_KEY",
            show_envvar=True,
            help="Require this key from clients. Other users of this machine can see it unless it comes from the "
            "environment.",
        ),
        option(
            "--allow-host",
            metavar="NAME",
            multiple=True,
            help="Without --api-key: another host name that clients may use for the proxy, and whose web pages may "
            "call it. Repeatable.",
            unset="on a loopback --host this machine's names only, otherwise all",
        ),
        server_options(*limits, "grace_s"),
    )


def process_options(*names: str) -> Decorator:
    return section(
        "Process", server_options(*names, "log_level", "access_log", "ssl_certfile", "ssl_keyfile"), config_option()
    )


def upstream_key_option() -> Decorator:
    return option(
        "--upstream-api-key",
        metavar="KEY",
        envvar="RAGORDER_UPSTREAM_API_KEY",
        show_envvar=True,
        help="Send this key to the server.",
        unset="the client's own, if this proxy requires none",
    )


def secret_option() -> Decorator:
    return option(
        "--topic-secret",
        metavar="TEXT",
        envvar=SECRET_VARIABLE,
        show_envvar=True,
        help="The secret of topics: processes with the same secret have the same topics.",
        unset="one of this process alone",
    )


def check_packages() -> None:
    try:
        import ragorder.adapters.http_server.server
        import ragorder.adapters.observing.prometheus
        import ragorder.adapters.proxy  # noqa: F401
    except ImportError as error:
        raise click.ClickException(f"serving needs {error.name}: {install_hint('proxy')}") from None


def topics_of(header: str, secret: str | None) -> Topics:
    try:
        checked_header(header)
    except ValueError as error:
        raise click.UsageError(f"--topic-header: {error}") from None
    if secret is None:
        warn("topics are of this process alone: give all processes that should agree the same --topic-secret")
    return Topics(secret)


def with_loads(profile: Path) -> Path | None:
    from ragorder.trie.profile import PrefillProfile

    try:
        return profile if PrefillProfile.from_file(profile).loads else None
    except ValueError as error:
        raise click.UsageError(f"--profile: {error}") from None


def warn(message: str) -> None:
    click.echo(f"Warning: {message}", err=True)


@dataclass(frozen=True, slots=True)
class Backend:
    """The server or engine that the proxy forwards to.

    `options`: those of `make_app` that lead to it. `source`: the origin of its sizes. `wrap` adds what the application
    needs for it.
    """

    settings: Settings
    tokenizer: Any
    options: Mapping[str, Any]
    source: str
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app


def announce_cache(server: Backend, asked: Settings, *, cloud: str = "") -> None:
    settings = server.settings

    def origin(name: str) -> str:
        return "given" if name in asked.model_fields_set else server.source

    capacity = settings.held_tokens
    tokens = "unlimited tokens" if capacity is None else f"{capacity:,} tokens"
    blocks = f"blocks of {settings.block_size} ({origin('block_size')})"
    click.echo(f"Cache: {cloud}{tokens} ({origin('capacity_tokens')}), {blocks}", err=True)
    if server.tokenizer is None:
        click.echo("Lengths: estimated at four characters a token (--tokenizer MODEL counts them)", err=True)
    if settings.profile is not None and (settings.host_tokens or settings.disk_tokens):
        click.echo(f"Tiers: cached prefixes are compared in seconds, by {settings.profile}", err=True)


class ProxyServer:
    """The proxy's sockets, access control, certificate and processes. It removes its values from `options`."""

    def __init__(self, context: click.Context, options: dict[str, Any]) -> None:
        named = {name: options.pop(name) for name in ServerSettings.model_fields if name in options}
        self.settings = build(ServerSettings, named)
        self.host: str = options.pop("host")
        self.api_key: str | None = options.pop("api_key")
        allowed: Sequence[str] = options.pop("allow_host")
        check_packages()
        from ragorder.adapters.http_server.server import is_loopback
        from ragorder.adapters.observing.prometheus import Metrics
        from ragorder.adapters.proxy.access import THIS_MACHINE

        _check_keys(context)
        self._certificate = _certificate_of(self.settings)
        if allowed and self.api_key is not None:
            raise click.UsageError(
                "--allow-host cannot be combined with --api-key: requests with the key are accepted for any host"
            )
        self._is_open = self.api_key is None and not is_loopback(self.host)
        is_bounded = is_loopback(self.host) or bool(allowed)
        self.hosts = THIS_MACHINE.union(allowed, [self.host]) if is_bounded else None
        self._connections = _connections(context, self.settings.max_connections)
        self.metrics = Metrics() if self.settings.workers == 1 else None
        if self.metrics is None and sys.platform != "linux":
            raise click.UsageError("--workers requires Linux, which spreads connections among processes on one port")

    @contextmanager
    def listening(self) -> Iterator[list[socket.socket]]:
        from ragorder.adapters.http_server.processes import listen_together
        from ragorder.adapters.http_server.server import listen

        host, port, workers = self.host, self.settings.port, self.settings.workers
        try:
            sockets = [listen(host, port)] if workers == 1 else listen_together(host, port, workers)
        except OSError as error:
            raise click.ClickException(f"{host} port {port}: {error.strerror}: give another --host or --port") from None
        try:
            yield sockets
        finally:
            for each in sockets:
                each.close()

    def app(
        self,
        metrics: Metrics,
        orderer: OrdererLike,
        backend: Backend,
        documents: Documents,
        *,
        admission: AdmissionQueue | None = None,
        learns: bool = False,
        routes: Sequence[BaseRoute] = (),
        **options: Any,
    ) -> ASGIApp:
        """`learns` a template from prompts without documents; `routes` replace the proxy's own."""
        from ragorder.adapters.http_client import AddressError
        from ragorder.adapters.http_server.server import AccessLog
        from ragorder.adapters.learning.shadow import ShadowLearner
        from ragorder.adapters.proxy import Timeouts, make_app
        from ragorder.adapters.proxy.pages import StatsPages

        settings = self.settings
        metrics.read_process()
        learner = ShadowLearner.of(metrics, orderer) if learns else None
        pages = StatsPages(metrics, admission, learned=None if learner is None else learner.file)
        try:
            app = make_app(
                orderer,
                builder=documents.builder(backend.tokenizer),
                tokenizer=backend.tokenizer,
                template=documents.templates,
                finds_native=documents.recognises,
                on_recognised=metrics.recognised if documents.recognises else None,
                learner=learner,
                number_by_place=documents.number_by_place,
                repeated=documents.repeated,
                on_passed=metrics.passed,
                on_tbt=metrics.token_times,
                api_key=self.api_key,
                hosts=self.hosts,
                body_limit=settings.body_limit,
                bodies_limit=settings.bodies_limit,
                timeouts=Timeouts(
                    read_s=settings.read_timeout_s, client_s=settings.client_timeout_s, tries_s=settings.tries_timeout_s
                ),
                admission=admission,
                routes=[*routes, *pages.routes],
                background=[pages.history.keep],
                **backend.options,
                **options,
            )
        except AddressError as error:
            raise click.UsageError(f"--upstream: {error}") from None
        app = backend.wrap(app)
        return AccessLog(app) if settings.access_log else app

    def run(self, make: Callable[[Metrics], ASGIApp], sockets: list[socket.socket], *said: str) -> None:
        from ragorder.adapters.http_server.server import address_of
        from ragorder.adapters.proxy.app import PROBES

        if self._is_open:
            warn(f"every client that reaches {self.host} can use the server: give --api-key")
        url = address_of(sockets[0], "http" if self._certificate is None else "https")
        for line in (*said, f"Page: {url}/ragorder"):
            click.echo(line, err=True)
        _log_to(self.settings)
        _run(
            make,
            sockets,
            self.metrics,
            grace_s=ceil(self.settings.grace_s),
            client_s=self.settings.client_timeout_s,
            connections=self._connections,
            probes=PROBES,
            certificate=self._certificate,
            on_started=lambda: click.echo(f"Serving on {url}/v1", err=True),
        )


def _check_keys(context: click.Context) -> None:
    """Raise click.UsageError for an empty key: a missing secret often arrives as an empty variable."""
    for param in context.command.params:
        if param.name not in _KEYS:
            continue
        name, value = spelling(param.name), context.params[param.name]
        if not is_given(context, param.name):
            name = str(param.envvar)
            value = os.environ.get(name)
        if value is not None and not value.strip():
            raise click.UsageError(f"{name}: the key is empty: give one, or leave the setting out")


def _certificate_of(settings: ServerSettings) -> Certificate | None:
    from ragorder.adapters.http_server.server import Certificate

    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise click.UsageError("--ssl-keyfile requires --ssl-certfile")
        return None
    certificate = Certificate(settings.ssl_certfile, settings.ssl_keyfile)
    try:
        certificate.context()
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--ssl-certfile, --ssl-keyfile: {error}") from None
    return certificate


def _connections(context: click.Context, wanted: int) -> int:
    from ragorder.adapters.http_server.server import most_connections

    allowed = most_connections()
    if wanted <= allowed:
        return wanted
    says = f"the system's limit of open files allows {allowed:,} connections, not {wanted:,}"
    if is_given(context, "max_connections"):
        raise click.UsageError(f"--max-connections: {says}: raise it (ulimit -Hn), or give at most {allowed}")
    warn(says)
    return allowed


def _log_to(settings: ServerSettings) -> None:
    """Log to standard error, and only warnings of other packages: their debugging would show keys."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("ragorder").setLevel(settings.log_level.upper())
    if settings.access_log:
        logging.getLogger("ragorder.access").setLevel(logging.INFO)


def _run(
    make: Callable[[Metrics], ASGIApp],
    sockets: list[socket.socket],
    metrics: Metrics | None,
    *,
    on_started: Callable[[], None],
    **options: Any,
) -> None:
    """Serve in this process with its `metrics`, or without them in one process for each socket."""
    from ragorder.adapters.http_server.server import run_server

    if metrics is not None:
        run_server(make(metrics), sockets[0], on_started=on_started, **options)
        return

    from ragorder.adapters.http_server.processes import Supervisor, WorkerError
    from ragorder.adapters.observing.prometheus import SharedMetrics, forget_process, shared_metrics

    def serve(listening: socket.socket, on_started: Callable[[], None], is_orphaned: Callable[[], bool]) -> None:
        metrics = SharedMetrics()
        try:
            app = make(metrics)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        metrics.copy()

        def on_tick(count: int) -> bool:
            if count % 10 == 0:
                metrics.copy()
            return is_orphaned()

        logging.getLogger("ragorder").info("worker %d serves", os.getpid())
        run_server(app, listening, on_started=on_started, on_tick=on_tick, **options)

    with shared_metrics():
        supervisor = Supervisor(sockets, serve, grace_s=options["grace_s"], on_ended=forget_process)
        try:
            supervisor.run(on_started=on_started)
        except WorkerError as error:
            raise click.ClickException(f"--workers: {error}") from None
