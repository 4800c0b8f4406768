"""Logs of requests in columns of numbers."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ragorder.errors import RagorderError
from ragorder.eval.data.arrivals import Arrival


class LogError(RagorderError, ValueError):
    """A log cannot be used. The message quotes nothing of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Requests in order of time, one row each, with lengths in tokens. Documents and scopes are numbers. A scope is a
    tenant with one system prompt (`prefix_tokens`). An id in another scope, or with another length, is another
    document. `documents[starts[row]:starts[row + 1]]` are a request's, best first."""

    name: str
    at_s: array[float]
    scopes: array[int]
    starts: array[int]
    documents: array[int]
    suffix_tokens: array[int]
    output_tokens: array[int]
    document_tokens: array[int]
    prefix_tokens: array[int]
    tenants: int = 1
    out_of_order: int = 0
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """Fields that a replay has no use for, and in how many lines each stood."""
    estimated_lengths: int = 0
    """Retrieved documents whose length was estimated from their text, `assumed_lengths` without even that."""
    assumed_lengths: int = 0

    def __len__(self) -> int:
        return len(self.at_s)

    def ranking(self, row: int) -> list[int]:
        return self.documents[self.starts[row] : self.starts[row + 1]].tolist()

    def prompt_tokens(self, row: int) -> int:
        documents_tokens = sum(map(self.document_tokens.__getitem__, self.ranking(row)))
        return self.prefix_tokens[self.scopes[row]] + documents_tokens + self.suffix_tokens[row]

    @property
    def working_set_tokens(self) -> int:
        """The length of all distinct documents."""
        return sum(self.document_tokens)

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its answer."""
        return max((self.prompt_tokens(row) + self.output_tokens[row] for row in range(len(self))), default=0)

    @property
    def output_tokens_mean(self) -> int:
        return round(sum(self.output_tokens) / len(self)) if len(self) else 0


class RecordedArrivals(Sequence[Arrival]):
    """The arrivals of a log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __len__(self) -> int:
        return len(self._log)

    def __getitem__(self, row: int) -> Arrival:  # type: ignore[override]
        return Arrival(self._log.at_s[row], self._log.output_tokens[row])


class LogBuilder:
    """A log of requests that are added in any order of time."""

    def __init__(self) -> None:
        self._times = array("d")
        self._request_scopes = array("i")
        self._starts = array("q", [0])
        self._documents = array("i")
        self._suffix_tokens = array("i")
        self._output_tokens = array("i")
        self._document_tokens = array("i")
        self._prefix_tokens = array("i")
        self._scopes: dict[tuple[str | None, int], int] = {}
        self._numbers: list[dict[Hashable, int]] = []
        self._versions: dict[tuple[int, Hashable, int], int] = {}

    def __len__(self) -> int:
        return len(self._times)

    def add(
        self,
        time_s: float,
        documents: Sequence[Hashable],
        tokens: Sequence[int],
        *,
        tenant: str | None = None,
        prefix_tokens: int,
        suffix_tokens: int,
        output_tokens: int,
    ) -> None:
        """Ids and lengths are best first."""
        scope = self._scopes.get((tenant, prefix_tokens))
        if scope is None:
            scope = self._scopes[tenant, prefix_tokens] = len(self._scopes)
            self._prefix_tokens.append(prefix_tokens)
            self._numbers.append({})
        numbers, lengths = self._numbers[scope], self._document_tokens
        for id, length in zip(documents, tokens, strict=True):
            number = numbers.get(id)
            if number is None:
                number = numbers[id] = len(lengths)
                lengths.append(length)
            elif lengths[number] != length:
                number = self._version(scope, id, length)
            self._documents.append(number)
        self._times.append(time_s)
        self._request_scopes.append(scope)
        self._starts.append(len(self._documents))
        self._suffix_tokens.append(suffix_tokens)
        self._output_tokens.append(output_tokens)

    def build(
        self,
        name: str,
        passed_over: Mapping[str, int] | None = None,
        *,
        estimated_lengths: int = 0,
        assumed_lengths: int = 0,
    ) -> Log:
        """The log in order of time; requests of one time in order of addition."""
        times, starts = self._times, self._starts
        first = min(times, default=0.0)
        out_of_order = sum(after < before for before, after in pairwise(times))
        scopes, documents = self._request_scopes, self._documents
        suffix_tokens, output_tokens = self._suffix_tokens, self._output_tokens
        if out_of_order:
            rows = sorted(range(len(times)), key=times.__getitem__)
            rankings = [documents[starts[row] : starts[row + 1]] for row in rows]
            documents, starts = array("i"), array("q", [0])
            for ranking in rankings:
                documents += ranking
                starts.append(len(documents))
            times = array("d", [times[row] for row in rows])
            scopes = array("i", [scopes[row] for row in rows])
            suffix_tokens = array("i", [suffix_tokens[row] for row in rows])
            output_tokens = array("i", [output_tokens[row] for row in rows])
        return Log(
            name,
            array("d", [time - first for time in times]),
            scopes,
            starts,
            documents,
            suffix_tokens,
            output_tokens,
            self._document_tokens,
            self._prefix_tokens,
            len({tenant for tenant, _ in self._scopes}),
            out_of_order,
            dict(passed_over or {}),
            estimated_lengths,
            assumed_lengths,
        )

    def _version(self, scope: int, id: Hashable, length: int) -> int:
        """A document whose id was seen with another length: its content changed."""
        version = (scope, id, length)
        number = self._versions.get(version)
        if number is None:
            number = self._versions[version] = len(self._document_tokens)
            self._document_tokens.append(length)
        return number
