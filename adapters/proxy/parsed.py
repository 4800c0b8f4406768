"""A request's body with documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragorder.adapters.proxy.body import Body, Route
from ragorder.adapters.proxy.marks import Left, MarkForm
from ragorder.document import Document
from ragorder.orderer import OrdererLike
from ragorder.trie.histories import Segment

__all__ = ["BodyMarks", "ParsedBody", "Route"]


@dataclass(frozen=True, slots=True)
class BodyMarks:
    """How a body is marked: `turns` marks stand at ends of a conversation's turns; mark 0, in front of the documents,
    only if that `has_front`."""

    form: MarkForm
    turns: int = 0
    has_front: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class ParsedBody:
    """A body with documents. Lengths are in tokens.

    - `render` gives the body to send, by the rank of the document at each place, and the numbers of leading documents
      behind which it is marked, if it takes `marks`
    - `suffix_tokens` follow the last document, `gaps` lie between them
    - `error`: the prefix could not be read
    - `sent`, of an earlier turn, gives the order in which its documents were sent, or None if that is unknown
    - `named`: ranks of the last message's documents that are named instead of sent
    - `orderer`: that of a cloud's model
    - `question`: what follows the documents, as segments that later requests of the conversation bring again
    - `left`: why the documents keep their order, and nothing is predicted
    - `values`: how many JSON values the body has at most
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
    sent: Callable[[], Sequence[int] | None] | None = None
    named: Sequence[int] = ()
    marks: BodyMarks | None = None
    orderer: OrdererLike | None = None
    question: Sequence[Segment] = ()
    left: Left | None = None
    values: int = 0
