"""The command `ragorder route`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.documents import documents_of, template_option
from ragorder.cli.options import Command, build_orderer, option, section, with_environment
from ragorder.cli.proxy import (
    ROUTED,
    Backend,
    ProxyServer,
    client_options,
    process_options,
    secret_option,
    server_options,
    topics_of,
    upstream_key_option,
)
from ragorder.orderer import Orderer

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ragorder.adapters.observing.prometheus import Metrics


@with_environment("RAGORDER_ROUTE")
@click.command(
    cls=Command,
    examples=[
        'ragorder route --upstream http://router:8080 --topic-secret "$SECRET"',
        'ragorder route --upstream http://router:8080 --topic-secret "$SECRET" \\\n  --workers 4',
    ],
)
@section(
    "Router",
    option("--upstream", metavar="URL", required=True, help="The router, which knows the replicas."),
    upstream_key_option(),
    option(
        "--topic-header",
        metavar="NAME",
        default=ROUTED,
        show_default=True,
        help="The header by which the router chooses a replica.",
    ),
    secret_option(),
    template_option(),
    server_options("read_timeout_s"),
)
@client_options("body_limit", "bodies_limit", "client_timeout_s", "max_connections")
@process_options("workers")
@click.pass_context
def route(
    context: click.Context,
    /,
    upstream: str,
    upstream_api_key: str | None,
    topic_header: str,
    topic_secret: str | None,
    template: str | None,
    **options: Any,
) -> None:
    """Run a proxy that sends the topic of a request's documents to a router.

    The router at --upstream sends requests of one topic to one replica, where a `ragorder serve` beside the engine
    orders the documents. Bodies are forwarded unchanged; documents are found in them as by `ragorder serve`. Any number
    of processes with the same secret agree on the topics.

    Options may also come from the environment (RAGORDER_ROUTE_PORT=8200) or a file (--config), as for `ragorder serve`.
    """
    server = ProxyServer(context, options)
    documents = documents_of(template)
    topics = topics_of(topic_header, topic_secret)
    settings = build_orderer(options).settings
    backend = Backend(settings, None, {"upstream": upstream, "upstream_api_key": upstream_api_key}, "assumed")

    def make(metrics: Metrics) -> ASGIApp:
        from ragorder.adapters.observing.observed import ObservedOrderer

        orderer = ObservedOrderer(Orderer(settings, topics=topics), [metrics])
        return server.app(metrics, orderer, backend, documents, topic_header=topic_header, route=True)

    with server.listening() as sockets:
        header = f"Topics: in the header {topic_header}"
        server.run(make, sockets, header, "Mode: requests get their topic, documents stay in retrieval order")
