"""Documents that wait to be preprocessed, those of most requests first."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["BuildQueue"]


class BuildQueue:
    """Documents by content, in the order of their requests; among equals the one that has waited longest comes first.

    The number of documents does not matter to `put` and `remove`, and to `take` only that of different counts.
    """

    def __init__(self) -> None:
        self._requests: dict[bytes, int] = {}
        # Without empty ones.
        self._by_requests: dict[int, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, content: bytes, requests: int) -> None:
        """Add a document, or change the number of its requests."""
        self.remove(content)
        self._requests[content] = requests
        self._by_requests.setdefault(requests, OrderedDict())[content] = None

    def take(self) -> bytes | None:
        """The next document, which waits no longer; None: there is none."""
        if not self._requests:
            return None
        content = next(iter(self._by_requests[max(self._by_requests)]))
        self.remove(content)
        return content

    def remove(self, content: bytes) -> None:
        requests = self._requests.pop(content, None)
        if requests is None:
            return
        equals = self._by_requests[requests]
        del equals[content]
        if not equals:
            del self._by_requests[requests]
