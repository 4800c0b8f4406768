"""The command `ragorder fuse`: documents' KV computed before it is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from sys import maxsize
from typing import Any

import click

from ragorder.cli.fuse_folder import as_json, check_recipe, errors, opened, recipe_of
from ragorder.cli.fuse_progress import compute, say_damaged, say_ready, working
from ragorder.cli.fuse_stats import stats
from ragorder.cli.options import (
    Command,
    CommandGroup,
    Decorator,
    ParamType,
    ProfileSource,
    given,
    option,
    options_from,
    section,
)
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.preprocessing.neighbours import neighbours
from ragorder.kernels.preprocessing.settings import PreprocessingSettings

__all__ = ["fuse"]

_HELP = {"help_option_names": ["-h", "--help"]}
_ENGINE = (
    "block_size",
    "max_model_len",
    "device_tokens",
    "max_batch_tokens",
    "profile",
    "profile_budget_s",
    "dtype",
    "device",
)

_corpus = click.argument("corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False))
_folder = click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))


class Shard(ParamType[tuple[int, int]]):
    """i/n: the part i of n."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value[0], value[1]
        found = re.fullmatch(r"([0-9]+)/([0-9]+)", value)
        number, parts = (int(found[1]), int(found[2])) if found is not None else (0, 0)
        if not 1 <= number <= parts:
            self.fail(f"{value!r} is no part: write 1/4 for the first of four", param, ctx)
        return number, parts


def _engine_options(*names: str) -> Decorator:
    return options_from(
        EngineSettings,
        *names,
        dtype={"metavar": "NAME"},
        device={"metavar": "NAME"},
        profile={"type": ProfileSource(), "metavar": ProfileSource.name, "default": "auto"},
    )


_model = option(
    "--model",
    required=True,
    metavar="FOLDER|NAME|smollm2|random",
    help="The model that will be served, as for `ragorder serve`.",
)
_moved_model = option("--model", metavar="FOLDER|NAME", help="Where the build's model is now.")
_source = {
    "metavar": "NAME[:ARGUMENT]",
    "help": f"How neighbours are found. {neighbours.help}.",
}
_shard = option("--shard", type=Shard(), metavar="i/n", default=(1, 1), help="Compute part i of n only.")


@click.group(cls=CommandGroup, context_settings=_HELP)
def fuse() -> None:
    """Compute documents' KV ahead of requests, each after similar documents.

    FusionRAG, section 3.1. `ragorder serve --engine torch --reuse fused` takes documents from such a folder.
    """


@fuse.command("build", cls=Command, context_settings=_HELP)
@_corpus
@option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="The build's folder.",
)
@_shard
@option("--resume", is_flag=True, help="Continue a build that was interrupted.")
@section(
    "Neighbours",
    options_from(PreprocessingSettings, "neighbours"),
    option("--neighbours-by", default="embedding", show_default=True, **_source),
)
@section(
    "Prompt, as in the requests",
    option("--system", metavar="TEXT", help="System prompt. [default: that of PromptBuilder]"),
    option(
        "--document-template",
        metavar="TEXT",
        help="A document in the prompt, with {id}, {text} and {title}. [default: that of PromptBuilder]",
    ),
    option(
        "--salt", metavar="TENANT", help='The tenant whose requests may use it: their "cache_salt". [default: none]'
    ),
)
@section(
    "Model", _model, _engine_options(*_ENGINE), options_from(PreprocessingSettings, "batch_documents", "host_bytes")
)
def build_command(corpus: Path, out: Path, shard: tuple[int, int], resume: bool, **options: Any) -> None:
    """Compute the KV of a corpus' documents into a folder.

    CORPUS is a file of JSON lines, plain or compressed: {"id", "text", "title"}; the title may be missing. The
    folder is a disk tier: `ragorder serve --engine torch --reuse fused --disk-path FOLDER` takes documents from it,
    wherever they stand in a prompt. Interrupted, it goes on with --resume.

    The prompts of the requests must begin with the same system prompt, and have the documents in the same form.
    """
    recipe = given(options) | {"model": _resolved(options["model"])}
    with opened(out, recipe) as (builder, read):
        documents = read(corpus)
        if not builder.facts:
            with working("choosing neighbours"):
                builder.plan(documents, {"recipe": as_json(recipe)})
        elif not resume:
            raise click.UsageError(
                f"{out} has a build: go on with --resume, extend it with `ragorder fuse add`, or name another folder"
            )
        else:
            check_recipe(builder.facts.get("recipe", {}), as_json(recipe), out)
            if not builder.is_planned(documents):
                raise click.UsageError(
                    f"the build in {out} is of other documents: use `ragorder fuse add`, or name another folder"
                )
            say_damaged(builder)
        compute(builder, shard)
        say_ready(builder, recipe)


@fuse.command(cls=Command, context_settings=_HELP)
@_folder
@_corpus
@option("--neighbours-by", **_source | {"help": "For vectors: the file with those of CORPUS. [default: as the build]"})
@option("--refresh", is_flag=True, help="Also recompute documents whose neighbours have changed.")
@_moved_model
@_engine_options("device_tokens", "device")
def add(folder: Path, corpus: Path, refresh: bool, **options: Any) -> None:
    """Add the documents of CORPUS to the build in FOLDER.

    Known ids whose text has changed are replaced; all others stay. A command that was interrupted is simply run again.
    """
    recipe = recipe_of(folder) | given(options)
    with opened(folder, recipe) as (builder, read):
        documents = read(corpus)
        with working("choosing neighbours"):
            changed = builder.add(documents)
            stale = builder.refresh() if refresh else len(builder.stale())
        click.echo(f"{changed:,} of {len(documents):,} documents are new or changed", err=True)
        if stale:
            click.echo(
                f"{stale:,} documents have other neighbours now{'' if refresh else ': --refresh recomputes them'}",
                err=True,
            )
        compute(builder, (1, 1))
        say_ready(builder, recipe)


@fuse.command(cls=Command, context_settings=_HELP)
@_folder
@click.argument("ids", nargs=-1, required=True, metavar="ID…")
def remove(folder: Path, ids: Sequence[str]) -> None:
    """Remove documents and their KV from the build in FOLDER.

    Documents that were computed behind them stay, and so does what a server has added to the folder: its KV of
    prompts that contain them.
    """
    with errors():
        from ragorder.kernels.preprocessing.manifest import Manifest
        from ragorder.kernels.preprocessing.removal import remove_documents
        from ragorder.kernels.store import ChunkStore

        with closing(Manifest.of(folder)) as known:
            named = known.facts["identity"]
        with closing(ChunkStore(folder, maxsize, named)) as store, closing(Manifest(folder)) as manifest:
            remove_documents(manifest, store, ids)
            click.echo(f"{len(set(ids)):,} documents removed, {len(manifest):,} left")


fuse.add_command(stats)


def _resolved(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model
