"""Haystack: ranker in cache order."""

from __future__ import annotations

from typing import Any, Self

from ragorder.common.extras import install_hint

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.utils import deserialize_callable, serialize_callable
except ImportError as error:
    raise ImportError(f"ragorder.adapters.haystack needs haystack-ai: {install_hint('haystack')}") from error

from ragorder.adapters.reorder import Key, Reorder, Tokens
from ragorder.orderer import Orderer, OrdererLike
from ragorder.settings import Settings

__all__ = ["CacheOrderRanker"]

_FUNCTIONS = ("key", "tokens")


@component
class CacheOrderRanker:
    """Ranker that orders documents for the engine's prefix cache, directly before the prompt builder. Thread-safe.

        pipeline.add_component("cache_order", CacheOrderRanker(orderer))

    - `orderer`, or `settings` for a new one (default: from the environment).
    - `top_k`: the most documents. Duplicates are kept.
    - `scope`: the tenant.
    - `key`: a document's identity besides its content (default: its id).
    - `tokens`: its length in the prompt.

    Errors in these functions leave retrieval order, and the orderer counts them. Orderings count as served at once.
    `from_dict` makes a new orderer with the same settings; `key` and `tokens` must be functions of a module. Raises
    ValueError for a `top_k` below 1 and for both orderer and settings; pydantic.ValidationError for settings.
    """

    def __init__(
        self,
        orderer: OrdererLike | None = None,
        *,
        settings: dict[str, Any] | None = None,
        top_k: int | None = None,
        scope: str | None = None,
        key: Key | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        if orderer is not None and settings is not None:
            raise ValueError("give either an orderer or settings, not both")
        _check(top_k)
        orderer = orderer if orderer is not None else Orderer(Settings(**settings or {}))
        self.top_k = top_k
        self.scope = scope
        self._reorder = Reorder(orderer, text=_text, own_id=_id, metadata=_meta, key=key, tokens=tokens)

    @property
    def orderer(self) -> OrdererLike:
        return self._reorder.orderer

    def to_dict(self) -> dict[str, Any]:
        """Raises haystack's SerializationError for functions without a name."""
        functions = {name: getattr(self._reorder, name) for name in _FUNCTIONS}
        return default_to_dict(
            self,
            settings=self.orderer.settings.model_dump(),
            top_k=self.top_k,
            scope=self.scope,
            **{name: function and serialize_callable(function) for name, function in functions.items()},
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        parameters = data.get("init_parameters", {})
        functions = {name: deserialize_callable(parameters[name]) for name in _FUNCTIONS if parameters.get(name)}
        return default_from_dict(cls, data | {"init_parameters": parameters | functions})

    @component.output_types(documents=list[Document])
    def run(
        self, documents: list[Document], top_k: int | None = None, scope: str | None = None
    ) -> dict[str, list[Document]]:
        """Return the ordered `documents`; `top_k` and `scope` override the ranker's own. Raises ValueError for a
        `top_k` below 1."""
        _check(top_k)
        best = documents[: top_k or self.top_k]
        ordered, ordering = self._reorder.within(self.scope if scope is None else scope, best)
        ordering.confirm()
        return {"documents": ordered}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, documents: list[Document], top_k: int | None = None, scope: str | None = None
    ) -> dict[str, list[Document]]:
        # Ordering takes a fraction of a millisecond, without waiting.
        return self.run(documents, top_k, scope)


def _check(top_k: int | None) -> None:
    if top_k is not None and top_k <= 0:
        raise ValueError(f"top_k is {top_k}: give 1 or more")


def _text(document: Document) -> str:
    return document.content or ""


def _id(document: Document) -> str:
    return document.id


def _meta(document: Document) -> dict[str, Any]:
    return document.meta
