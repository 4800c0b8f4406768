"""A request's body with documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from ragorder.adapters.proxy.body import Body
from ragorder.document import Document
from ragorder.ordering import Ordering

__all__ = ["ParsedBody", "Route"]

Route = Literal["chat", "completions", "messages", "responses", "other"]


@dataclass(frozen=True, eq=False, slots=True)
class ParsedBody:
    """A body with documents. Lengths are in tokens.

    - `render` gives the body to send, by the rank of the document at each place, and the numbers of leading documents
      behind which it is marked, if `is_marked`
    - `suffix_tokens` follow the last document, `gaps` lie between them
    - `error`: the prefix could not be read
    - `choose` gives the permutation that is sent for an ordering
    - `named`: ranks of the last message's documents that are named instead of sent
    """

    body: Body
    documents: list[Document]
    suffix_tokens: int
    render: Callable[[Sequence[int], Sequence[int]], bytes]
    gaps: Sequence[int] = ()
    salt: str | None = None
    scope: bytes = b""
    prefix_tokens: int = 0
    error: Exception | None = None
    choose: Callable[[Ordering[Document]], Sequence[int]] = attrgetter("permutation")
    named: Sequence[int] = ()
    is_marked: bool = False
