"""The command `ragorder template`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ragorder.cli.options import Command, api_key, option, section
from ragorder.cli.values import Count
from ragorder.common.jsonl import JSONLinesError, printable

if TYPE_CHECKING:
    from ragorder.adapters.learning.suggestion import Suggestion
    from ragorder.adapters.proxy.bodies.template import DocumentRun

_SHOWN = 60
_CAPACITY_TOKENS = 131_072
_TIMEOUT_S = 30.0
_NOT_FOUND = 404
_NONE_LEARNED = (
    "no template was learned at {}: give the address of a `ragorder serve --shadow` without --template, after a few "
    "hundred requests whose documents recur"
)


@click.command(
    cls=Command,
    examples=[
        "ragorder template requests.jsonl",
        "ragorder template requests.jsonl -o app.toml",
        "ragorder template --from http://127.0.0.1:8100 -o app.toml",
    ],
)
@click.argument("requests", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@section(
    "Template",
    option(
        "-o",
        "--out",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Write the template, for `ragorder serve --template FILE`.",
    ),
    option(
        "--capacity-tokens",
        type=Count(1),
        metavar="TOKENS",
        help="Cache for which the saving is predicted.",
        unset="131072",
    ),
)
@section(
    "Proxy",
    option(
        "--from",
        "url",
        metavar="URL",
        help="Instead of a log: the template that the `ragorder serve --shadow` at URL has learned from the prompts "
        "that it forwarded. It has no examples, because the proxy keeps no prompts.",
    ),
    api_key(first=["RAGORDER_PROXY_API_KEY"]),
)
def template(
    requests: Path | None, out: Path | None, capacity_tokens: int | None, url: str | None, api_key: str | None
) -> None:
    """Learn from a log of requests how an application joins documents into its prompts.

    REQUESTS has JSON lines with the bodies of requests in the order in which they were sent, plain or compressed, as
    for `ragorder doctor`; 100 to 300 are enough if documents recur. Without a log, a proxy in shadow mode learns from
    the requests that it forwards (--from). Known applications need neither: see `ragorder serve --help`.

    Look at the examples before you give the file to `ragorder serve`. The exit status is 1 if no template is found.
    """
    if (requests is None) == (url is None):
        raise click.UsageError("give REQUESTS, a log, or --from URL, a proxy in shadow mode")
    if url is None and requests is not None:
        toml = _learned(requests, capacity_tokens or _CAPACITY_TOKENS)
    elif capacity_tokens is not None:
        raise click.UsageError("--capacity-tokens is of a log: the proxy predicts for its own cache")
    else:
        toml = _fetched(str(url), api_key)
    if out is not None:
        out.write_text(toml, "utf-8")
        click.echo(f"next: ragorder serve --upstream URL --template {out}")


def _fetched(url: str, api_key: str | None) -> str:
    from ragorder.adapters.http_client import Server, ServerError

    try:
        with Server(url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
            toml = server.get("/ragorder/template")
    except (ServerError, ImportError) as error:
        if isinstance(error, ServerError) and error.status == _NOT_FOUND:
            raise click.ClickException(_NONE_LEARNED.format(printable(url))) from None
        raise click.ClickException(str(error)) from None
    click.echo("\n".join(map(printable, toml.splitlines())))
    return toml


def _learned(requests: Path, capacity_tokens: int) -> str:
    from ragorder.adapters.doctor.request_log import read_log
    from ragorder.adapters.learning.suggestion import suggest

    try:
        log = read_log(requests)
    except JSONLinesError as error:
        raise click.ClickException(str(error)) from None
    texts = [[message.text for message in each.messages if message.role != "tools"] for each in log.requests]
    found = suggest(texts, capacity_tokens)
    if isinstance(found, str):
        raise click.ClickException(f"no template in {len(texts):,} requests: {found}")
    _show(found)
    if found.refused:
        raise click.ClickException(f"not to be used live: {found.refused}")
    return found.toml()


def _show(found: Suggestion) -> None:
    console = Console()
    click.echo(found.toml())
    console.print(f"documents in {found.fits:,} of {found.seen:,} requests")
    if found.saving is not None:
        console.print(f"saving: {100 * found.saving.share:.1f} % of the prefill, four characters a token")
    for doubt in found.doubts:
        console.print(Text(f"! {doubt}", "yellow"))
    for number, run in enumerate(found.examples, 1):
        console.print(Panel(_marked(run), title=f"example {number}", title_align="left"))


def _marked(run: DocumentRun) -> Text:
    text = Text(run.head if len(run.head) <= _SHOWN else f"… {run.head[-_SHOWN:]}")
    for place, document in enumerate(run.documents):
        whole = len(document) <= 2 * _SHOWN
        text.append(document if whole else f"{document[:_SHOWN]} … {document[-_SHOWN:]}", "reverse")
        text.append(run.gaps[place] if place < len(run.gaps) else "")
    return text.append(run.tail if len(run.tail) <= _SHOWN else f"{run.tail[:_SHOWN]} …")
