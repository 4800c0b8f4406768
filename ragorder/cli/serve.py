"""`ragorder serve`: the proxy in front of an OpenAI-compatible server, or of an engine in this process."""

from __future__ import annotations

import logging
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from ragorder.cli.complaint import complaint
from ragorder.cli.options import ParamType
from ragorder.cli.serve_engine import ENGINE_OPTIONS, Behind, check_engine, embedded, engine_options
from ragorder.cli.serve_limits import check_keys, limit_options
from ragorder.cli.serve_start import announce, settings_of_server, warn
from ragorder.orderer import Orderer
from ragorder.prompt import PromptBuilder
from ragorder.settings import Settings

__all__ = ["serve"]

_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


class _Text(ParamType[str]):
    """A text in which \\n, \\t and \\\\ are escapes, or what is in a file."""

    name = "TEXT|@FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value.startswith("@"):
            return re.sub(r"\\([nt\\])", lambda escape: _ESCAPES[escape[1]], value)
        try:
            return Path(value[1:]).read_text("utf-8")
        except OSError as error:
            self.fail(f"{value[1:]}: {error.strerror}", param, ctx)
        except UnicodeDecodeError:
            self.fail(f"{value[1:]}: it is not UTF-8", param, ctx)


@click.command()
@click.option("--upstream", metavar="URL", help="The OpenAI-compatible server behind, such as http://HOST:8000.")
@click.option(
    "--engine",
    type=click.Choice(["upstream", "torch"]),
    help="What answers: the server at --upstream, or --model in this process. [default: upstream if that is given]",
)
@engine_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8100,
    show_default=True,
    help="Port to listen on; 0: a free one.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="RAGORDER_PROXY_API_KEY",
    show_envvar=True,
    help="Ask clients for this key. Other users of this machine can see it unless it comes from the environment.",
)
@click.option(
    "--upstream-api-key",
    metavar="KEY",
    envvar="RAGORDER_UPSTREAM_API_KEY",
    show_envvar=True,
    help="Send this key upstream. [default: the client's own, if this proxy asks for none]",
)
@click.option(
    "--template",
    type=_Text(),
    help="How one document stands in a message that is not tagged, with {text} and, if wanted, {id} and {title}, such "
    "as '<document id=\"{id}\">\\n{text}\\n</document>': the first message with two or more in a row is ordered.",
)
@click.option(
    "--number-by-place",
    is_flag=True,
    help="Show as a document's {id} the number of its place in the prompt, from 1: for ids that are ranks, with which "
    "nothing is found in the cache. The answer's header x-ragorder-permutation says which document that is.",
)
@click.option(
    "--document-template",
    type=_Text(),
    help="How a tagged document is to stand in the prompt, with {id}, {text} and, if wanted, {title}. "
    r"[default: '[{id}]\n{text}\n\n']",
)
@click.option(
    "--question-template",
    type=_Text(),
    help="How the query is to stand in the prompt behind tagged documents. [default: 'Question: {query}']",
)
@click.option(
    "--tokenizer",
    metavar="FOLDER|NAME",
    help="The served model's tokenizer, by folder or name on the Hub, to count tokens. [default: they are estimated]",
)
@click.option(
    "--capacity-tokens",
    help="Tokens that the server's KV cache holds, or unlimited. [default: what its /metrics say; with --engine torch "
    "what device and host memory hold]",
)
@click.option(
    "--block-size",
    type=int,
    help="Tokens in one KV block of it. [default: what its /metrics say; with --engine torch 16]",
)
@click.option("--keep-first", type=int, help="So many top-ranked documents stay first.")
@click.option("--keep-last", type=int, help="So many top-ranked documents stand last, rank 1 next to the question.")
@click.option("--max-displacement", type=int, help="Positions by which a document may move from its rank.")
@click.option(
    "--shadow",
    is_flag=True,
    help="Serve documents in retrieval order; compute and score ragorder's order, to see what it would save.",
)
@click.option(
    "--tiers",
    is_flag=True,
    help="The server is a vLLM with ragorder tiers: tell it where documents end (with --tokenizer) and, by a digest, "
    "whose they are. Other servers may refuse that.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    metavar="N",
    help="Send N requests at a time to the server; of the others those go first of which its cache has most. "
    "[default: all at once]",
)
@click.option(
    "--reorder-window",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --max-in-flight: no request is overtaken by more than N later ones. [default: 32]",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --max-in-flight or --engine torch: so many requests may wait, the next one is answered with 503. "
    "[default: 1000]",
)
@limit_options
@click.pass_context
def serve(
    context: click.Context,
    /,
    upstream: str | None,
    engine: str | None,
    host: str,
    port: int,
    api_key: str | None,
    upstream_api_key: str | None,
    template: str | None,
    number_by_place: bool,
    document_template: str | None,
    question_template: str | None,
    tokenizer: str | None,
    shadow: bool,
    tiers: bool,
    max_in_flight: int | None,
    reorder_window: int | None,
    max_waiting: int | None,
    allow_host: tuple[str, ...],
    body_limit: float,
    bodies_limit: float,
    connect_timeout: float,
    read_timeout: float,
    client_timeout: float,
    max_connections: int,
    grace: int,
    **options: Any,
) -> None:
    """Order documents in front of an OpenAI-compatible server.

    Documents are tagged in the body of a request to /v1/chat/completions or /v1/completions, {"ragorder":
    {"documents": [{"id", "text", "title", "tokens"}, …], "query", "scope"}}, best document first, which an OpenAI
    client sends as extra_body; or they stand in a message by --template. Everything else is passed on as it is, and
    answers are, byte by byte as they come. What the server had in its cache is read from the usage in an answer, which
    a stream has only if its client asks for it (stream_options.include_usage). GET /ragorder/openapi.json gives the
    schema; GET /ragorder/health is for probes, and GET /ragorder/ready asks the server behind as well. What was saved
    is at /ragorder (a page), /ragorder/stats (JSON, see `ragorder stats`) and /metrics.

    With --engine torch there is no other server: the model runs in this process, and keeps documents' KV on the device,
    in host memory and on disk (see `ragorder tiers stats`).

    What describes the engine and the guards can also be given in the environment, as RAGORDER_CAPACITY_TOKENS and so
    on.
    """
    engine_settings = {name: options.pop(name) for name in ENGINE_OPTIONS}
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
        raise click.UsageError("--allow-host goes without --api-key: whatever brings the key may come from anywhere")
    queue = _given(reorder_window=reorder_window, max_waiting=max_waiting)
    if max_in_flight is None and (stray := [name for name in queue if name != "max_waiting" or not in_process]):
        raise click.UsageError(f"--{stray[0].replace('_', '-')} goes with --max-in-flight")
    settings = _settings(options)
    loaded = None if tokenizer is None else _load(tokenizer)
    templates = {"document_template": document_template, "question_template": question_template}
    _builder(None, **templates)
    try:
        found = None if template is None else DocumentTemplate(template)
    except TemplateError as error:
        raise click.UsageError(f"--template: {error}") from None
    if number_by_place and found is not None and not found.shows_id:
        raise click.UsageError("--number-by-place: --template shows no {id} that could be numbered")
    limit = int(body_limit * (1 << 20))
    metrics = Metrics()
    admission = None if max_in_flight is None else AdmissionQueue(max_in_flight, registry=metrics.registry, **queue)
    with ExitStack() as until_served:
        # An address that cannot be had is said before a model is loaded.
        listening = until_served.enter_context(_listen(host, port))
        try:
            if in_process:
                behind = until_served.enter_context(
                    embedded(engine_settings, settings, metrics.registry, max_waiting=max_waiting, body_limit=limit)
                )
            else:
                known, source = settings_of_server(settings, str(upstream), upstream_api_key)
                how = {"upstream": upstream, "upstream_api_key": upstream_api_key, "send_facts": tiers}
                behind = Behind(known, loaded, how, source)
            app = make_app(
                ObservedOrderer(Orderer(behind.settings), [metrics], shadow=shadow),
                builder=_builder(behind.tokenizer, **templates),
                tokenizer=behind.tokenizer,
                template=found,
                number_by_place=number_by_place,
                on_passed=metrics.passed,
                api_key=api_key,
                hosts=THIS_MACHINE.union(allow_host, [host]) if is_loopback(host) or allow_host else None,
                body_limit=limit,
                bodies_limit=int(bodies_limit * (1 << 20)),
                timeouts=Timeouts(connect_timeout, read_timeout, client_timeout),
                admission=admission,
                routes=stats_routes(metrics, admission),
                **behind.options,
            )
        except AddressError as error:
            raise click.UsageError(f"--upstream: {error}") from None
        if api_key is None and not is_loopback(host):
            warn(f"everybody who reaches {host} can use the server behind: give --api-key")
        announce(address_of(listening), behind.settings, settings, behind.source, shadow=shadow)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        run_server(
            behind.wrap(app),
            listening,
            grace_s=grace,
            client_s=client_timeout,
            connections=max_connections,
            probes=PROBES,
            on_started=lambda url: click.echo(f"Serving on {url}/v1", err=True),
        )


def _listen(host: str, port: int) -> socket.socket:
    from ragorder.adapters.http_server.server import listen

    try:
        return listen(host, port)
    except OSError as error:
        raise click.ClickException(f"{host} port {port}: {error.strerror}: give another --host or --port") from None


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given: what the others are by default is not for the command line to say."""
    return {name: value for name, value in options.items() if value is not None}


def _settings(options: dict[str, Any]) -> Settings:
    try:
        return Settings(**_given(**options))
    except ValidationError as error:
        raise click.UsageError(complaint(error)) from None


def _builder(tokenizer: Any, **templates: str | None) -> PromptBuilder:
    try:
        return PromptBuilder("", tokenizer=tokenizer, **_given(**templates))
    except ValueError as error:
        raise click.UsageError(re.sub(r"^(\w+)_template", r"--\1-template", str(error))) from None


def _load(tokenizer: str) -> Any:
    from ragorder.adapters.tokenizer import load_tokenizer

    try:
        return load_tokenizer(tokenizer)
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(f"--tokenizer: {error}") from None
