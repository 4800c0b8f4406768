"""The command `ragorder tiers stats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ragorder.cli.options import Command, api_key, option
from ragorder.cli.output import show_figures, watch_options

if TYPE_CHECKING:
    from ragorder.adapters.observing.tier_stats import Hits, TierFigures, TierStats
    from ragorder.kernels.store import Survey

__all__ = ["stats"]

_SOURCES = {
    "device": "the device's own pool",
    "host": "host memory",
    "disk": "the disk",
    "elsewhere": "other servers or connectors",
    "computed": "computed: not found in any tier",
}


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@option("--base-url", metavar="URL", help="The vLLM server.")
@api_key("OPENAI_API_KEY")
@option(
    "--disk-path",
    "disk",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Also show the content of this folder of a disk tier; needs no server.",
)
@watch_options
def stats(
    base_url: str | None, disk: Path | None, api_key: str | None, interval_s: float | None, as_json: bool
) -> None:
    """Show the content of each tier, its hits, evictions and refused chunks.

    A server's gauges are those of its last step: they do not change while it is idle.
    """
    from ragorder.adapters.http_client import ServerError

    if base_url is None and disk is None:
        raise click.UsageError("give --base-url, --disk-path or both")
    try:
        show_figures(lambda: _TierFigures(base_url, disk, api_key), interval_s, as_json)
    except (ServerError, ImportError) as error:
        raise click.ClickException(str(error)) from None


class _TierFigures:
    def __init__(self, base_url: str | None, disk: Path | None, api_key: str | None) -> None:
        from ragorder.adapters.observing.tier_stats import fetch_tier_stats

        self._server: TierStats | None = fetch_tier_stats(base_url, api_key=api_key) if base_url else None
        self._folder: Survey | None = _look_into(disk) if disk else None

    def as_json(self) -> dict[str, Any]:
        figures: dict[str, Any] = {} if self._server is None else self._server.as_json()
        return figures if self._folder is None else figures | {"folder": asdict(self._folder)}

    def show(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._server is not None:
            parts += [_tiers_table(self._server.tiers), Text(), _hits_table(self._server.hits), Text()]
            parts.append(_facts(self._server))
        if self._folder is not None:
            parts += [Text()] * bool(parts)
            parts.append(_folder_table(self._folder))
        return Group(*parts)


def _look_into(folder: Path) -> Survey:
    from ragorder.kernels.store import survey

    try:
        found = survey(folder)
    except OSError as error:
        raise click.ClickException(f"{folder}: {error.strerror or error}") from None
    if found is None:
        raise click.ClickException(
            f"{folder} is not the folder of a disk tier: give the --disk-path of `ragorder tiers config`"
        )
    return found


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
            _alarming(tier.failed_transfers),
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
        text.append("; its prefill times are not measured yet: `ragorder serve --tiers` does it at its start", "yellow")
    if stats.unreadable_facts:
        text.append(f"; {stats.unreadable_facts:,} had malformed facts", "red")
    return text


def _folder_table(folder: Survey) -> Table:
    table = Table(title="Content of the folder", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    table.add_row("chunks", f"{folder.chunks:,}")
    table.add_row("bytes on disk", _bytes(folder.bytes))
    now = time()
    for name, written in (("oldest", folder.oldest), ("newest", folder.newest)):
        table.add_row(name, "–" if written is None else _age(max(0.0, now - written)))
    table.add_row("half-written files", f"{folder.unfinished:,}")
    table.add_row("used by process", folder.locked_by or "none")
    table.add_row("identity", folder.identity or "unknown")
    return table


def _alarming(count: int) -> Text:
    return Text(f"{count:,}", "red" if count else "")


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
