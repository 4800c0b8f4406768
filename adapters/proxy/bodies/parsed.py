"""A request's body with documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers
from ragorder.adapters.proxy.bodies.body import Body, PromptPrefix
from ragorder.adapters.proxy.bodies.marks import Left, MarkForm
from ragorder.adapters.proxy.bodies.schema import FIELD
from ragorder.adapters.request_facts import checked_salt
from ragorder.document import Document
from ragorder.protocols import OrdererLike
from ragorder.trie.histories import Segment


@dataclass(frozen=True, slots=True)
class BodyMarks:
    """`turns` breakpoints are at ends of turns. With `has_front` breakpoint 0, before the documents, is possible."""

    form: MarkForm
    turns: int = 0
    has_front: bool = False


PassReason = (
    Literal[
        "no_documents", "one_document", "not_numbered", "other_route", "too_many_values", "compressed", "unreadable"
    ]
    | Left
)
"""Why a request's documents are not ordered."""


class AnswerTranslator(Protocol):
    """Changes an answer for the client. Raises HTTPError if it cannot read it."""

    def begin(self, headers: Headers) -> Headers: ...

    def feed(self, chunk: bytes) -> bytes: ...

    def end(self) -> bytes: ...


@dataclass(frozen=True, eq=False, slots=True)
class ParsedBody:
    """Lengths are in tokens.

    - `render` returns the body to send, from the rank at each position and the numbers of documents that breakpoints
      follow, if it takes `marks`
    - `suffix_tokens` follow the last document, `gaps` are between documents
    - `error`: why the prefix could not be read
    - `sent` returns the sent order of an earlier turn's documents, or None if unknown
    - `named`: ranks of the last message's documents that are named instead of sent
    - `orderer`: that of a cloud's model
    - `question`: the text after the documents, in segments that later requests repeat
    - `left`: why the documents keep their order; the body may have changed otherwise
    - `on_prompt` gets the prompt's reported tokens
    - `translator` returns what translates citations, given the sent permutation"""

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
    left: PassReason | None = None
    values: int = 0
    on_prompt: Callable[[int | None], None] | None = None
    translator: Callable[[Sequence[int]], AnswerTranslator | None] | None = None


# Bytes of a part for which a copy takes less time than another call.
_SHORT = 4096


def digest_of(*parts: str | bytes | None) -> bytes:
    """Return 16 bytes for the parts and their boundaries."""
    digest = blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        if encoded is None:
            digest.update(b"-")
        elif len(encoded) < _SHORT:
            digest.update(b"%d:%b" % (len(encoded), encoded))
        else:
            digest.update(b"%d:" % len(encoded))
            digest.update(encoded)
    return digest.digest()


def scope_of(body: Body, salt: str | None, prefix: PromptPrefix) -> bytes:
    fields = (body.fields.get(name) for name in ("model", *body.shapes_prefix))
    return digest_of(
        body.route,
        salt,
        *(None if field is None else bytes(field) for field in fields),
        str(len(prefix.messages)),
        *map(bytes, prefix.messages),
        prefix.role,
        *map(bytes, prefix.parts),
        prefix.text,
    )


def salt_of(body: Body, scope: str | None) -> str | None:
    """Return the tenant's salt from either field. Raises HTTPError if they differ, or it is invalid."""
    salt = body.string("cache_salt")
    if scope is not None and salt not in (None, scope):
        message = f"{FIELD}.scope: differs from the body's cache_salt: give one of them."
        raise HTTPError(400, message, code="conflicting_scope", param=f"{FIELD}.scope")
    salt = scope if salt is None else salt
    if salt is None:
        return None
    try:
        return checked_salt(salt)
    except ValueError as error:
        raise HTTPError(400, f"cache_salt: {error}", code="invalid_cache_salt", param="cache_salt") from None
