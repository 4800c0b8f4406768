"""Documents in what a retriever returned, as frameworks write them into traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ragorder.common.counts import estimate_tokens
from ragorder.common.jsonl import decode
from ragorder.common.request_lines import LineDocument
from ragorder.document import content_key

_LISTS = ("documents", "output", "results")
_IDS = ("id", "id_", "document_id", "doc_id", "chunk_id")
_TEXTS = ("page_content", "pageContent", "content", "text", "document")
# Where a document's fields are not in the object itself: LlamaIndex's nodes, LangChain's serialised objects, and pairs
# of a document and its score.
_INNER = ("node", "kwargs", "document")


def structure(value: Any, field: str) -> Any:
    """A value that may be JSON text, as stores keep it. Raises ValueError naming the field."""
    if not isinstance(value, str):
        return value
    try:
        return decode(value.encode("utf-8", "surrogatepass"))
    except ValueError:
        raise ValueError(f'"{field}" is text that is not JSON: export the documents as a list of objects') from None


def exported_documents(value: Any, field: str) -> list[LineDocument]:
    """The documents of a retriever's output: a list, or an object that holds it. None of a retrieval that failed.
    Raises ValueError naming the field."""
    found = _list_in(structure(value, field))
    if found is None or found == {}:
        return []
    if not isinstance(found, list):
        raise ValueError(f'"{field}" holds no list of documents: give [{{"id", "page_content"}}, …]')
    return [_document(each, f"{field}[{place}]") for place, each in enumerate(found)]


def holds_documents(value: Any) -> bool:
    """Whether a step's output is a list of objects with texts, or an object that holds it. Messages are none."""
    try:
        found = _list_in(structure(value, ""))
    except ValueError:
        return False
    documents = [_object(each) for each in found] if isinstance(found, list) else []
    return bool(documents) and all(_text(each) and "role" not in each for each in documents)


def exported_document(id: str | int | None, text: str | None, field: str) -> LineDocument:
    """A document by its id or, without one, by its text; with a text its length is estimated from that. Raises
    ValueError naming the field."""
    if id is None and not text:
        raise ValueError(f'"{field}" has neither an id nor a text: export one of them')
    if id is None:
        id = content_key("", text or "")
    return LineDocument(id=id, tokens=int(estimate_tokens(text)) if text else None)


def _list_in(found: Any) -> Any:
    if isinstance(found, dict):
        return next((found[name] for name in _LISTS if isinstance(found.get(name), list)), found)
    return found


def _document(value: Any, field: str) -> LineDocument:
    value = _object(value)
    if isinstance(value, str):
        return exported_document(None, value, field)
    if not isinstance(value, dict):
        raise ValueError(f'"{field}" must be an object with an id or a text')
    # LangChain's Document has an optional id, and its stores put theirs into the metadata.
    places = [*_places(value), *(each for each in (value.get("metadata"),) if isinstance(each, dict))]
    ids = (place.get(name) for place in places for name in _IDS)
    id = next((each for each in ids if isinstance(each, str | int) and not isinstance(each, bool)), None)
    return exported_document(id, _text(value), field)


def _object(value: Any) -> Any:
    """An object that is JSON text, as OpenLLMetry writes LlamaIndex's nodes; any other value as it is."""
    if not (isinstance(value, str) and value.startswith("{")):
        return value
    try:
        found = structure(value, "")
    except ValueError:
        return value
    return found if _text(found) else value


def _text(value: Any) -> str | None:
    texts = (place.get(name) for place in _places(value) for name in _TEXTS)
    return next((each for each in texts if isinstance(each, str)), None)


def _places(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        yield from (value[name] for name in _INNER if isinstance(value.get(name), dict))
