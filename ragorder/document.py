"""Retrieved document."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ragorder.common.counts import estimate_tokens

# Adapters by the package of foreign documents.
_ADAPTERS = {
    "langchain_core": "langchain (CacheOrderRetriever, CacheOrderTransformer)",
    "llama_index": "llama_index (CacheOrderRetriever, CacheOrderPostprocessor)",
    "haystack": "haystack (CacheOrderRanker)",
}


def content_key(id: str, text: str) -> str:
    name = id.encode("utf-8", "surrogatepass")
    digest = blake2b(len(name).to_bytes(8, "big"), digest_size=9)
    digest.update(name)
    digest.update(text.encode("utf-8", "surrogatepass"))
    return b64encode(digest.digest()).decode("ascii")


@dataclass(frozen=True, slots=True)
class Document:
    """A retrieved document, immutable.

        Document("faq-7", "Orders are shipped on the next working day.", metadata={"source": "faq"})

    `tokens`: length in the prompt, with header (default: estimated at four characters per token). `key` identifies id
    *and* text.
    """

    id: str
    text: str = ""
    tokens: int | None = None
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    key: str = field(init=False, repr=False, compare=False)
    token_count: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str):
            raise TypeError(f"Document.id must be a string, got {type(self.id).__name__}: pass str(id)")
        if not isinstance(self.text, str):
            raise TypeError(f"Document.text must be a string, got {type(self.text).__name__}: pass text='' for none")
        tokens = self.tokens
        if tokens is None:
            tokens = estimate_tokens(self.text)
        elif isinstance(tokens, bool) or not isinstance(tokens, int):
            raise TypeError(f"Document.tokens must be an integer or None, got {type(tokens).__name__}")
        elif tokens < 0:
            raise ValueError(f"Document.tokens must not be negative, got {tokens}")
        object.__setattr__(self, "token_count", tokens)
        object.__setattr__(self, "key", content_key(self.id, self.text))


def check_readable(given: Sequence[Any], wanted: Mapping[str, str]) -> None:
    """Raise TypeError if no object has one of the attributes `wanted`, given with their `Orderer` arguments."""
    missing = {name: argument for name, argument in wanted.items() if not any(_has(each, name) for each in given)}
    if given and missing:
        kind = type(given[0])
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        adapter = _ADAPTERS.get(kind.__module__.partition(".")[0])
        advice = "wrap each: ragorder.Document(id, text)" if adapter is None else f"use ragorder.adapters.{adapter}"
        if kind is tuple:
            advice = "leave the scores out"
        raise TypeError(
            f"documents must be ragorder.Document objects, got {name} without {' and '.join(map(repr, missing))}: "
            f"{advice}, or give Orderer({', '.join(f'{argument}=…' for argument in missing.values())})"
        )


def _has(document: Any, attribute: str) -> bool:
    try:
        return hasattr(document, attribute)
    except Exception:
        return True
