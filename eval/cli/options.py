"""Options that the measuring commands share."""

from __future__ import annotations

from typing import Any

import click

from ragorder.cli.options import Choice, Count, Decorator, ParamType, Rate, option, section, together
from ragorder.counts import parse_count

__all__ = [
    "Integers",
    "arrival_rates",
    "block_size",
    "embedding_model",
    "events_options",
    "limit",
    "question_order",
    "seeds",
    "served_model",
    "top_k",
    "waiting",
]


class Integers(ParamType[list[int]]):
    """Whole numbers with commas between them."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return [int(part) if part.lstrip("+-").isdecimal() else parse_count(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r}: give integers with commas between them, such as 0,1,2", param, ctx)


embedding_model = option(
    "--embedding-model", metavar="NAME", help="sentence-transformers model of the dense retriever."
)
served_model = option(
    "--served-model", metavar="NAME", help="The model's id on the server. [default: the first one listed]"
)


def seeds(default: str) -> Decorator:
    """--seeds."""
    return option(
        "--seeds",
        formerly=["--seed"],
        type=Integers(),
        default=default,
        show_default=True,
        metavar="N,...",
        help="Seeds of workloads and random orders, with commas.",
    )


def limit(help: str, *, least: int = 1) -> Decorator:
    """--limit."""
    return option("--limit", type=Count(least), metavar="N", help=help)


def top_k(help: str) -> Decorator:
    """--top-k."""
    return option("--top-k", type=Count(1), metavar="K", help=help)


def block_size(help: str, **attributes: Any) -> Decorator:
    """--block-size."""
    return option(
        "--block-size", type=Count(1), metavar="N", help=f"Tokens in one KV block. {help}".rstrip(), **attributes
    )


def waiting() -> Decorator:
    """--waiting."""
    return option(
        "--waiting",
        type=Count(0),
        default=0,
        show_default=True,
        metavar="N",
        help="The next N requests are already waiting when one is ordered.",
    )


def question_order(name: str) -> Decorator:
    """--order."""
    return option(
        "--order",
        name,
        type=Choice(["data", "random"]),
        default="data",
        show_default=True,
        help="Order of the questions.",
    )


def arrival_rates(prefill: str, decode: str) -> Decorator:
    """--prefill-rate and --decode-rate."""
    return together(
        option("--prefill-rate", type=Rate(), metavar="TOKENS/S", help=prefill),
        option("--decode-rate", type=Rate(), metavar="TOKENS/S", help=decode),
    )


events_options = section(
    "KV events of the server (--engine openai)",
    option("--events-endpoint", metavar="ENDPOINT", help="Where the server publishes KV events."),
    option("--replay-endpoint", metavar="ENDPOINT", help="Where it repeats them."),
    option("--events-topic", metavar="TOPIC", help="Their topic. [default: any]"),
)
