"""Processes, log and TLS of `ragorder serve`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from pydantic import BaseModel, ConfigDict, Field

from ragorder.cli.options import options_from

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ragorder.adapters.http_server.certificate import Certificate
    from ragorder.adapters.observing.prometheus import Metrics

__all__ = ["Running", "certificate_of", "check_workers", "listening_on", "log_to", "run", "running_options"]


class Running(BaseModel):
    """How the proxy runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(
        default=1,
        ge=1,
        description="Processes that serve on the port, each with limits of its own. More than one require --route or "
        "--shared-orders: workers that do not share their orders lose cache hits.",
    )
    log_level: Literal["error", "warning", "info"] = Field(
        default="warning", description="Lowest level that is logged."
    )
    access_log: bool = Field(
        default=False,
        description="Log a line for each answer: method, path, status and seconds, nothing of a prompt.",
    )
    ssl_certfile: Path | None = Field(
        default=None, description="Serve HTTPS with this certificate, followed by those of its authorities (PEM)."
    )
    ssl_keyfile: Path | None = Field(
        default=None,
        description="Its key, which is not encrypted (PEM).",
        json_schema_extra={"unset": "in --ssl-certfile"},
    )


_FILE: Mapping[str, Any] = {"type": click.Path(path_type=Path, dir_okay=False, exists=True), "metavar": "FILE"}
running_options = options_from(
    Running, *Running.model_fields, access_log={"is_flag": True}, ssl_certfile=_FILE, ssl_keyfile=_FILE
)


def check_workers(context: click.Context, workers: int, *, in_process: bool, has_replicas: bool) -> None:
    """Raise click.UsageError for what several processes would do less well than one, or not at all."""
    if workers == 1:
        return
    params = context.params
    if in_process:
        raise click.UsageError("--workers: the embedded engine is one, in this process: leave --workers out")
    if sys.platform != "linux":
        raise click.UsageError("--workers requires Linux, which spreads connections among processes on one port")
    if has_replicas:
        raise click.UsageError(
            "--workers: each would know the load and the draining of its own requests alone: give one --upstream, or "
            "put --route with workers before a router"
        )
    if params["max_in_flight"] is not None:
        raise click.UsageError("--max-in-flight is of one queue, and --workers have none in common: leave one out")
    if not params["route"] and params["shared_orders"] is None:
        raise click.UsageError(
            "--workers: workers that do not share their orders lose cache hits (4 of them a third): give "
            "--shared-orders redis://HOST:6379/0, or --route where a proxy beside each engine orders"
        )


def certificate_of(running: Running) -> Certificate | None:
    """Raises click.UsageError if it cannot be used."""
    from ragorder.adapters.http_server.certificate import Certificate

    if running.ssl_certfile is None:
        if running.ssl_keyfile is not None:
            raise click.UsageError("--ssl-keyfile requires --ssl-certfile")
        return None
    certificate = Certificate(running.ssl_certfile, running.ssl_keyfile)
    try:
        certificate.context()
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--ssl-certfile, --ssl-keyfile: {error}") from None
    return certificate


@contextmanager
def listening_on(host: str, port: int, workers: int) -> Iterator[list[socket.socket]]:
    """A socket for each worker. Raises click.ClickException."""
    from ragorder.adapters.http_server.processes import listen_together
    from ragorder.adapters.http_server.server import listen

    try:
        sockets = [listen(host, port)] if workers == 1 else listen_together(host, port, workers)
    except OSError as error:
        raise click.ClickException(f"{host} port {port}: {error.strerror}: give another --host or --port") from None
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def log_to(running: Running) -> None:
    """Standard error. Other packages' debugging would show headers, and so keys."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("ragorder").setLevel(running.log_level.upper())
    if running.access_log:
        logging.getLogger("ragorder.access").setLevel(logging.INFO)


def run(
    make: Callable[[Metrics], ASGIApp],
    sockets: list[socket.socket],
    metrics: Metrics | None,
    *,
    on_started: Callable[[], None],
    **options: Any,
) -> None:
    """Serve until stopped, in this process with its `metrics`, or in one for each socket. Raises click.ClickException
    if the workers cannot."""
    from ragorder.adapters.http_server.server import run_server

    if metrics is not None:
        run_server(make(metrics), sockets[0], on_started=on_started, **options)
        return

    from ragorder.adapters.http_server.processes import Supervisor, WorkerError
    from ragorder.adapters.observing.shared_metrics import SharedMetrics, forget_process, shared_metrics

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
