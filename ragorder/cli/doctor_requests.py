"""`ragorder doctor --requests`: a log of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.options import Count, Decorator, option, section
from ragorder.topic import checked_header

if TYPE_CHECKING:
    from ragorder.adapters.doctor import Finding

__all__ = ["REQUEST_OPTIONS", "checked_requests", "examine_log", "request_options"]

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


def checked_requests(
    url: str | None, *, tokenizer: str | None, block_size: int | None, topic_header: str | None
) -> dict[str, Any]:
    """The options as `examine_requests` takes them, the tokenizer loaded. Raises click's errors."""
    if topic_header is not None:
        if url is None:
            raise click.UsageError("--topic-header requires URL, the address of the balancer")
        try:
            checked_header(topic_header)
        except ValueError as error:
            raise click.UsageError(f"--topic-header: {error}") from None
    loaded = None if tokenizer is None else _load(tokenizer)
    return {"base_url": url, "tokenizer": loaded, "block_size": block_size, "topic_header": topic_header}


def examine_log(log: Path, **options: Any) -> list[Finding]:
    """The findings. Raises what `examine_requests` raises for a server, and click's error for the log."""
    from ragorder.adapters.doctor import examine_requests
    from ragorder.jsonl import JSONLinesError

    try:
        return examine_requests(log, **options)
    except JSONLinesError as error:
        raise click.ClickException(str(error)) from None


def _load(tokenizer: str) -> Any:
    from ragorder.adapters.openai.tokenizer import load_tokenizer

    try:
        return load_tokenizer(tokenizer)
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(f"--tokenizer: {error}") from None
