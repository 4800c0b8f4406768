"""Selectors of ids, as values that another process reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from ragorder.pipelining.staged._faiss import load_faiss

__all__ = ["PackedSelector", "pack", "selector_of", "unpack"]

PackedSelector = tuple[str, tuple[Any, ...]]
"""Name of a FAISS class, and the arguments of its constructor: numbers, arrays, and other selectors, packed as well."""

_OF_OTHERS = ("IDSelectorNot", "IDSelectorAnd", "IDSelectorOr", "IDSelectorXOr")


def selector_of(params: Any) -> Any:
    """The selector that a faiss.SearchParametersIVF was given. What its attribute returns is of no particular class."""
    return getattr(params, "_sp_field_refs", {}).get("sel", params.sel)


def pack(selector: Any) -> PackedSelector:
    """Raises ValueError for a selector that does not give back its ids."""
    name = type(selector).__name__
    if name == "IDSelectorAll":
        return name, ()
    if name == "IDSelectorRange":
        return name, (selector.imin, selector.imax, selector.assume_sorted)
    if name == "IDSelectorArray":
        # Membership in an array is searched for, in a set it is looked up.
        return "IDSelectorBatch", (_copied(selector.ids, selector.n, np.int64),)
    if name == "IDSelectorBitmap":
        return name, (_copied(selector.bitmap, selector.n, np.uint8),)
    if name in _OF_OTHERS and hasattr(selector, "referenced_objects"):
        # FAISS keeps those of one constructor in a list, or in a tuple in a list.
        kept = selector.referenced_objects
        return name, tuple(map(pack, kept[0] if isinstance(kept[0], tuple) else kept))
    raise ValueError(
        f"{name} does not give back its ids, so it cannot be sent to another process: use faiss.IDSelectorArray(ids), "
        "which is a batch there, IDSelectorRange, IDSelectorBitmap, or Not, And, Or, XOr of these"
    )


def unpack(packed: PackedSelector) -> Any:
    faiss = load_faiss()
    name, arguments = packed
    return getattr(faiss, name)(*(unpack(each) if isinstance(each, tuple) else each for each in arguments))


def _copied(pointer: Any, count: int, kind: Any) -> Any:
    return load_faiss().rev_swig_ptr(pointer, count).copy() if count else np.empty(0, kind)
