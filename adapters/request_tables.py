"""Arrow tables of requests, dealt to shards and planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragorder.common.extras import needs
from ragorder.document import Document
from ragorder.trie.shards import ShardPaths, ShardRequest, plan_requests

with needs("ray", "ragorder.adapters.request_tables"):
    import pyarrow

if TYPE_CHECKING:
    from pyarrow import Table

__all__ = ["PERMUTATION", "SHARD", "RequestColumns"]

SHARD = "shard"
PERMUTATION = "permutation"


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Columns of a table with one request per row, for Ray Data and Spark (docs/batches.md).

    `documents` names the column of documents, best first: lists of ids, each `document_tokens` long, or of objects with
    "id" and "text" or "tokens"; `scope` names the tenant's. Methods raise ValueError for a missing or unreadable
    column.
    """

    documents: str = "documents"
    scope: str | None = None
    document_tokens: int = 256

    @property
    def names(self) -> list[str]:
        return [self.documents] if self.scope is None else [self.documents, self.scope]

    def requests(self, table: Table) -> list[ShardRequest]:
        documents = self._documents(table)
        scopes = [None] * len(documents) if self.scope is None else _column(table, self.scope)
        return [
            self._request(values, None if scope is None else str(scope))
            for values, scope in zip(documents, scopes, strict=True)
        ]

    def deal(self, table: Table, paths: ShardPaths) -> Table:
        """Add the number of each row's shard as "shard"."""
        for name in (SHARD, PERMUTATION):
            if name in table.column_names:
                raise ValueError(f"the dataset has a column {name!r}, which the plan adds: rename it")
        shards = [paths.shard(request, number) for number, request in enumerate(self.requests(table))]
        return table.append_column(SHARD, pyarrow.array(shards, pyarrow.int32()))

    def plan(self, table: Table) -> Table:
        """Return a shard's rows in serving order, tenant by tenant, with documents in prompt order and their ranks as
        "permutation"."""
        planned = list(plan_requests(self.requests(table)))
        rows, permutations = [each.number for each in planned], [each.permutation for each in planned]
        given = self._documents(table)
        ordered = [[given[row][rank] for rank in ranks] for row, ranks in zip(rows, permutations, strict=True)]
        place = table.column_names.index(self.documents)
        kind = table.schema.types[place]
        lists = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
        column = pyarrow.array(ordered, kind if lists else None)
        result = table.take(pyarrow.array(rows, pyarrow.int64())).set_column(place, self.documents, column)
        return result.append_column(PERMUTATION, pyarrow.array(permutations, pyarrow.list_(pyarrow.int64())))

    def _documents(self, table: Table) -> list[list[Any]]:
        # Lists of one length may come as a tensor, a row without documents as null.
        return [[] if values is None else list(values) for values in _column(table, self.documents)]

    def _request(self, values: Sequence[Any], scope: str | None) -> ShardRequest:
        try:
            documents = [self._document(value) for value in values]
        except (TypeError, KeyError, ValueError):
            raise ValueError(
                f'the column {self.documents!r} must have lists of ids, or of objects with "id" (text) and "text" or '
                '"tokens" (a whole number)'
            ) from None
        keys, tokens = [each.key for each in documents], [each.token_count for each in documents]
        return ShardRequest.of(keys, tokens, scope)

    def _document(self, value: Any) -> Document:
        if not isinstance(value, Mapping):
            return Document(value, tokens=self.document_tokens)
        text, tokens = value.get("text"), value.get("tokens")
        return Document(value["id"], text or "", self.document_tokens if text is None and tokens is None else tokens)


def _column(table: Table, name: str) -> list[Any]:
    if name not in table.column_names:
        raise ValueError(f"the dataset has no column {name!r}: name one of {', '.join(table.column_names)}")
    values: list[Any] = table.column(name).to_pylist()
    return values
