"""Earlier turns of conversations, sent again as they were sent the first time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from ragorder.lru_cache import LRUCache

__all__ = ["SentTurns"]

_REMEMBERED = 16384
_MOST_BYTES = 8 << 20
_ENTRY_BYTES = 200


class SentTurns:
    """Orders in which documents of messages were sent, by digests of scope and text: the client's history has them in
    retrieval order, the engine's cache as they were sent. At most 16,384 in 8 MiB, without any text. Thread-safe."""

    def __init__(self) -> None:
        self._orders: LRUCache[Sequence[int]] = LRUCache(_REMEMBERED, _MOST_BYTES)

    def remember(self, scope: bytes, text: str, sent: str, permutation: Sequence[int]) -> None:
        """`text` was sent as `sent`, which a client may have in its history as well."""
        self._put(_key(scope, text), permutation)
        if sent != text:
            self._put(_key(scope, sent), range(len(permutation)))

    def sent(self, scope: bytes, text: str, count: int) -> Sequence[int] | None:
        """Return the order in which the `count` documents of a message were sent, or None if that is unknown."""
        known = self._orders.get(_key(scope, text))
        return known if known is not None and len(known) == count else None

    def _put(self, key: bytes, permutation: Sequence[int]) -> None:
        order = array("H", permutation)
        self._orders.put(key, order, _ENTRY_BYTES + order.itemsize * len(order))


def _key(scope: bytes, text: str) -> bytes:
    # Parts of a message are joined by a surrogate.
    return blake2b(text.encode("utf-8", "surrogatepass"), key=scope, digest_size=16).digest()
