"""`ragorder doctor --requests`: a log of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.options import Count, Decorator, option, section
from ragorder.topic import checked_header

if TYPE_CHECKING:
    from ragorder.adapters.doctor import Finding

__all__ = ["REQUEST_OPTIONS", "examine_log", "request_options"]

REQUEST_OPTIONS = ("tokenizer", "block_size", "topic_header")
"""Options that only --requests takes."""


def request_options() -> Decorator:
    return section(
        "Requests",
        option(
            "--requests",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="JSON lines with the bodies of requests in the order in which they were sent, and the usage of their "
            'answers: {"messages": […], "usage": {…}}, or {"request": {…}, "response": {…}}. Nothing of them is shown. '
            "Without URL, no server is asked.",
        ),
        option(
            "--tokenizer",
            metavar="FOLDER|NAME",
            help="The model's tokenizer, to render chats twice. [default: by the server at URL]",
        ),
        option(
            "--block-size",
            type=Count(1),
            metavar="N",
            help="Tokens in a block of the server's cache. [default: from the server at URL, else from the log]",
        ),
        option(
            "--topic-header",
            metavar="NAME",
            help="Check that the balancer at URL sends requests with the same topic in this header to one replica.",
        ),
    )


def examine_log(
    log: Path, *, url: str | None, tokenizer: str | None, topic_header: str | None, **options: Any
) -> list[Finding]:
    """The findings. Raises click's errors, and what `examine_requests` raises for a server."""
    from ragorder.adapters.doctor import examine_requests
    from ragorder.jsonl import JSONLinesError

    if topic_header is not None:
        if url is None:
            raise click.UsageError("--topic-header requires URL, the address of the balancer")
        try:
            checked_header(topic_header)
        except ValueError as error:
            raise click.UsageError(f"--topic-header: {error}") from None
    loaded = None if tokenizer is None else _load(tokenizer)
    try:
        return examine_requests(log, base_url=url, tokenizer=loaded, topic_header=topic_header, **options)
    except JSONLinesError as error:
        raise click.ClickException(str(error)) from None


def _load(tokenizer: str) -> Any:
    from ragorder.adapters.openai.tokenizer import load_tokenizer

    try:
        return load_tokenizer(tokenizer)
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(f"--tokenizer: {error}") from None
