"""Haystack: a ranker that puts documents in the order that the engine's cache wants."""

from __future__ import annotations

from typing import Any, Self

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.utils import deserialize_callable, serialize_callable
except ImportError as error:
    raise ImportError("ragorder.adapters.haystack needs haystack-ai: pip install 'ragorder[haystack]'") from error

from ragorder.adapters.reorder import Key, Reorder, Tokens
from ragorder.orderer import Orderer
from ragorder.orderer_like import OrdererLike
from ragorder.settings import Settings

__all__ = ["CacheOrderRanker"]

_FUNCTIONS = ("key", "tokens")


@component
class CacheOrderRanker:
    """Puts documents in the order that reuses most of the engine's prefix cache. Thread-safe.

    It takes documents that are ranked already, and belongs last in front of the prompt builder. They come back as they
    are, each as often as it was given (unlike Haystack's own rankers, it keeps duplicates); nothing but their order
    changes.

    - `orderer` is what orders; or give `settings`, the fields of `ragorder.Settings` by name, for one of its own.
      With neither, the settings come from the environment.
    - `top_k`: only so many of the best ranked documents are kept.
    - `scope` is the tenant: what differs in it shares no cache.
    - `key` gives what a document is known by besides its content (default: its id).
    - `tokens` gives its length in the prompt, in tokens (default: four characters a token).

    An error of ours, or in `key` or `tokens`, leaves the documents in retrieval order and is counted by the orderer.
    Orderings count as served at once: a ranker does not learn what becomes of its documents.

    `to_dict` writes the orderer's settings; what is read again has an orderer of its own, which knows nothing of the
    engine yet, and follows no events. Functions are written by their names, as Haystack does: they must be a module's.
    Haystack reads foreign components if they are allowed: `Pipeline.loads(…, allowed_modules=["ragorder"])`.

    Raises ValueError for a `top_k` that is not positive, and for both an orderer and settings;
    pydantic.ValidationError for settings that are wrong.
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
        """What orders."""
        return self._reorder.orderer

    def to_dict(self) -> dict[str, Any]:
        """The ranker's parameters. Raises haystack's SerializationError for functions that have no name."""
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
        """A ranker with these parameters."""
        parameters = data.get("init_parameters", {})
        functions = {name: deserialize_callable(parameters[name]) for name in _FUNCTIONS if parameters.get(name)}
        return default_from_dict(cls, data | {"init_parameters": parameters | functions})

    @component.output_types(documents=list[Document])
    def run(
        self, documents: list[Document], top_k: int | None = None, scope: str | None = None
    ) -> dict[str, list[Document]]:
        """The `documents` in their new order. `top_k` and `scope` take the place of the ranker's own.

        Raises ValueError for a `top_k` that is not positive.
        """
        _check(top_k)
        best = documents[: top_k or self.top_k]
        ordered, ordering = self._reorder.within(self.scope if scope is None else scope, best)
        ordering.confirm()
        return {"documents": ordered}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, documents: list[Document], top_k: int | None = None, scope: str | None = None
    ) -> dict[str, list[Document]]:
        """As `run`: ordering takes a fraction of a millisecond, and waits for nothing."""
        return self.run(documents, top_k, scope)


def _check(top_k: int | None) -> None:
    if top_k is not None and top_k <= 0:
        raise ValueError(f"top_k must be > 0, but got {top_k}")


def _text(document: Document) -> str:
    return document.content or ""


def _id(document: Document) -> str:
    return document.id


def _meta(document: Document) -> dict[str, Any]:
    return document.meta
