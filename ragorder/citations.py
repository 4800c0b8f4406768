"""Labels for documents, and the documents that an answer cites."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

from ragorder.document import Document

__all__ = ["cited", "number_label"]

D = TypeVar("D")

# A citation has no line break and at most 200 characters.
_CITATION = re.compile(r"\[([^\[\]\n]{1,200})\]")
_SEPARATOR = re.compile(r"[,;]")


def number_label(document: Document | str, *, digits: int = 4) -> str:
    """Return a number of `digits` digits (1 to 15), from the text alone.

    With 4 digits, one in 200 requests for ten documents has two with the same label.
    """
    if not 1 <= digits <= 15:
        raise ValueError(f"a label cannot have {digits} digits: give 1 to 15 digits")
    text = document if isinstance(document, str) else document.text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    lowest = 10 ** (digits - 1)
    return str(lowest + int.from_bytes(digest, "big") % (9 * lowest))


def cited(answer: str, documents: Iterable[D], label: Callable[[D], str]) -> list[D]:
    """Return the documents that an answer cites as [label] or [label, label], each once, in order of first citation.

        cited(answer, ordering.documents, number_label)

    Documents of equal labels are returned together; unknown labels are ignored.
    """
    by_label: dict[str, list[D]] = {}
    for document in documents:
        by_label.setdefault(label(document), []).append(document)
    found: list[D] = []
    for citation in _CITATION.finditer(answer):
        for name in (citation[1], *_SEPARATOR.split(citation[1])):
            found += by_label.pop(name.strip(), ())
    return found
