"""Documents in the requests of a proxy: how they are found and rendered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.options import Decorator, given, option, together
from ragorder.cli.values import Text
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments

__all__ = ["Documents", "documents_of", "prompt_options", "template_option"]


def template_option() -> Decorator:
    """Return --template."""
    return option(
        "--template",
        type=Text(),
        help="The form of one document in a message that is not tagged, with {text} and optionally {id}, {title}, {n} "
        "(a number that stays at its place) and {*} (anything within a line), such as "
        "'<document id=\"{id}\">\\n{text}\\n</document>': the first message with two or more in a row is read.",
    )


def prompt_options() -> Decorator:
    """Return the options for the documents in a prompt, without --template."""
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
    """How the proxy finds documents in requests, and how it renders them."""

    template: DocumentTemplate | None = None
    number_by_place: bool = False
    repeated: RepeatedDocuments | None = None
    forms: Mapping[str, str | None] = field(default_factory=dict)

    def builder(self, tokenizer: Any) -> PromptBuilder:
        """Return a builder of prompts. Raises click.UsageError for a wrong form."""
        try:
            return PromptBuilder("", tokenizer=tokenizer, **given(self.forms))
        except ValueError as error:
            raise click.UsageError(re.sub(r"^(\w+)_template", r"--\1-template", str(error))) from None


def documents_of(
    template: str | None, number_by_place: bool = False, dedup: str | None = None, **forms: str | None
) -> Documents:
    """Return the documents of these options. Raises click.UsageError."""
    from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments, TemplateError

    try:
        found = None if template is None else DocumentTemplate(template)
    except TemplateError as error:
        raise click.UsageError(f"--template: {error}") from None
    if number_by_place and found is not None and not (found.shows_id or found.shows_number):
        raise click.UsageError("--number-by-place: --template has no {id} to replace, and no {n}")
    repeated = None
    if dedup is not None:
        if found is None:
            raise click.UsageError("--dedup requires --template, which finds the documents of earlier messages")
        if number_by_place:
            raise click.UsageError("--dedup cannot be combined with --number-by-place: numbers differ by message")
        try:
            repeated = RepeatedDocuments(found, dedup)
        except TemplateError as error:
            raise click.UsageError(f"--dedup: {error}") from None
    documents = Documents(found, number_by_place, repeated, forms)
    documents.builder(None)
    return documents
