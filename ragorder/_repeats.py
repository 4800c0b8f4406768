"""Documents that stand in earlier messages of a conversation, and are named instead of sent again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from string import Formatter
from typing import Protocol

from ragorder.document import Document

__all__ = ["ShownDocuments", "check_reference", "name_in", "openings_behind", "stands_in"]


class ShownDocuments(Protocol):
    """How a prompt shows documents: as much of a `MessageFormat` as is needed here."""

    @property
    def document_text(self) -> Callable[[Document], str]: ...

    @property
    def header(self) -> Callable[[Document], str]: ...

    @property
    def escape(self) -> Callable[[str], str]: ...

    @property
    def openings(self) -> tuple[str, ...]: ...


def stands_in(
    form: ShownDocuments, document: Document, reference: str, texts: Sequence[str], openings: tuple[str, ...]
) -> bool:
    """Whether the last version of a document that stands in the texts is this one, whole."""
    text, name = form.escape(form.document_text(document)), form.escape(name_in(reference, document))
    header = form.escape(form.header(document))
    # Without a header it may be a part of another document.
    if not text.strip() or not header.strip() or not text.startswith(header):
        return False
    for content in reversed(texts):
        place = content.rfind(header)
        # Where it is only named, it stands further above.
        while place >= 0 and content.startswith(name, place) and not content.startswith(text, place):
            place = content.rfind(header, 0, place + len(header) - 1)
        if place >= 0:
            end = place + len(text)
            whole = end == len(content) or not openings or content.startswith(openings, end)
            return whole and content.startswith(text, place)
    return False


def openings_behind(form: ShownDocuments, reference: str) -> tuple[str, ...]:
    """What may stand directly behind a document; empty: anything."""
    openings = (*form.openings, _opening(reference))
    return openings if all(openings) else ()


def name_in(reference: str, document: Document) -> str:
    return reference.format(id=document.id, title=str(document.metadata.get("title", "")))


@lru_cache(maxsize=64)
def check_reference(reference: str) -> None:
    """Raises ValueError."""
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
