"""The command `ragorder fuse stats`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table

from ragorder.cli.options import Command
from ragorder.cli.output import show_figures, watch_options

__all__ = ["check_fits", "disk_gib", "stats"]

# Of a disk tier for a build, so that new documents evict none of it at once.
_SPARE = 1.25
_GIB = 1 << 30


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@watch_options
def stats(folder: Path, interval_s: float | None, as_json: bool) -> None:
    """Show what the build in FOLDER holds; it may be in use."""
    try:
        show_figures(lambda: _read(folder), interval_s, as_json)
    except (ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from None


@dataclass(frozen=True, slots=True)
class BuildFigures:
    """A build: its documents, those with KV on the disk, and what that takes. `other_chunks`: the system prompt's, and
    what a server has added."""

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
        table = Table(title="Documents' KV", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(justify="right", overflow="fold")
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
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def _read(folder: Path) -> BuildFigures:
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
    return BuildFigures(
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
    """GiB of a disk tier for a build of so many bytes."""
    return max(1, -(-int(_SPARE * size) // _GIB))


def check_fits(folder: Path, disk_bytes: int) -> None:
    """Raises click.UsageError for a build of which a disk tier of so many bytes would remove a part."""
    from ragorder.kernels.preprocessing.manifest import ManifestError

    try:
        found = _read(folder)
    except (ManifestError, OSError):
        # There is no build, or the engine says what is wrong with it.
        return
    if found.bytes > disk_bytes:
        raise click.UsageError(
            f"{folder} holds a build of {found.bytes:,} bytes, and a disk tier of {disk_bytes:,} would remove a part "
            f"of it: give --disk-bytes {disk_gib(found.bytes)}GiB"
        )
