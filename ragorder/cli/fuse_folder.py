"""Folders of builds: what made them, and their builders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel, ConfigDict, Field

from ragorder.cli.fuse_progress import working
from ragorder.cli.options import build, spelling
from ragorder.cli.output import log_shown
from ragorder.cli.serve_engine import take_model
from ragorder.document import Document
from ragorder.jsonl import JSONLines, JSONLinesError
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.preprocessing.neighbours import make_neighbours
from ragorder.kernels.preprocessing.settings import PreprocessingSettings
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ragorder.kernels.preprocessing.builder import FusionBuilder
    from ragorder.kernels.preprocessing.plan import SourceDocument

__all__ = ["as_json", "check_recipe", "errors", "opened", "recipe_of"]

_EXAMPLE = '{"id": "a", "text": "…"}'
_PROMPT = ("system", "document_template")
# What may differ between a build and its continuation: where and how fast it is computed.
_FREE = {
    "model",
    "device",
    "device_tokens",
    "host_bytes",
    "profile",
    "profile_budget_s",
}


class CorpusLine(BaseModel):
    """A document; other fields are ignored."""

    model_config = ConfigDict(strict=True)

    id: str = Field(min_length=1)
    text: str
    title: str | None = None


@contextmanager
def opened(folder: Path, recipe: Mapping[str, Any]) -> Iterator[tuple[FusionBuilder, Any]]:
    """The builder of a folder, and a function that reads a corpus for it."""
    with errors():
        from ragorder.kernels.engine.loading import load_tokenizer
        from ragorder.kernels.preprocessing.builder import FusionBuilder

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
        engine = build(EngineSettings, {"profile": "auto"} | options)
        with (
            log_shown("ragorder.profile", "Profile"),
            FusionBuilder.load(model, folder, prompts.prefix_ids, choice, settings, engine, salt=salt) as builder,
        ):
            yield builder, lambda corpus: _read(corpus, prompts)


@contextmanager
def errors() -> Iterator[None]:
    from ragorder.kernels.store import StoreRefusedError

    try:
        yield
    except ImportError as error:
        raise click.ClickException(str(error)) from None
    except (JSONLinesError, StoreRefusedError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise click.ClickException(str(error)) from None


def _read(corpus: Path, prompts: PromptBuilder) -> list[SourceDocument]:
    from ragorder.kernels.preprocessing.plan import SourceDocument

    lines = JSONLines(corpus, example=_EXAMPLE)
    numbers: dict[str, int] = {}
    documents: list[SourceDocument] = []
    with working(f"reading {corpus.name}"):
        for number, line in lines.read(CorpusLine):
            if line.id in numbers:
                raise lines.error(
                    number, f"the id {line.id!r} occurs twice, first in line {numbers[line.id]}: drop or rename one"
                )
            numbers[line.id] = number
            document = Document(line.id, line.text, metadata={"title": line.title or ""})
            documents.append(SourceDocument(line.id, line.text, prompts.document_ids(document)))
    if not documents:
        raise lines.error(1, f"the file holds no documents: a line looks like {_EXAMPLE}")
    return documents


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
