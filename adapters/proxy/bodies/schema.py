"""The field "ragorder" of a body, and the OpenAPI description."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.untrusted_json import NOT_JSON
from ragorder.adapters.structs import readable_by_threads
from ragorder.document import Document

FIELD = "ragorder"
# Headers of an ordered request's answer.
PERMUTATION = b"x-ragorder-permutation"
PREDICTED = b"x-ragorder-predicted-cached-tokens"
NAMED = b"x-ragorder-named"

MAX_DOCUMENTS = 1024
_MAX_NAME = 1024
_MAX_TEXT = 1_000_000
_MAX_TOKENS = 10_000_000
_UNKNOWN = "Object contains unknown field"
_MISSING = re.compile(r"Object missing required field `(\w+)`")
# A client may make up a name that looks like a path: only our own names are shown.
_PLACE = re.compile(r" - at `\$((?:\.(?:documents|query|scope|id|text|title|tokens)|\[\d+\])*)`$")

_LENGTH = (
    "Its length in the prompt, header included, in tokens of the model; estimated if it is absent. A proxy with the "
    "model's tokenizer counts by itself."
)
_TENANT = (
    "The tenant: requests of different scopes share nothing in the cache. It is sent as the body's `cache_salt`; if "
    "the body has one as well, they must be equal."
)

_REFERENCE = "#/components/schemas/"
_HEADERS = {
    PERMUTATION.decode(): {
        "description": "Ordered requests only: the rank, from 0, of the document at each position.",
        "schema": {"type": "string", "pattern": r"^\d+(,\d+)*$"},
    },
    PREDICTED.decode(): {
        "description": "Ordered requests only: predicted number of cached prompt tokens.",
        "schema": {"type": "integer", "minimum": 0},
    },
    NAMED.decode(): {
        "description": "With --dedup: the ranks, from 0, of the last message's documents that were named instead of "
        "sent, because an earlier message has them.",
        "schema": {"type": "string", "pattern": r"^\d+(,\d+)*$"},
    },
}


@readable_by_threads
class TaggedDocument(Struct, frozen=True, forbid_unknown_fields=True):
    """A retrieved document."""

    id: Annotated[str, Meta(max_length=_MAX_NAME, description="Its id, which the prompt may show.")]
    text: Annotated[str, Meta(max_length=_MAX_TEXT, description="Its text.")]
    title: Annotated[str, Meta(max_length=_MAX_NAME, description="Its title, if the template shows it.")] | None = None
    # JSON does not distinguish integers: 3.0 is one.
    tokens: (
        Annotated[int, Meta(ge=0, le=_MAX_TOKENS, description=_LENGTH)]
        | Annotated[float, Meta(ge=0, le=_MAX_TOKENS, multiple_of=1)]
        | None
    ) = None

    def document(self, tokens: int | None = None) -> Document:
        metadata = {} if self.title is None else {"title": self.title}
        if tokens is None and self.tokens is not None:
            tokens = int(self.tokens)
        return Document(self.id, self.text, tokens, metadata=metadata)


@readable_by_threads
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


def read_tagged(content: bytes | Raw) -> Tagged:
    """Raises HTTPError, which names the first wrong value and quotes no text."""
    try:
        return msgspec.json.decode(content, type=Tagged)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except NOT_JSON:
        raise _error(FIELD, "It is not JSON in UTF-8") from None


def openapi() -> dict[str, Any]:
    schemas = msgspec.json.schema_components([Tagged], ref_template=_REFERENCE + "{name}")[1]
    scope = schemas["Tagged"]["properties"]["scope"]
    salt = {"anyOf": scope["anyOf"], "default": scope["default"], "description": "The tenant's salt, as vLLM takes it."}
    for name, (field, kind, description) in _BODIES.items():
        prompt = kind | {"description": "The prompt before the documents."}
        schemas[f"{name}Body"] = _body(salt, {field: prompt}, description)
    parts = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
    error = {"type": "object", "properties": parts}
    schemas["Error"] = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    named = {"type": "object", "properties": {name: {"type": "string"} for name in ("type", "message")}}
    properties = {"type": {"const": "error"}, "error": named}
    schemas["MessagesError"] = {"type": "object", "properties": properties, "required": ["type", "error"]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ragorder serve",
            "version": version("ragorder"),
            "description": "An OpenAI-compatible proxy that orders the documents of a request for the prefix cache of "
            f"its server. They are in the field `{FIELD}` of a body; others are forwarded unchanged. "
            "Request the usage of streams (stream_options.include_usage): it reports the cached tokens.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _operation("chat", "ChatBody")},
            "/v1/completions": {"post": _operation("completions", "CompletionBody")},
            "/v1/messages": {"post": _operation("messages", "MessagesBody", error="MessagesError")},
            "/v1/responses": {"post": _operation("responses", "ResponsesBody")},
        },
        "components": {"schemas": schemas},
    }


_LIST = {"type": "array", "items": {"type": "object"}}
_MESSAGE = "Documents and question become one more user message after"
# The field of the prompt before the documents, and its type.
_BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Chat": ("messages", _LIST, f"The chat. {_MESSAGE} `messages`."),
    "Completion": ("prompt", {"type": "string"}, "The completion. Documents and question are appended to `prompt`."),
    "Messages": ("messages", _LIST, f"A request to Anthropic's API. {_MESSAGE} `messages`."),
    "Responses": (
        "input",
        {"type": ["string", "array"]},
        f"A request to OpenAI's API of responses. {_MESSAGE} `input`.",
    ),
}


def _body(salt: dict[str, Any], properties: dict[str, Any], description: str) -> dict[str, Any]:
    common = {"model": {"type": "string"}, "cache_salt": salt, FIELD: {"$ref": f"{_REFERENCE}Tagged"}}
    return {
        "type": "object",
        "properties": common | properties,
        "additionalProperties": True,
        "description": description + " Every other field is the upstream server's.",
    }


def _operation(name: str, body: str, error: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"{_REFERENCE}{error}"}}}
    refusals = {
        "400": "The field, or one that must agree with it, is invalid.",
        "401": "The proxy's API key is missing.",
        "413": "The body is too long.",
        "502": "The upstream server cannot be reached, or closed the connection.",
        "503": "Too many requests are waiting already.",
        "504": "The upstream server did not answer in time.",
    }
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": f"{_REFERENCE}{body}"}}}},
        "responses": {
            "default": {"description": "The upstream server's answer, unchanged.", "headers": _HEADERS},
            **{status: {"description": text, "content": content} for status, text in refusals.items()},
        },
    }


def _invalid(complaint: str) -> HTTPError:
    found = _PLACE.search(complaint)
    where = FIELD + (found[1] if found else "")
    if complaint.startswith(_UNKNOWN):
        return _error(where, "It has an unknown field")
    missing = _MISSING.match(complaint)
    if missing:
        return _error(f"{where}.{missing[1]}", "It is missing")
    return _error(where, _PLACE.sub("", complaint))


def _error(where: str, what: str) -> HTTPError:
    message = f"{where}: {what}. GET /ragorder/openapi.json gives the schema."
    return HTTPError(400, message, code="invalid_ragorder", param=where)
