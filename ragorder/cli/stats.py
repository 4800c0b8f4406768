"""The command `ragorder stats`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ragorder.cli.options import Command, api_key, option
from ragorder.cli.output import Figures, show_figures, watch_options
from ragorder.cli.values import Rate

if TYPE_CHECKING:
    from ragorder.adapters.observing.costs import CostStats
    from ragorder.adapters.observing.stats import Stats
    from ragorder.adapters.observing.tier_stats import Hits, TierFigures, TierStats
    from ragorder.kernels.store import Survey

# Room of a disk tier beyond a build, so that new documents do not evict it at once.
_SPARE = 1.25
_GIB = 1 << 30

_PASSED = {
    "no_documents": "without documents: does --template match the prompts?",
    "one_document": "with one document, which has no other order",
    "not_numbered": "whose documents' numbers are not 0, 1, 2, … or 1, 2, 3, … by position",
    "other_route": "to routes whose bodies are not parsed",
    "too_many_values": "with more JSON values than are read",
    "compressed": "compressed in a way that is not decoded: send gzip",
    "unreadable": "with an unreadable body",
    "client_marks": "with the client's own cache breakpoints (cache_control), where alone their cache resumes",
    "no_marks": "that cannot have cache breakpoints, where alone their model's cache resumes",
}
_SOURCES = {
    "device": "the device's own pool",
    "host": "host memory",
    "disk": "the disk",
    "elsewhere": "other servers or connectors",
    "computed": "computed: not found in any tier",
}


@click.command(
    cls=Command,
    examples=[
        "ragorder stats http://127.0.0.1:8100",
        "ragorder stats http://127.0.0.1:8100 --watch 5 --prefill-rate 12000",
        "ragorder stats /var/kv",
    ],
)
@click.argument("source", metavar="URL|FOLDER")
@api_key(first=["RAGORDER_PROXY_API_KEY"])
@option(
    "--prefill-rate",
    type=Rate(),
    metavar="TOKENS/S",
    help="Prompt tokens that your engine computes per second, to show the saving in seconds as well.",
)
@watch_options
def stats(
    source: str, api_key: str | None, prefill_rate: float | None, interval_s: float | None, as_json: bool
) -> None:
    """Show what ordering saved, and what KV each tier holds.

    URL is that of `ragorder serve`, `ragorder engine` or `ragorder route`, of an application that publishes ragorder's
    metrics, or of a vLLM server with ragorder tiers. In shadow mode documents are served in retrieval order, and the
    figures show what ragorder's order would have saved. Gauges of tiers are of the engine's last step, also while it is
    idle.

    FOLDER is that of a disk tier or of a build of `ragorder fuse`, also while it is in use.
    """
    from ragorder.adapters.http_client import ServerError

    folder = Path(source)
    is_folder = folder.exists() or ("://" not in source and source.startswith(("/", ".", "~")))

    def read() -> Figures:
        return _read_folder(folder) if is_folder else _read_server(source, api_key, prefill_rate)

    try:
        show_figures(read, interval_s, as_json)
    except (ServerError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from None


@dataclass(frozen=True, slots=True)
class _ServerFigures:
    ordering: Stats | None
    tiers: TierStats | None
    prefill_rate: float | None

    def show(self) -> Group:
        parts: list[RenderableType] = []
        if self.ordering is not None:
            parts.append(_table(self.ordering, self.prefill_rate))
        if self.tiers is not None:
            parts += [Text()] * bool(parts)
            parts += [_tiers_table(self.tiers.tiers), Text(), _hits_table(self.tiers.hits), Text(), _facts(self.tiers)]
        return Group(*parts)

    def as_json(self) -> dict[str, Any]:
        ordering = {} if self.ordering is None else self.ordering.as_json()
        return ordering if self.tiers is None else ordering | {"kv": self.tiers.as_json()}


def _read_server(url: str, api_key: str | None, prefill_rate: float | None) -> Figures:
    from ragorder.adapters.http_client import ServerError
    from ragorder.adapters.observing.stats import fetch_stats
    from ragorder.adapters.observing.tier_stats import fetch_tier_stats

    ordering, tiers, failure = None, None, None
    try:
        ordering = fetch_stats(url, api_key=api_key)
    except ServerError as error:
        if error.status is not None:
            raise
        failure = error
    try:
        tiers = fetch_tier_stats(url, api_key=api_key)
    except ServerError as error:
        if failure is not None:
            raise (failure if str(error) == str(failure) else ServerError(f"{failure}; {error}")) from None
    return _ServerFigures(ordering, tiers, prefill_rate)


def _read_folder(folder: Path) -> Figures:
    from ragorder.kernels.preprocessing.manifest import NoBuildError
    from ragorder.kernels.store import survey

    try:
        return _read_build(folder)
    except NoBuildError:
        pass
    try:
        found = survey(folder)
    except OSError as error:
        raise click.ClickException(f"{folder}: {error.strerror or error}") from None
    if found is None:
        raise click.ClickException(
            f"{folder} is neither a disk tier nor a build: give the --disk-path of an engine or of `ragorder tiers "
            "config`, or the folder of `ragorder fuse build`"
        )
    return _FolderFigures(found)


@dataclass(frozen=True, slots=True)
class _FolderFigures:
    found: Survey

    def show(self) -> Table:
        found, now = self.found, time()
        ages = [None if written is None else _age(max(0.0, now - written)) for written in (found.oldest, found.newest)]
        rows = {
            "chunks": f"{found.chunks:,}",
            "bytes on disk": _bytes(found.bytes),
            "oldest": ages[0] or "–",
            "newest": ages[1] or "–",
            "half-written files": f"{found.unfinished:,}",
            "used by process": found.locked_by or "none",
            "identity": found.identity or "unknown",
        }
        return _facts_table("Content of the folder", rows)

    def as_json(self) -> dict[str, Any]:
        return asdict(self.found)


def _table(read: Stats, prefill_rate: float | None) -> Group:
    from ragorder.adapters.observing.stats import LEARNED

    served, other = ("retrieval order", "ragorder's order") if read.shadow else ("ragorder's order", "retrieval order")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    table.add_row("requests", f"{read.served:,}", f"{read.discarded:,} failed, {read.documents:,} documents")
    table.add_row("prompt tokens", f"{read.prompt_tokens:,}", "")
    for reason, requests in sorted(read.passed.items()):
        table.add_row("passed unordered", f"{requests:,}", _PASSED.get(reason, reason))
    for preset, saved in read.recognised.items():
        would = f"prompts look like those of {preset}: --template {preset} would save this share of their prefill"
        if preset == LEARNED:
            would = (
                "a form of documents was found: `ragorder template --from URL -o FILE`, and --template FILE would save"
            )
            would += " this share of their prefill"
        table.add_row("recognised", f"{100 * saved:.1f} %", would)
    for name, count in read.serving.items():
        table.add_row(name, f"{count:,}", "")
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


def _tiers_table(tiers: Sequence[TierFigures]) -> Table:
    table = Table(title="Tiers")
    table.add_column("tier", style="bold", no_wrap=True)
    for heading in ("chunks", "bytes", "of capacity", "oldest", "stored", "evicted", "failed\ncopies", "refused"):
        table.add_column(heading, justify="right")
    for tier in tiers:
        refused = sum(tier.refused.values())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in tier.refused.items() if count)
        table.add_row(
            tier.tier,
            f"{tier.chunks:,}",
            _bytes(tier.bytes),
            f"{100 * tier.used_share:.1f} %" if tier.capacity_bytes else "–",
            _age(tier.oldest_s),
            f"{tier.stored:,}",
            f"{tier.evicted:,}",
            Text(f"{tier.failed_transfers:,}", "red" if tier.failed_transfers else ""),
            Text(reasons, "red") if refused else Text("0"),
        )
    return table


def _hits_table(hits: Hits) -> Table:
    table = Table(title="Prompt tokens by the source of their KV")
    table.add_column("source", style="bold", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    for source, tokens in hits.as_json().items():
        if tokens or source != "elsewhere":
            table.add_row(_SOURCES[source], f"{tokens:,}", f"{100 * tokens / max(1, hits.total):.1f} %")
    return table


def _facts(stats: TierStats) -> Text:
    text = Text(f"{stats.with_facts:,} requests gave the ends of their {stats.documents:,} documents")
    text.append(f", {stats.without_facts:,} did not")
    if stats.tenants:
        text.append(f"; {stats.tenants:,} tenants")
    if stats.device_order is False:
        text.append("; after an error, which is in its log, the device no longer evicts by the policy", "red")
    if stats.profile is False:
        text.append(
            "; its prefill times are not measured yet: start `ragorder serve --tiers`, which measures them", "yellow"
        )
    if stats.misfits:
        text.append(f"; of {sum(stats.build.values()):,} requests that could use the build, {stats.misfits}", "red")
    if stats.unreadable_facts:
        text.append(f"; {stats.unreadable_facts:,} had malformed facts", "red")
    return text


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count:,.0f} B"
        count /= 1024
    return f"{count:,.1f} TiB"


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} s"


@dataclass(frozen=True, slots=True)
class _BuildFigures:
    """`other_chunks` are of the system prompt or a server."""

    model: str
    documents: int
    tokens: int
    prefix_tokens: int
    neighbours: float
    stored: int
    missing: int
    stored_tokens: int
    bytes: int
    bytes_per_token: float
    token_bytes: int
    other_chunks: int
    other_bytes: int
    used_by: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def show(self) -> RenderableType:
        rows = {
            "model": self.model,
            "documents": f"{self.documents:,}",
            "their tokens": f"{self.tokens:,}",
            "tokens of the system prompt": f"{self.prefix_tokens:,}",
            "neighbours of a document": f"{self.neighbours:.1f}",
            "with KV on the disk": f"{self.stored:,}",
            "missing": f"{self.missing:,}",
            "bytes on the disk": f"{self.bytes:,}",
            "bytes a token": f"{self.bytes_per_token:,.0f} (KV alone {self.token_bytes:,})",
            "other chunks": f"{self.other_chunks:,} ({self.other_bytes:,} bytes)",
            "used by process": self.used_by or "none",
        }
        return _facts_table("Documents' KV", rows)


def _facts_table(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    return table


def _read_build(folder: Path) -> _BuildFigures:
    from ragorder.kernels.preprocessing.manifest import Manifest
    from ragorder.kernels.store import survey
    from ragorder.kernels.store.format import ChunkName
    from ragorder.kernels.store.scan import stored_bytes

    with closing(Manifest.of(folder)) as manifest:
        facts = manifest.facts
        chunks, surveyed = stored_bytes(folder), survey(folder)
        documents = tokens = neighbours = stored = stored_tokens = size = 0
        counted: set[str] = set()
        for document in manifest:
            documents += 1
            tokens += len(document.token_ids)
            neighbours += len(document.neighbours)
            name = ChunkName.of(document.key, 0).digest
            if name in chunks:
                stored += 1
            if name in chunks and name not in counted:
                counted.add(name)
                stored_tokens += len(document.token_ids)
                size += chunks[name]
    return _BuildFigures(
        facts.get("recipe", {}).get("model", "unknown"),
        documents,
        tokens,
        facts["prefix_tokens"],
        neighbours / max(1, documents),
        stored,
        documents - stored,
        stored_tokens,
        size,
        size / max(1, stored_tokens),
        facts["token_bytes"],
        len(chunks) - len(counted),
        sum(chunks.values()) - size,
        surveyed.locked_by if surveyed is not None else None,
    )


def disk_gib(size: int) -> int:
    return max(1, -(-int(_SPARE * size) // _GIB))


def check_fits(folder: Path, disk_bytes: int) -> None:
    from ragorder.kernels.preprocessing.manifest import ManifestError, NoBuildError
    from ragorder.kernels.store.scan import stored_bytes

    try:
        try:
            size, build = _read_build(folder).bytes, "a build"
        except NoBuildError:
            return
        except ManifestError as error:
            # Any of its chunks may belong to the build.
            size, build = sum(stored_bytes(folder).values()), f"an unreadable build ({error})"
    except OSError:
        # The engine reports what is wrong with the folder.
        return
    if size > disk_bytes:
        raise click.UsageError(
            f"{folder} holds {build} of {size:,} bytes, and a disk tier of {disk_bytes:,} would evict a part of it: "
            f"give --disk-bytes {disk_gib(size)}GiB"
        )
