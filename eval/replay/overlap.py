"""Overlap of requests: a bound on what any order of documents could reuse."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from ragorder.eval.replay.log import Log
from ragorder.eval.running.load import Advance

_COMPARED_REQUESTS = 4_096
_COMPARISONS = 10_000_000


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares, from 0 to 1, of what requests have in common with earlier ones of their scope; of all prompt tokens.
    `first_seen_ratio`: documents and system prompts of no earlier request. `bound_ratio`: the rest without suffixes, in
    whole blocks: no order can reuse more. With the most similar earlier prompt `sharing_two_ratio` of the requests
    share two documents or more, and `one_prompt_ratio` of the tokens: a tighter bound. `exact`: all were compared with
    all."""

    prompt_tokens: int
    bound_tokens: int
    bound_ratio: float
    first_seen_ratio: float
    suffix_ratio: float
    sharing_two_ratio: float
    jaccard_mean: float
    one_prompt_ratio: float
    compared_requests: int
    exact: bool


def measure_overlap(log: Log, block_size: int, advance: Advance = lambda: None) -> Overlap:
    """`advance` is called after each of the `compared_requests(log)`."""
    prompt_tokens, bound_tokens, suffix_tokens, seen_tokens = _bound(log, block_size)
    rows = _compared(log)
    nearest = _Nearest(log, block_size, len(rows))
    sharing_two = one_prompt_tokens = compared_tokens = 0
    jaccard = 0.0
    for row in rows:
        shared, similarity, tokens = nearest.of(row)
        sharing_two += shared >= 2
        jaccard += similarity
        one_prompt_tokens += tokens
        compared_tokens += log.prompt_tokens(row)
        advance()
    return Overlap(
        prompt_tokens=prompt_tokens,
        bound_tokens=bound_tokens,
        bound_ratio=_ratio(bound_tokens, prompt_tokens),
        first_seen_ratio=_ratio(prompt_tokens - suffix_tokens - seen_tokens, prompt_tokens),
        suffix_ratio=_ratio(suffix_tokens, prompt_tokens),
        sharing_two_ratio=_ratio(sharing_two, len(rows)),
        jaccard_mean=_ratio(jaccard, len(rows)),
        one_prompt_ratio=_ratio(one_prompt_tokens, compared_tokens),
        compared_requests=len(rows),
        exact=len(rows) == len(log) and nearest.exact,
    )


def compared_requests(log: Log) -> int:
    return len(_compared(log))


def _compared(log: Log) -> range:
    return range(0, len(log), -(-len(log) // _COMPARED_REQUESTS))


def _bound(log: Log, block_size: int) -> tuple[int, int, int, int]:
    lengths = log.document_tokens
    seen_documents, seen_scopes = bytearray(len(lengths)), bytearray(len(log.prefix_tokens))
    prompt_tokens = bound_tokens = seen_tokens = 0
    for row, scope in enumerate(log.scopes):
        ranking = log.ranking(row)
        prompt_tokens += log.prefix_tokens[scope] + sum(lengths[document] for document in ranking)
        if seen_scopes[scope]:
            seen = log.prefix_tokens[scope] + sum(lengths[document] for document in ranking if seen_documents[document])
            seen_tokens += seen
            bound_tokens += seen // block_size * block_size
        seen_scopes[scope] = 1
        for document in ranking:
            seen_documents[document] = 1
    suffix_tokens = sum(log.suffix_tokens)
    return prompt_tokens + suffix_tokens, bound_tokens, suffix_tokens, seen_tokens


class _Nearest:
    def __init__(self, log: Log, block_size: int, compared: int) -> None:
        self._log = log
        self._block_size = block_size
        self._first_of_scope: dict[int, int] = {}
        self._sizes = array("i")
        uses = array("i", bytes(4 * len(log.document_tokens)))
        for row, scope in enumerate(log.scopes):
            self._first_of_scope.setdefault(scope, row)
            documents = set(log.ranking(row))
            self._sizes.append(len(documents))
            for document in documents:
                uses[document] += 1
        self._starts = array("q", accumulate(uses, initial=0))
        self._rows = array("i", bytes(4 * self._starts[-1]))
        ends = self._starts[:]
        for row in range(len(log)):
            for document in set(log.ranking(row)):
                self._rows[ends[document]] = row
                ends[document] += 1
        comparisons = sum(count * count for count in uses) * compared // (2 * len(log))
        self.exact = comparisons <= _COMPARISONS
        self._depth = len(log) if self.exact else max(16, _COMPARISONS // (compared * max(self._sizes)))

    def of(self, row: int) -> tuple[int, float, int]:
        """Most documents in common with one earlier request, largest Jaccard similarity, most tokens in common."""
        log, sizes = self._log, self._sizes
        common: Counter[int] = Counter()
        tokens: Counter[int] = Counter()
        for document, times in Counter(log.ranking(row)).items():
            rows = self._earlier(document, row)
            common.update(rows)
            length = log.document_tokens[document] * times
            for earlier in rows:
                tokens[earlier] += length
        similarity = max(
            (shared / (sizes[row] + sizes[other] - shared) for other, shared in common.items()), default=0.0
        )
        scope = log.scopes[row]
        prefix = log.prefix_tokens[scope] if self._first_of_scope[scope] < row else 0
        most = prefix + max(tokens.values(), default=0)
        return max(common.values(), default=0), similarity, most // self._block_size * self._block_size

    def _earlier(self, document: int, row: int) -> array[int]:
        start = self._starts[document]
        end = bisect_left(self._rows, row, start, self._starts[document + 1])
        return self._rows[max(start, end - self._depth) : end]


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0
