"""Options of `ragorder serve`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from ragorder.cli.config_file import config_option
from ragorder.cli.options import (
    Choice,
    Count,
    ParamType,
    Size,
    is_given,
    option,
    options_from,
    section,
    spelling,
    together,
)
from ragorder.cli.serve_engine import engine_options
from ragorder.cli.serve_limits import ServeLimits
from ragorder.cli.serve_running import running_options
from ragorder.clouds.prices import PRICES_VARIABLE
from ragorder.settings import Settings
from ragorder.topic import SECRET_VARIABLE
from ragorder.trie.policies import POLICIES

__all__ = ["ORDER_SETTINGS", "check_keys", "serve_options"]

ORDER_SETTINGS = (
    "capacity_tokens",
    "host_tokens",
    "disk_tokens",
    "tier_policy",
    "block_size",
    "keep_first",
    "keep_last",
    "max_displacement",
    "max_gain_lost",
    "min_gain",
    "moves",
    "best",
    "best_tokens",
    "copies",
)
"""Those settings of an orderer that are options."""

_KEYS = ("api_key", "upstream_api_key", "topic_secret")
_MEBIBYTES = {"type": Size(1, unit=1 << 20), "metavar": "SIZE"}
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


class _Text(ParamType[str]):
    """A text in which \\n, \\t and \\\\ are escapes, or the content of a file."""

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


serve_options = together(
    section(
        "Server",
        option(
            "--upstream",
            metavar="URL",
            multiple=True,
            help="The server that the proxy forwards to, with OpenAI's or Anthropic's API, such as http://HOST:8000. "
            "Repeatable: replicas of one model, each with a tree of its own; a request goes to the best by cached "
            "tokens and load.",
        ),
        option(
            "--data-parallel-ranks",
            type=Count(2),
            metavar="N",
            help="The server, or each of them, has N data-parallel ranks, each with a cache of its own: a tree for "
            "each, and the header X-data-parallel-rank. [default: one]",
        ),
        option(
            "--topic-header",
            metavar="NAME",
            help="Send the topic of a request's documents in this header, by which the router at --upstream chooses "
            "among replicas. [default: none; with --route x-session-id]",
        ),
        option(
            "--topic-secret",
            metavar="TEXT",
            envvar=SECRET_VARIABLE,
            show_envvar=True,
            help="The secret of topics: processes with the same secret have the same topics. [default: one of this "
            "process alone]",
        ),
        option(
            "--route",
            is_flag=True,
            help="Only add the topic: a proxy beside each replica orders, after the router at --upstream has chosen "
            "it.",
        ),
        option(
            "--upstream-api-key",
            metavar="KEY",
            envvar="RAGORDER_UPSTREAM_API_KEY",
            show_envvar=True,
            help="Send this key to the server. [default: the client's own, if this proxy requires none]",
        ),
        option(
            "--tokenizer",
            metavar="FOLDER|NAME",
            help="The served model's tokenizer, by folder or name on the Hub, to count tokens. [default: estimated]",
        ),
        option(
            "--tiers",
            is_flag=True,
            help="The server is a vLLM with ragorder tiers: send it the document boundaries (with --tokenizer) and a "
            "digest of the tenant. Other servers may refuse such requests.",
        ),
        options_from(
            ServeLimits,
            "max_in_flight",
            "reorder_window",
            "max_waiting",
            "connect_timeout_s",
            "read_timeout_s",
            "tries_timeout_s",
        ),
    ),
    section(
        "Embedded engine, in the place of a server",
        option(
            "--engine",
            type=Choice(["upstream", "torch"]),
            help="upstream: the server at --upstream; torch: --model in this process. [default: upstream if "
            "--upstream is given]",
        ),
        engine_options,
    ),
    section(
        "Documents and prompts",
        option(
            "--template",
            type=_Text(),
            help="The form of one document in a message that is not tagged, with {text} and optionally {id} and "
            "{title}, such as '<document id=\"{id}\">\\n{text}\\n</document>': the first message with two or more in "
            "a row is ordered.",
        ),
        option(
            "--number-by-place",
            is_flag=True,
            help="Replace ids that are 1, 2, 3, … by rank, which would defeat the cache, by the documents' places in "
            "the prompt; other ids stay. The answer's header x-ragorder-permutation maps places to documents.",
        ),
        option(
            "--dedup",
            is_flag=True,
            help="Name a document that --template finds again in a later message of a conversation, instead of sending "
            "it twice. The answer's header x-ragorder-named has the ranks of those in the last message.",
        ),
        option(
            "--dedup-text",
            type=_Text(),
            help="With --dedup: what stands in the place of a document, with {id}. [default: '[{id}] is above.']",
        ),
        option(
            "--marks/--no-marks",
            default=None,
            help="The server resumes its cache only at marks (Anthropic's API, OpenAI's from GPT-5.6 on): set them "
            "where they are expected to pay if the client sets none, by the rules of the request's model. Writing to "
            "such a cache costs more than not using it, so some requests get none. Documents of a request whose client "
            "sets marks keep their order, unless the server's sizes are known or --no-marks says that its cache finds "
            "any common prefix. [default: if the server is api.anthropic.com, api.openai.com or api.deepseek.com]",
        ),
        option(
            "--marks-ttl",
            type=Choice(["5m", "1h", "30m"]),
            help="With --marks: lifetime (TTL) of the cache breakpoints, for models that have this one. [default: the "
            "provider's shortest]",
        ),
        option(
            "--prices",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            envvar=PRICES_VARIABLE,
            show_envvar=True,
            help="With --marks: prices of input tokens, in TOML, for costs in money. [default: those of the package, "
            "as of their date]",
        ),
        option(
            "--document-template",
            type=_Text(),
            help="The form of a tagged document in the prompt, with {text} and optionally {id}, {title} and {label}, a "
            "number by its text for citations. "
            r"[default: '[{id}]\n{text}\n\n']",
        ),
        option(
            "--question-template",
            type=_Text(),
            help="The form of the query in the prompt, after tagged documents. [default: 'Question: {query}']",
        ),
    ),
    section(
        "Order",
        options_from(
            Settings,
            *ORDER_SETTINGS,
            capacity_tokens={"default": "the server's /metrics; with --engine torch what its tiers hold"},
            tier_policy={"type": Choice(list(POLICIES)), "metavar": None},
            block_size={"default": "the server's /metrics; with --engine torch 16"},
        ),
        option(
            "--shared-orders",
            metavar="URL",
            envvar="RAGORDER_SHARED_ORDERS",
            show_envvar=True,
            help="Share orders with other proxies of the same server through a Valkey or Redis server, such "
            "as redis://127.0.0.1:6379/0.",
        ),
        option(
            "--shadow",
            is_flag=True,
            help="Serve documents in retrieval order, and compute what ragorder's order would save.",
        ),
    ),
    section(
        "Clients",
        option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on."),
        options_from(ServeLimits, "port"),
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
            help="Without --api-key: another host name under which the proxy may be called, and whose web pages may "
            "call it. Repeatable. [default: on a loopback --host this machine's names only, otherwise all]",
        ),
        options_from(
            ServeLimits,
            "body_limit",
            "bodies_limit",
            "client_timeout_s",
            "max_connections",
            "grace_s",
            body_limit=_MEBIBYTES,
            bodies_limit=_MEBIBYTES,
        ),
    ),
    section("Process", running_options, config_option()),
)


def check_keys(context: click.Context) -> None:
    """Raise click.UsageError for an empty key, which would be no key at all.

    click takes an empty variable for an unset one, but a missing secret often arrives as an empty variable.
    """
    for param in context.command.params:
        if param.name not in _KEYS:
            continue
        name, value = spelling(param.name), context.params[param.name]
        if not is_given(context, param.name):
            name = str(param.envvar)
            value = os.environ.get(name)
        if value is not None and not value.strip():
            raise click.UsageError(f"{name}: the key is empty: give one, or leave the setting out")
