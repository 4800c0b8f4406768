"""DSPy: retrieval module in cache order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from ragorder.common.extras import needs

with needs("dspy", "ragorder.adapters.dspy"):
    import dspy  # type: ignore[import-untyped, unused-ignore]

from ragorder.adapters.reorder import Key, Reorder, ScopeOf, Tokens
from ragorder.protocols import OrdererLike

__all__ = ["CacheOrderRetriever"]


class CacheOrderRetriever(dspy.Module):  # type: ignore[misc, unused-ignore]
    """Retrieval module that orders its passages for the engine's prefix cache. Thread-safe.

        retrieve = CacheOrderRetriever(dspy.retrievers.Embeddings(corpus, embedder), orderer)

    `retriever` returns a Prediction or mapping with `passages` (fields of the same length are ordered alike), or a list
    of strings or of rows with a `long_text`.

    - `key`: a passage's identity besides its text.
    - `tokens`: its length in the prompt.
    - `scope`: the tenant, or a function of the retriever's arguments.

    Errors in these functions, and results without passages, are counted and change nothing. Orderings count as served
    at once. Copies share the orderer; a saved program loads with a new one.
    """

    def __init__(
        self,
        retriever: Callable[..., Any],
        orderer: OrdererLike,
        *,
        key: Key | None = None,
        tokens: Tokens | None = None,
        scope: ScopeOf = None,
        callbacks: list[Any] | None = None,
    ) -> None:
        super().__init__(callbacks)
        self.retriever = retriever
        self._reorder: Reorder[Any] = Reorder(orderer, text=_text, key=key, tokens=tokens, scope=scope)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._put_in_order(self.retriever(*args, **kwargs), args, kwargs)

    async def aforward(self, *args: Any, **kwargs: Any) -> Any:
        retriever: Any = self.retriever
        if hasattr(retriever, "aforward"):
            retriever = retriever.acall
        elif not iscoroutinefunction(retriever):
            retriever = dspy.asyncify(retriever)
        found = await retriever(*args, **kwargs)
        return self._put_in_order(await found if isawaitable(found) else found, args, kwargs)

    def _put_in_order(self, found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bare = isinstance(found, list | tuple)
        named = isinstance(found, Mapping | dspy.Example)
        passages = found if bare else found.get("passages") if named else None
        if not isinstance(passages, list | tuple):
            self._reorder.orderer.fall_back((), TypeError("a result without passages"))
            return found
        ordered, ordering = self._reorder(passages, *args, **kwargs)
        ordering.confirm()
        return _from_list(ordered) if bare else _permuted(found, ordering.permutation)


def _from_list(passages: list[Any]) -> Any:
    if passages and all(isinstance(passage, Mapping) and "long_text" in passage for passage in passages):
        shared = [name for name in passages[0] if all(name in passage for passage in passages)]
        columns = {name: [passage[name] for passage in passages] for name in shared}
        texts = columns.pop("long_text")
        return dspy.Prediction(columns | {"passages": texts})
    return dspy.Prediction(
        passages=[
            passage if isinstance(passage, Mapping) else getattr(passage, "long_text", passage) for passage in passages
        ]
    )


def _permuted(found: Any, permutation: Sequence[int]) -> Any:
    fields = {name: _arrange(value, permutation) for name, value in found.items()}
    if not isinstance(found, dspy.Prediction):
        return dspy.Prediction(fields)
    prediction = copy(found)
    prediction._store = found._store | fields
    return prediction


def _arrange(value: Any, permutation: Sequence[int]) -> Any:
    if isinstance(value, list | tuple) and len(value) == len(permutation):
        arranged = [value[rank] for rank in permutation]
        return arranged if isinstance(value, list) else tuple(arranged)
    if type(value).__module__ == "numpy" and getattr(value, "shape", ())[:1] == (len(permutation),):
        return value[list(permutation)]
    return value


def _text(passage: Any) -> Any:
    if isinstance(passage, str):
        return passage
    return passage["long_text"] if isinstance(passage, Mapping) else passage.long_text
