"""The description of what the proxy takes: OpenAPI 3.1."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from ragorder.adapters.proxy.schema import FIELD, json_schema
from ragorder.adapters.proxy.settling import PERMUTATION, PREDICTED

__all__ = ["describe"]

_REFERENCE = "#/components/schemas/"
_HEADERS = {
    PERMUTATION.decode(): {
        "description": "Of an ordered request: which document stands at each place, by its rank from 0.",
        "schema": {"type": "string", "pattern": r"^\d+(,\d+)*$"},
    },
    PREDICTED.decode(): {
        "description": "Of an ordered request: prompt tokens that the server was predicted to have in its cache.",
        "schema": {"type": "integer", "minimum": 0},
    },
}


def describe() -> dict[str, Any]:
    """The OpenAPI document of the two routes that are looked at. Everything else is the upstream server's."""
    _, schemas = json_schema(_REFERENCE + "{name}")
    schemas["ChatBody"] = _body(
        {"messages": {"type": "array", "items": {"type": "object"}, "description": "What comes before the documents."}},
        "The chat. Documents and question become one more message, of the user, behind `messages`.",
    )
    schemas["CompletionBody"] = _body(
        {"prompt": {"type": "string", "description": "What comes before the documents."}},
        "The completion. Documents and question are put behind `prompt`.",
    )
    parts = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
    error = {"type": "object", "properties": parts}
    schemas["Error"] = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ragorder serve",
            "version": version("ragorder"),
            "description": "An OpenAI-compatible proxy that orders the documents of a request for the prefix cache of "
            f"the server behind it. They come in the field `{FIELD}` of a body; requests without it pass as they are. "
            "Ask for the usage of streams (stream_options.include_usage): it says what the cache had.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _operation("chat", "ChatBody")},
            "/v1/completions": {"post": _operation("completions", "CompletionBody")},
        },
        "components": {"schemas": schemas},
    }


def _body(properties: dict[str, Any], description: str) -> dict[str, Any]:
    common = {
        "model": {"type": "string"},
        "cache_salt": _tenant() | {"description": "The tenant's salt, as vLLM takes it."},
        FIELD: {"$ref": f"{_REFERENCE}Tagged"},
    }
    return {
        "type": "object",
        "properties": common | properties,
        "additionalProperties": True,
        "description": description + " Every other field is the upstream server's.",
    }


def _tenant() -> dict[str, Any]:
    """What a salt may be."""
    schema = json_schema(_REFERENCE + "{name}")[1]["Tagged"]["properties"]["scope"]
    return {name: schema[name] for name in ("anyOf", "default")}


def _operation(name: str, body: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"{_REFERENCE}Error"}}}
    refusals = {
        "400": "The field, or what must fit it, is not what it should be.",
        "401": "The proxy's API key is missing.",
        "413": "The body is too long.",
        "502": "The upstream server cannot be reached, or broke off.",
        "503": "Too many requests wait for their turn already.",
        "504": "The upstream server did not answer in time.",
    }
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": f"{_REFERENCE}{body}"}}}},
        "responses": {
            "default": {"description": "The upstream server's answer, as it is.", "headers": _HEADERS},
            **{status: {"description": text, "content": error} for status, text in refusals.items()},
        },
    }
