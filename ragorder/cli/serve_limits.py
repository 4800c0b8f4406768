"""Port, limits and times of `ragorder serve`."""

from __future__ import annotations

import click
from pydantic import BaseModel, ConfigDict, Field

from ragorder.cli.options import is_given

__all__ = ["ServeLimits", "check_connections"]


class ServeLimits(BaseModel):
    """Port, limits and times of the proxy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    port: int = Field(default=8100, ge=0, le=65535, description="Port to listen on; 0: a free one.")
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="Send at most N requests at a time to the server; the waiting request with the largest "
        "cached share is next.",
        json_schema_extra={"unset": "all at once"},
    )
    reorder_window: int | None = Field(
        default=None,
        ge=0,
        description="With --max-in-flight: no request is overtaken by more than N later ones.",
        json_schema_extra={"unset": "32"},
    )
    max_waiting: int | None = Field(
        default=None,
        ge=0,
        description="With --max-in-flight or --engine torch: the number of requests that may wait; the next "
        "one is answered with 503.",
        json_schema_extra={"unset": "1000"},
    )
    connect_timeout_s: float = Field(
        default=10.0, gt=0, description="Maximum time until the server accepts a connection."
    )
    read_timeout_s: float = Field(
        default=600.0, gt=0, description="Maximum time from one byte of an answer to the next."
    )
    tries_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="With several replicas: longest time until an answer has begun, on all replicas together "
        "that a request is tried on.",
        json_schema_extra={"unset": "10m, or --read-timeout if that is longer"},
    )
    client_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Maximum time for a client to send its headers, to send 256 KiB of a body, and to read a piece of "
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


def check_connections(context: click.Context, wanted: int) -> int:
    """`wanted`, or as many as the system's limit of open files allows. Raise click.UsageError where --max-connections
    asks for more."""
    from ragorder.adapters.http_server.server import most_connections

    allowed = most_connections()
    if wanted <= allowed:
        return wanted
    says = f"the system's limit of open files allows {allowed:,} connections, not {wanted:,}"
    if is_given(context, "max_connections"):
        raise click.UsageError(f"--max-connections: {says}: raise it (ulimit -Hn), or give at most {allowed}")
    click.echo(f"Warning: {says}", err=True)
    return allowed
