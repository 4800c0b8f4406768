"""The field "ragorder" of a request's body: the documents, tagged."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.proxy.reading import TooManyError, decode_items
from ragorder.document import Document

__all__ = ["FIELD", "MAX_DOCUMENTS", "Tagged", "TaggedDocument", "json_schema", "read_tagged"]

FIELD = "ragorder"

MAX_DOCUMENTS = 1024
_MAX_NAME = 1024
_MAX_TEXT = 1_000_000
_MAX_TOKENS = 10_000_000
_UNKNOWN = "Object contains unknown field"
_MISSING = re.compile(r"Object missing required field `(\w+)`")
# A client may make up a name that looks like a place: only our own are believed.
_PLACE = re.compile(r" - at `\$((?:\.(?:documents|query|scope|id|text|title|tokens)|\[\d+\])*)`$")

_LENGTH = (
    "Its length in the prompt, header included, in tokens of the model; estimated if it is absent. A proxy that has "
)
_LENGTH += "the model's tokenizer counts for itself."
_TENANT = (
    "The tenant: requests of different scopes share nothing in the cache. It is sent as the body's `cache_salt`; if "
)
_TENANT += "that is there as well, it must be the same."


class TaggedDocument(Struct, frozen=True, forbid_unknown_fields=True):
    """A retrieved document."""

    id: Annotated[str, Meta(max_length=_MAX_NAME, description="Its name, which may stand in the prompt.")]
    text: Annotated[str, Meta(max_length=_MAX_TEXT, description="Its text.")]
    title: Annotated[str, Meta(max_length=_MAX_NAME, description="Its title, if the template shows it.")] | None = None
    # JSON knows no integers: 3.0 is one.
    tokens: (
        Annotated[int, Meta(ge=0, le=_MAX_TOKENS, description=_LENGTH)]
        | Annotated[float, Meta(ge=0, le=_MAX_TOKENS, multiple_of=1)]
        | None
    ) = None

    def document(self, tokens: int | None = None) -> Document:
        """The same as a document to be ordered; `tokens` if they are known better."""
        metadata = {} if self.title is None else {"title": self.title}
        if tokens is None and self.tokens is not None:
            tokens = int(self.tokens)
        return Document(self.id, self.text, tokens, metadata=metadata)


class Tagged(Struct, frozen=True, forbid_unknown_fields=True):
    """Documents and question. The proxy orders the documents, makes a prompt of both, and removes this field."""

    documents: Annotated[
        list[TaggedDocument],
        Meta(max_length=MAX_DOCUMENTS, description="In retrieval order, the most relevant first."),
    ]
    query: Annotated[str, Meta(max_length=_MAX_TEXT, description="The question, which comes after the documents.")]
    scope: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$", description=_TENANT)] | None = (
        None
    )


class _Counted(Struct):
    """What of the field is counted before anything of it is built."""

    documents: Raw = Raw(b"[]")


def read_tagged(content: bytes | Raw) -> Tagged:
    """Read the field, up to the first thing in it that is wrong. Raises ProxyError, which names that and quotes
    nothing."""
    try:
        decode_items(msgspec.json.decode(content, type=_Counted).documents, MAX_DOCUMENTS)
        return msgspec.json.decode(content, type=Tagged)
    except TooManyError:
        raise _error(f"{FIELD}.documents", f"Expected `array` of length <= {MAX_DOCUMENTS}") from None
    except msgspec.ValidationError as error:
        raise _read(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _error(FIELD, "It is no JSON in UTF-8") from None


def json_schema(reference: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of the field, and those that it refers to, by name; `reference` is where {name} is found."""
    (own,), schemas = msgspec.json.schema_components([Tagged], ref_template=reference)
    return own, schemas


def _read(complaint: str) -> ProxyError:
    """What msgspec complains of, without names that the client made up."""
    found = _PLACE.search(complaint)
    where = FIELD + (found[1] if found else "")
    if complaint.startswith(_UNKNOWN):
        return _error(where, "It has a field that is not known")
    missing = _MISSING.match(complaint)
    if missing:
        return _error(f"{where}.{missing[1]}", "It is missing")
    return _error(where, _PLACE.sub("", complaint))


def _error(where: str, what: str) -> ProxyError:
    message = f"{where}: {what}. GET /ragorder/openapi.json gives the schema."
    return ProxyError(400, message, code="invalid_ragorder", param=where)
