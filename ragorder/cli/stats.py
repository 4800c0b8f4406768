"""The command `ragorder stats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ragorder.cli.options import Command, Rate, option
from ragorder.cli.output import show_figures, watch_options

if TYPE_CHECKING:
    from ragorder.adapters.observing.costs import CostStats
    from ragorder.adapters.observing.stats import Stats

__all__ = ["stats"]

_PASSED = {
    "no_documents": "without documents: does --template match the prompts?",
    "one_document": "with one document, which has no other order",
    "other_route": "to routes whose bodies are not parsed",
    "too_many_values": "with more JSON values than are read",
    "compressed": "compressed in a way that is not decoded: send gzip",
    "unreadable": "with an unreadable body",
    "client_marks": "with marks of the client's own (cache_control), where alone such a cache resumes",
    "no_marks": "that can have no marks, where alone their model's cache resumes",
}


@click.command(cls=Command)
@click.argument("url")
@option(
    "--api-key",
    metavar="KEY",
    envvar="RAGORDER_PROXY_API_KEY",
    show_envvar=True,
    help="The proxy's key. Other users of this machine can see it unless it comes from the environment.",
)
@option(
    "--prefill-rate",
    type=Rate(),
    metavar="TOKENS/S",
    help="Prompt tokens that your engine computes per second, to show the saving in seconds as well.",
)
@watch_options
def stats(url: str, api_key: str | None, prefill_rate: float | None, interval_s: float | None, as_json: bool) -> None:
    """Show what ordering saved at a running proxy or application.

    URL is that of `ragorder serve`, or of an application that publishes ragorder's metrics. In shadow mode documents
    are served in retrieval order, and the figures show what ragorder's order would have saved.
    """
    from ragorder.adapters.observing.stats import fetch_stats
    from ragorder.adapters.vllm.cache_config import ServerError

    try:
        show_figures(lambda: _Figures(fetch_stats(url, api_key=api_key), prefill_rate), interval_s, as_json)
    except (ServerError, ImportError) as error:
        raise click.ClickException(str(error)) from None


@dataclass(frozen=True, slots=True)
class _Figures:
    read: Stats
    prefill_rate: float | None

    def show(self) -> Group:
        return _table(self.read, self.prefill_rate)

    def as_json(self) -> Any:
        return self.read.as_json()


def _table(read: Stats, prefill_rate: float | None) -> Group:
    served, other = ("retrieval order", "ragorder's order") if read.shadow else ("ragorder's order", "retrieval order")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    table.add_row("requests", f"{read.served:,}", f"{read.discarded:,} failed, {read.documents:,} documents")
    table.add_row("prompt tokens", f"{read.prompt_tokens:,}", "")
    for reason, requests in sorted(read.passed.items()):
        table.add_row("passed unordered", f"{requests:,}", _PASSED.get(reason, reason))
    if not read.served:
        known = "no request yet"
    elif read.reports == read.served:
        known = "reported by the engine"
    elif read.reports:
        known = f"reported for {read.reports:,} requests, else predicted"
    else:
        known = "predicted: the engine reports nothing"
    table.add_row(f"cached, {served}", f"{100 * read.cached_share:.1f} %", f"served; {known}")
    if read.other_cached_share is not None:
        share = f"{100 * read.other_cached_share:.1f} %"
        table.add_row(f"cached, {other}", share, "predicted for the same requests, corrected by the reports")
    elif read.predicted_other_share is not None and read.served and not read.reports:
        share = f"{100 * read.predicted_other_share:.1f} %"
        table.add_row(f"cached, {other}", share, "predicted for the same requests, without reports")
    elif read.predicted_other_share is not None and read.served:
        table.add_row(f"cached, {other}", "–", "unknown")
    if read.prediction_error_tokens is not None:
        bias = f"bias {read.prediction_bias_tokens:+,.1f}"
        table.add_row("predictions off by", f"{read.prediction_error_tokens:,.1f}", f"tokens a request, {bias}")
    if read.cost is not None:
        table.add_row("cost of prompts", f"{100 * read.cost.share:.1f} %", _cost_words(read.cost, read.shadow))
        if read.cost.money is not None and read.cost.saved_money is not None:
            money = f"{read.cost.money:,.2f} {read.cost.currency}"
            table.add_row("", money, f"{_difference(read.cost)} without a cache; prices of {read.cost.prices_date}")
    table.add_row("order time", _time(read.order_us["p50"]), f"median; 99 of 100 within {_time(read.order_us['p99'])}")
    cold = f"{_share(read.reordered_cold, read.ordered)} with nothing cached"
    best = f"{_share(read.best_moved, read.ordered)} have another document first than the best"
    table.add_row("prompts reordered", _share(read.reordered, read.ordered), f"of all; {cold}, {best}")
    if read.saved_tokens_per_reordered is not None:
        gain = f"{read.saved_tokens_per_reordered:,.0f}"
        table.add_row("saved for each", gain, "prefill tokens for each reordered prompt")
    table.add_row("documents moved by", f"{read.displacement_mean:.2f}", "positions, mean")
    table.add_row("tree nodes", f"{read.tree_nodes:,}", f"{read.evicted_blocks:,} KV blocks evicted so far")
    fallbacks = Text(f"{read.fallbacks:,}", "red" if read.fallbacks else "")
    table.add_row("fallbacks", fallbacks, "requests left in retrieval order after an internal error")
    return Group(_verdict(read, prefill_rate), Text(), table)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _time(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.0f} µs"


def _cost_words(cost: CostStats, shadow: bool) -> str:
    said = "of what they cost without a cache"
    if cost.other_tokens is None or not cost.uncached_tokens:
        return said
    other = "ragorder's order" if shadow else "retrieval order"
    return f"{said}; in {other} {100 * cost.other_tokens / cost.uncached_tokens:.1f} %, predicted"


def _difference(cost: CostStats) -> str:
    saved = round(cost.saved_money or 0.0, 2)
    return f"{abs(saved):,.2f} {cost.currency} {'less' if saved > 0 else 'more'} than" if saved else "as much as"


def _verdict(read: Stats, prefill_rate: float | None) -> Text:
    if not read.served and read.passed:
        return Text(
            f"Nothing was ordered: {sum(read.passed.values()):,} requests were forwarded unchanged.", "bold yellow"
        )
    if read.saved_tokens is None or read.saved_share is None:
        said = read.cannot_compare or ""
        hint = "" if not read.served or read.reports else " (vLLM: --enable-prompt-tokens-details)"
        return Text(f"{said[:1].upper()}{said[1:]}{hint}.", "yellow")
    is_more = read.saved_tokens < 0
    mode = "Shadow mode: ragorder would have " if read.shadow else "ragorder "
    tokens, share = abs(read.saved_tokens), 100 * abs(read.saved_share)
    seconds = f", {tokens / prefill_rate:,.1f} s" if prefill_rate else ""
    text = f"{mode}{'needed' if is_more else 'saved'} {tokens:,} tokens of prefill{' more' if is_more else ''}{seconds}"
    text += f" ({share:.1f} % of it), give or take {read.error_tokens:,}"
    return Text(text, "bold green" if read.saved_tokens > 0 else "bold yellow")
