"""The command `ragorder`."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

import click


class LazyCommand(NamedTuple):
    """A command's address "module:attribute", and the first sentence of its help."""

    address: str
    help: str


_COMMANDS = {
    "order": LazyCommand("ragorder.cli.order:order", "Order the documents of each request in a file of JSON lines."),
    "plan": LazyCommand(
        "ragorder.cli.planning.command:plan", "Plan a batch of any size in shards, each a file in serving order."
    ),
    "bench": LazyCommand("ragorder.eval.cli.bench:bench", "Compare ordering policies on a trace of requests."),
    "eval": LazyCommand(
        "ragorder.eval.cli.eval:eval", "Measure the evaluation's tables and figures, and report on them."
    ),
    "replay": LazyCommand("ragorder.eval.cli.replay:replay", "Replay a log of past requests on a simulated cache."),
    "report": LazyCommand("ragorder.eval.cli.report:report", "Report on results: what ordering saves."),
    "serve": LazyCommand(
        "ragorder.cli.serve:serve", "Run a proxy that orders documents for a server with OpenAI's or Anthropic's API."
    ),
    "template": LazyCommand(
        "ragorder.cli.template:template",
        "Learn from a log of requests how an application joins documents into its prompts.",
    ),
    "engine": LazyCommand(
        "ragorder.cli.engine:engine", "Run a model in this process, and a proxy that orders documents for it."
    ),
    "route": LazyCommand(
        "ragorder.cli.route:route", "Run a proxy that sends the topic of a request's documents to a router."
    ),
    "stats": LazyCommand("ragorder.cli.stats:stats", "Show what ordering saved, and what KV each tier holds."),
    "fuse": LazyCommand(
        "ragorder.cli.fuse:fuse", "Compute documents' KV before they are requested, each after similar documents."
    ),
    "tiers": LazyCommand("ragorder.cli.tiers:tiers", "Keep documents' KV in host memory and on disk, in vLLM."),
    "profile": LazyCommand("ragorder.eval.cli.profile:profile", "Measure how long a prefill takes on an engine."),
    "demo": LazyCommand("ragorder.eval.cli.demo:demo", "Answer questions about Python with and without ordering."),
    "workflow": LazyCommand("ragorder.eval.cli.workflow:workflow", "Inspect workflows of searches and generations."),
    "doctor": LazyCommand("ragorder.cli.doctor:doctor", "Check whether a server and its prompts use the prefix cache."),
}


class LazyGroup(click.Group):
    """click's group, which imports a command only when it runs, and shows an OSError as one line."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name].address.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if near := [] if args[0] in self._lazy else get_close_matches(args[0], self._lazy, n=1):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            # A closed pipe is no failure: click exits without a message.
            if error.errno == errno.EPIPE:
                raise
            _drop_unwritten_output()
            raise click.ClickException(str(error)) from None


def _drop_unwritten_output() -> None:
    """Keep Python from flushing standard output at exit, which would fail with a traceback."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ragorder", prog_name="ragorder")
def main() -> None:
    """Orders retrieved documents so that a serving engine reuses more of its prefix cache."""
    end_on_signals()


def end_on_signals() -> None:
    """Unwind the stack on SIGTERM and SIGHUP (a closed terminal) as on Ctrl-C, unless handled or ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Windows has no SIGHUP.
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, lambda number, frame: signal.raise_signal(signal.SIGTERM))
