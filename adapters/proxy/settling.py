"""What becomes of an ordered request, and how its ordering is settled."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.adapters.http_server.headers import Headers
from ragorder.adapters.proxy.usage import AnswerReader, reader_for
from ragorder.adapters.usage import AnswerLength
from ragorder.document import Document
from ragorder.ordering import Ordering

__all__ = ["PERMUTATION", "PREDICTED", "Ordered"]

PERMUTATION = b"x-ragorder-permutation"
PREDICTED = b"x-ragorder-predicted-cached-tokens"

_LONGEST_HEADER = 1024


class Ordered:
    """A request on its way through the proxy. It has an `ordering` once its documents were ordered, which `end` settles
    by what was seen of the answer: confirmed with the counts that the server reports if the answer came whole, without
    numbers if it broke off after its first token, discarded otherwise.

    `permutation` says which of them stands at each place; it stays when the ordering is settled.

    `answers`: how many answers the request asks for; of more than one, the lengths in the cache are not known.
    """

    def __init__(self, answer_length: AnswerLength) -> None:
        self.ordering: Ordering[Document] | None = None
        self.permutation: Sequence[int] = ()
        self.predicted_tokens = 0
        self.answers = 1
        self.complete = False
        self._answer_length = answer_length
        self._reader: AnswerReader | None = None

    def headers(self) -> Headers:
        """What the client is told of the order that was served, as headers of its answer: which document stands at each
        place, by its rank from 0, and the cached tokens that were predicted. There are none without documents, and no
        permutation that would be longer than servers take."""
        if not self.permutation:
            return []
        ranks = ",".join(map(str, self.permutation)).encode()
        told = [(PREDICTED, b"%d" % self.predicted_tokens)]
        return [(PERMUTATION, ranks), *told] if len(ranks) <= _LONGEST_HEADER else told

    def begin(self, status: int, headers: Headers) -> None:
        """The answer begins."""
        if self.ordering is not None and 200 <= status < 300:
            self._reader = reader_for(headers)

    def feed(self, chunk: bytes) -> None:
        """The answer goes on. What ends it settles the ordering: the client may ask again as soon as it has that."""
        if self._reader is not None:
            self._reader.feed(chunk)
            if self._reader.done:
                self.complete = True
                self.end()

    def end(self) -> None:
        """There is no more of the answer; it is whole if `complete` was set."""
        ordering, reader = self.ordering, self._reader
        if ordering is None:
            return
        self.ordering = self._reader = None
        if reader is None or not reader.served:
            ordering.discard()
            return
        if not self.complete:
            # The prompt was computed, and stays in the cache, whatever became of the answer.
            ordering.confirm()
            return
        usage = reader.usage()
        total_tokens = None
        if self.answers == 1:
            self._answer_length.learn(usage.completion_tokens)
            if usage.prompt_tokens is not None and usage.completion_tokens is not None:
                total_tokens = usage.prompt_tokens + usage.completion_tokens
        ordering.confirm(usage.cached_tokens, total_tokens, prompt_tokens=usage.prompt_tokens)
