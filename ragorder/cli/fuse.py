"""The command `ragorder fuse` (FusionRAG, section 3.1)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from sys import maxsize
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ragorder.cli.engine import take_model
from ragorder.cli.options import Command, CommandGroup, Decorator, build, given, option, options_from, section, spelling
from ragorder.cli.output import log_shown
from ragorder.cli.stats import disk_gib
from ragorder.cli.values import ParamType, ProfileSource
from ragorder.common.corpus import DocumentLine, by_id
from ragorder.document import Document
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.preprocessing.neighbours import PreprocessingSettings, make_neighbours, neighbours
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ragorder.kernels.preprocessing.builder import FusionBuilder, SourceDocument

_EXAMPLE = '{"id": "a", "text": "…"}'
_PROMPT = ("system", "document_template")
# Options that may differ between a build and its continuation: where and how fast it is computed.
_FREE = {"model", "device", "device_tokens", "host_bytes", "profile"}
_ENGINE = ("block_size", "max_model_len", "device_tokens", "max_batch_tokens", "profile", "dtype", "device")

_corpus = click.argument("corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False))
_folder = click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))


class Shard(ParamType[tuple[int, int]]):
    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value[0], value[1]
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", value)
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
        profile={"type": ProfileSource(), "metavar": ProfileSource.name, "unset": "auto"},
    )


_model = option(
    "--model",
    required=True,
    metavar="FOLDER|NAME|smollm2|random",
    help="The model that will be served, as for `ragorder engine`.",
)
_moved_model = option("--model", metavar="FOLDER|NAME", help="Where the build's model is now.")
_source = {"metavar": "NAME[:ARGUMENT]", "help": f"How neighbours are found. {neighbours.help}."}
_shard = option("--shard", type=Shard(), metavar="i/n", default=(1, 1), help="Compute part i of n only.")


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def fuse() -> None:
    """Compute documents' KV before they are requested, each after similar documents.

    FusionRAG, section 3.1. `ragorder engine --reuse fused` reuses documents of such a folder; `ragorder stats` shows
    what it holds.
    """


@fuse.command(
    "build",
    cls=Command,
    examples=[
        "ragorder fuse build corpus.jsonl --model smollm2 --out /var/kv",
        "ragorder fuse build corpus.jsonl --model smollm2 --out /var/kv --resume",
    ],
)
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
    option("--system", metavar="TEXT", help="System prompt.", unset="that of PromptBuilder"),
    option(
        "--document-template",
        metavar="TEXT",
        help="How the prompt shows a document, with {id}, {text} and {title}.",
        unset="that of PromptBuilder",
    ),
    option(
        "--salt", metavar="TENANT", help='The tenant whose requests may use it: their "cache_salt".', unset="no tenant"
    ),
)
@section(
    "Model", _model, _engine_options(*_ENGINE), options_from(PreprocessingSettings, "batch_documents", "host_bytes")
)
def build_command(corpus: Path, out: Path, shard: tuple[int, int], resume: bool, **options: Any) -> None:
    """Compute the KV of a corpus' documents into a folder.

    CORPUS is a file of JSON lines, plain or compressed: {"id", "text", "title"}; the title may be missing. The folder
    is a disk tier: `ragorder engine --reuse fused --disk-path FOLDER` reuses its documents at any place in a prompt.

    The prompts of the requests must begin with the same system prompt, and have the documents in the same form.
    """
    model = Path(options["model"])
    recipe = given(options) | ({"model": str(model.resolve())} if model.is_dir() else {})
    with opened(out, recipe, corpus) as (builder, documents):
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


@fuse.command(cls=Command, examples=["ragorder fuse add /var/kv more.jsonl --refresh"])
@_folder
@_corpus
@option(
    "--neighbours-by",
    **_source | {"help": "For a build by vectors:FILE, the file with those of CORPUS.", "unset": "as the build"},
)
@option("--refresh", is_flag=True, help="Also recompute documents whose neighbours have changed.")
@_moved_model
@_engine_options("device_tokens", "device")
def add(folder: Path, corpus: Path, refresh: bool, **options: Any) -> None:
    """Add the documents of CORPUS to the build in FOLDER.

    A document with a known id and another text replaces the old one; all others stay. If the command was interrupted,
    run it again.
    """
    recipe = recipe_of(folder) | given(options)
    with opened(folder, recipe, corpus) as (builder, documents):
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


@fuse.command(cls=Command, examples=["ragorder fuse remove /var/kv faq-7 faq-8"])
@_folder
@click.argument("ids", nargs=-1, required=True, metavar="ID…")
def remove(folder: Path, ids: Sequence[str]) -> None:
    """Remove documents and their KV from the build in FOLDER.

    Other documents stay, also those whose KV was computed after a removed one. So does the KV of prompts with removed
    documents that a server has added to the folder.
    """
    with errors():
        from ragorder.kernels.preprocessing.manifest import Manifest, remove_documents
        from ragorder.kernels.store import ChunkStore

        with closing(Manifest.of(folder)) as known:
            named = known.facts["identity"]
        with closing(ChunkStore(folder, maxsize, named)) as store, closing(Manifest(folder)) as manifest:
            remove_documents(manifest, store, ids)
            click.echo(f"{len(set(ids)):,} documents removed, {len(manifest):,} left")


@contextmanager
def opened(
    folder: Path, recipe: Mapping[str, Any], corpus: Path
) -> Iterator[tuple[FusionBuilder, list[SourceDocument]]]:
    with errors():
        from ragorder.kernels.models.loading import load_tokenizer
        from ragorder.kernels.preprocessing.builder import FusionBuilder, SourceDocument

        # Errors in the corpus are found before a model is loaded.
        read = _read(corpus)
        options = dict(recipe)
        choice = make_neighbours(options.pop("neighbours_by"))
        salt = options.pop("salt", None)
        prompt = {name: options.pop(name) for name in _PROMPT if name in options}
        settings = build(
            PreprocessingSettings, {n: options.pop(n) for n in PreprocessingSettings.model_fields if n in options}
        )
        model = take_model(options)
        tokenizer = load_tokenizer(model)
        if tokenizer is None:
            raise click.UsageError(f"--model {model}: documents cannot be tokenised: the folder has no tokenizer")
        prompts = PromptBuilder(**prompt, tokenizer=tokenizer)
        documents = [SourceDocument(each.id, each.text, prompts.document_ids(each)) for each in read]
        engine = build(EngineSettings, {"profile": "auto"} | options)
        with (
            log_shown("ragorder.profile", "Profile"),
            FusionBuilder.load(model, folder, prompts.prefix_ids, choice, settings, engine, salt=salt) as builder,
        ):
            yield builder, documents


@contextmanager
def errors() -> Iterator[None]:
    from ragorder.kernels.store import StoreRefusedError

    try:
        yield
    except (ImportError, StoreRefusedError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise click.ClickException(str(error)) from None


def _read(corpus: Path) -> list[Document]:
    with working(f"reading {corpus.name}"):
        lines = by_id(corpus, DocumentLine, example=_EXAMPLE)
    return [Document(id, each.fields.text, metadata={"title": each.fields.title or ""}) for id, each in lines.items()]


def as_json(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in recipe.items()}


def recipe_of(folder: Path) -> dict[str, Any]:
    with errors():
        from ragorder.kernels.preprocessing.manifest import Manifest

        with closing(Manifest.of(folder)) as manifest:
            recipe: dict[str, Any] = manifest.facts.get("recipe", {})
    if not recipe:
        raise click.ClickException(f"{folder} was not built by `ragorder fuse build`: extend it as it was made")
    return recipe


def check_recipe(made: Mapping[str, Any], asked: Mapping[str, Any], folder: Path) -> None:
    for name in sorted((made.keys() | asked.keys()) - _FREE):
        if made.get(name) != asked.get(name):
            was, wanted = made.get(name, "unset"), asked.get(name, "unset")
            raise click.UsageError(
                f"the build in {folder} has {spelling(name)} {was!r}, not {wanted!r}: give the same, or another folder"
            )


@contextmanager
def working(on: str) -> Iterator[None]:
    with Console(stderr=True).status(on):
        yield


def compute(builder: FusionBuilder, shard: tuple[int, int]) -> None:
    estimate = builder.estimate(shard)
    click.echo(
        f"{estimate.documents:,} documents to compute, {estimate.tokens:,} tokens: {estimate.bytes:,} bytes", err=True
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("documents", total=estimate.bytes)
        for number, built in enumerate(builder.build(shard), 1):
            bar.update(task, advance=built.bytes, description=f"document {number:,} of {estimate.documents:,}")


def say_damaged(builder: FusionBuilder) -> None:
    with working("checking what is there"):
        builder.verify()
    if damaged := sum(builder.damaged.values()):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in builder.damaged.items())
        click.echo(f"{damaged:,} damaged ({reasons}): computed again", err=True)


def say_ready(builder: FusionBuilder, recipe: Mapping[str, Any]) -> None:
    left = builder.estimate()
    size = builder.size
    click.echo(
        f"{len(builder) - left.documents:,} of {len(builder):,} documents are in {builder.folder}: {size:,} bytes"
    )
    if left.documents:
        click.echo(f"{left.documents:,} are missing")
    else:
        identical = "".join(
            f" {spelling(name)} {recipe[name]}" for name in ("block_size", "dtype", "device") if name in recipe
        )
        click.echo(
            f"ragorder engine --model {recipe['model']}{identical} --reuse fused "
            f"--copies all --disk-path {builder.folder} --disk-bytes {disk_gib(size)}GiB"
        )
