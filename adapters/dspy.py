"""DSPy: a retrieval module whose passages come in the order that the engine's cache wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from inspect import isawaitable, iscoroutinefunction
from typing import Any

try:
    import dspy  # type: ignore[import-untyped, unused-ignore]
except ImportError as error:
    raise ImportError("ragorder.adapters.dspy needs dspy: pip install 'ragorder[dspy]'") from error

from ragorder.adapters.reorder import Key, Reorder, ScopeOf, Tokens
from ragorder.orderer_like import OrdererLike

__all__ = ["CacheOrderedRetrieve"]


class CacheOrderedRetrieve(dspy.Module):  # type: ignore[misc, unused-ignore]
    """A retriever whose passages come in the order that reuses most of the engine's prefix cache. Thread-safe.

    Wraps a `retriever`, any module or function, which is called with the arguments that this one is called with. What
    it gives, becomes a `dspy.Prediction(passages=…)`:

    - a Prediction, or a mapping, with `passages`: every other list, tuple or numpy array of their number (indices,
      scores) is put in order alike, and all else is kept;
    - a list of strings;
    - a list of rows with a `long_text`, as ColBERTv2 gives: that is the passage, and the other columns go along.

    A passage is known by its text and by what `key` gives for it, if there is one. `tokens` gives its length in the
    prompt, in tokens (default: four characters a token). `scope` is the tenant, or a function that names it, called
    with the retriever's arguments: what differs in it shares no cache.

    An error of ours, or in `key`, `tokens` or `scope`, leaves the passages in retrieval order and is counted by the
    orderer; a result without passages is given back as it is, and counted. Orderings count as served at once: a
    retriever does not learn what becomes of its passages.

    Copies of the module, as optimisers make them, share the orderer. Saved as a whole program, it takes the orderer's
    settings along, and has an orderer of its own when it is loaded.
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
        self._reorder: Reorder[Any] = Reorder(orderer, text=_text, own_id=_no_id, key=key, tokens=tokens, scope=scope)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The passages, in their new order. Raises what the retriever raises."""
        return self._put_in_order(self.retriever(*args, **kwargs), args, kwargs)

    async def aforward(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`. A retriever that is not asynchronous runs in a thread."""
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


def _no_id(passage: Any) -> None:
    return None
