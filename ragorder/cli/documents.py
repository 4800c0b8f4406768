"""Options for the documents in a proxy's requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.options import Decorator, given, option, together
from ragorder.cli.values import Text
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments


def template_option() -> Decorator:
    return option(
        "--template",
        type=Text(),
        metavar="FORM|NAME|auto|none|FILE.toml",
        help="How documents are found in a message that is not tagged: the form of one document, with {text} and "
        "optionally {id}, {title}, {n} (a number that stays at its place) and {*} (anything within a line), such as "
        "'<document id=\"{id}\">\\n{text}\\n</document>'; the name of an application (docs/proxy.md lists them), or "
        "memories for lists of memories or skills; a file with a form; or auto: applications whose prompts are "
        "unmistakable. The first message with two or more documents in a row is read.",
        unset="only documents in the API's own form (none ignores these too); what an application's name would save is "
        "shown",
    )


def prompt_options() -> Decorator:
    return together(
        option(
            "--number-by-place",
            is_flag=True,
            help="Replace ids that are retrieval ranks (1, 2, 3, …), which would defeat the cache, by the documents' "
            "places in the prompt; other ids stay. The answer's header x-ragorder-permutation maps places to "
            "documents.",
        ),
        option(
            "--dedup",
            type=Text(),
            help="Replace a document that --template finds again in a later message of a conversation by this text "
            "with {id}, such as '[{id}] is above.' The answer's header x-ragorder-named has the ranks of those in "
            "the last message.",
        ),
        option(
            "--document-template",
            type=Text(),
            help="The form of a tagged document in the prompt, with {text} and optionally {id}, {title} and {label}, a "
            "number made from its text for citations.",
            unset=r"'[{id}]\n{text}\n\n'",
        ),
        option(
            "--question-template",
            type=Text(),
            help="The form of the query in the prompt, after tagged documents.",
            unset="'Question: {query}'",
        ),
    )


@dataclass(frozen=True, slots=True)
class Documents:
    """How the proxy finds documents in requests and renders them."""

    templates: Sequence[DocumentTemplate] = ()
    recognises: bool = True
    """Whether to recognise prompts of known applications, and say what ordering them would save."""
    number_by_place: bool = False
    repeated: RepeatedDocuments | None = None
    forms: Mapping[str, str | None] = field(default_factory=dict)

    def builder(self, tokenizer: Any) -> PromptBuilder:
        """Return the builder for requests with a system message."""
        return self._builder(tokenizer, system="")

    def own_builder(self, tokenizer: Any) -> PromptBuilder:
        """Return the builder of whole prompts, for bare questions."""
        return self._builder(tokenizer)

    def _builder(self, tokenizer: Any, **system: Any) -> PromptBuilder:
        try:
            return PromptBuilder(tokenizer=tokenizer, **system, **given(self.forms))
        except ValueError as error:
            raise click.UsageError(re.sub(r"^(\w+)_template", r"--\1-template", str(error))) from None


def documents_of(
    template: str | None, number_by_place: bool = False, dedup: str | None = None, **forms: str | None
) -> Documents:
    from ragorder.adapters.proxy import RepeatedDocuments, TemplateError
    from ragorder.adapters.proxy.bodies.presets import NONE, find_templates, presets

    try:
        found = [] if template is None else find_templates(template)
    except TemplateError as error:
        raise click.UsageError(f"--template: {error}") from None
    if template is not None and (preset := presets().get(template)) is not None and preset.citations == "places":
        click.echo(
            f"Warning: --template {template}: numbers of documents stay at their places, so [2] in an answer is the "
            "second document of the sent order: read x-ragorder-permutation, or show no citations",
            err=True,
        )
    if number_by_place and not all(each.shows_id or each.shows_number for each in found):
        raise click.UsageError("--number-by-place: --template has no {id} to replace, and no {n}")
    repeated = None
    if dedup is not None:
        if len(found) != 1:
            raise click.UsageError(
                "--dedup requires --template, and one form alone, to find the documents of earlier messages"
            )
        if number_by_place:
            raise click.UsageError("--dedup cannot be combined with --number-by-place: numbers differ by message")
        try:
            repeated = RepeatedDocuments(found[0], dedup)
        except TemplateError as error:
            raise click.UsageError(f"--dedup: {error}") from None
    documents = Documents(found, template != NONE, number_by_place, repeated, forms)
    documents.builder(None)
    return documents
