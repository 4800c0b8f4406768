"""Fields and ordering of LangChain's retriever and transformer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any, Self

from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field, SkipValidation

import ragorder
from ragorder.adapters.langchain.feedback import hand_over
from ragorder.adapters.marks import marked_documents
from ragorder.adapters.reorder import degrade, name_of, order_items
from ragorder.orderer import Orderer, OrdererLike
from ragorder.ordering import Ordering

__all__ = ["CacheOrderModel"]


class CacheOrderModel(BaseModel):
    """Common fields. A copy, deep or pickled, has a new orderer with the same settings."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    orderer: SkipValidation[OrdererLike]
    key: Callable[[Document], Any] | None = None
    tokens: Callable[[Document], int] | None = None
    scope: str | Callable[[Mapping[str, Any]], Hashable] | None = None
    rank_key: str | None = None
    mark_key: str | None = None
    k: int | None = Field(default=None, ge=0)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.orderer)] = Orderer(self.orderer.settings)
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return state | {"__dict__": state["__dict__"] | {"orderer": self.orderer.settings}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        fields = state["__dict__"]
        super().__setstate__(state | {"__dict__": fields | {"orderer": Orderer(fields["orderer"])}})

    def put_in_order(self, documents: Sequence[Document], run_manager: Any) -> list[Document]:
        documents = list(documents)
        try:
            scope = self.scope(run_manager.metadata) if callable(self.scope) else self.scope
        except Exception as error:
            # An unknown tenant must not be confused with another one, nor with no tenant.
            ordering = self.orderer.fall_back([ragorder.Document("")] * len(documents), error)
        else:
            documents, ordering = order_items(self.orderer, documents, self._read, scope=scope)
        marked = self._marked(ordering)
        hand_over(
            ordering, [str(getattr(document, "page_content", "")) for document in documents], run_manager, self.orderer
        )
        ranked = [self._ranked(*item) for item in zip(documents, ordering.permutation, strict=True)]
        if self.mark_key is None:
            return ranked
        return [self._with_mark(document, place in marked) for place, document in enumerate(ranked, 1)]

    def _read(self, document: Document) -> ragorder.Document:
        return ragorder.Document(
            name_of(document, document.id, self.key),
            document.page_content,
            None if self.tokens is None else index(self.tokens(document)),
            metadata=document.metadata or {},
        )

    def _ranked(self, document: Document, rank: int) -> Document:
        with suppress(Exception):
            if self.rank_key is not None and self.rank_key not in document.metadata:
                return document.model_copy(update={"metadata": {**document.metadata, self.rank_key: {"rank": rank}}})
        return document

    def _with_mark(self, document: Document, marked: bool) -> Document:
        with suppress(Exception):
            if marked != (self.mark_key in document.metadata):
                # A breakpoint of an earlier request does not belong to this one.
                metadata = {name: value for name, value in document.metadata.items() if name != self.mark_key}
                return document.model_copy(update={"metadata": metadata | ({self.mark_key: True} if marked else {})})
        return document

    def _marked(self, ordering: Ordering[Any]) -> frozenset[int]:
        if self.mark_key is None:
            return frozenset()
        try:
            return frozenset(marked_documents(ordering))
        except Exception as error:
            degrade(self.orderer, f"no cache breakpoints were set: choosing them failed with {type(error).__name__}")
            return frozenset()
