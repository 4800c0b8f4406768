"""Documents of earlier messages that are named instead of repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from string import Formatter
from typing import Protocol

from ragorder.document import Document

__all__ = ["ShownDocuments", "appears_in", "check_reference", "name_in", "openings_after"]


class ShownDocuments(Protocol):
    """The part of a `MessageFormat` that describes how a prompt shows documents."""

    @property
    def document_text(self) -> Callable[[Document], str]: ...

    @property
    def header(self) -> Callable[[Document], str]: ...

    @property
    def escape(self) -> Callable[[str], str]: ...

    @property
    def openings(self) -> tuple[str, ...]: ...


def appears_in(
    form: ShownDocuments, document: Document, reference: str, texts: Sequence[str], openings: tuple[str, ...]
) -> bool:
    """Return whether the texts contain the document, and its last version there is this one, complete."""
    text, name = form.escape(form.document_text(document)), form.escape(name_in(reference, document))
    header = form.escape(form.header(document))
    # Without a header the text may be a part of another document.
    if not text.strip() or not header.strip() or not text.startswith(header):
        return False
    for content in reversed(texts):
        place = content.rfind(header)
        # Skip places where the document is only named; its text is further above.
        while place >= 0 and content.startswith(name, place) and not content.startswith(text, place):
            place = content.rfind(header, 0, place + len(header) - 1)
        if place >= 0:
            end = place + len(text)
            whole = end == len(content) or not openings or content.startswith(openings, end)
            return whole and content.startswith(text, place)
    return False


def openings_after(form: ShownDocuments, reference: str) -> tuple[str, ...]:
    """Return the texts that may directly follow a document; empty if any text may."""
    openings = (*form.openings, _opening(reference))
    return openings if all(openings) else ()


def name_in(reference: str, document: Document) -> str:
    return reference.format(id=document.id, title=str(document.metadata.get("title", "")))


@lru_cache(maxsize=64)
def check_reference(reference: str) -> None:
    """Raise ValueError for an invalid reference template."""
    try:
        fields = {name for _, name, *_ in Formatter().parse(reference) if name is not None}
        reference.format(id="", title="")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"reference: {error}; it may use {{id}} and {{title}}") from None
    if "id" not in fields and "title" not in fields:
        raise ValueError(f"reference must name the document by {{id}} or {{title}}: {reference!r}")


@lru_cache(maxsize=64)
def _opening(template: str) -> str:
    return next((literal for literal, *_ in Formatter().parse(template)), "")
