"""Ray Data: batches planned in shards on a cluster, before any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragorder.document import Document
from ragorder.extras import needs
from ragorder.trie.shards import ShardPaths, ShardRequest, plan_requests

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.data import Dataset

__all__ = ["plan_dataset"]

_SHARD = "shard"
_PERMUTATION = "permutation"
_USER = "ragorder.adapters.ray_data"


def plan_dataset(
    dataset: Dataset,
    shards: int,
    *,
    documents: str = "documents",
    scope: str | None = None,
    document_tokens: int = 256,
    sample: int = 1_000_000,
) -> Dataset:
    """The rows of a dataset in serving order, a block for each shard.

        planned = plan_dataset(ray.data.read_json("requests.jsonl"), shards=64)
        answers = processor(planned)  # ray.data.llm, or map_batches with an engine

    `documents` is the column with the documents of each row, best first: lists of ids, or of objects with "id" and
    "text" or "tokens"; ids alone are `document_tokens` long. `scope` is a column with the tenant, if there is one. The
    documents of a row come in the order of the prompt, "permutation" has their ranks, from 0, and "shard" the number of
    the shard. All other columns stay: join results by an id among them.

    The dataset is read twice, once for popular documents, which a `sample` of so many rows tells; `materialize` it if
    reading is dear. A shard is planned by one task. Give batches of 512 rows and more to an engine, each of which costs
    a repeated prefix.

    Raises ImportError naming the extra, ValueError for less than one shard; a column that cannot be read is a
    ValueError of the task that reads it.
    """
    with needs("ray", _USER):
        import pyarrow  # noqa: F401
        import ray
    reader = _Reader(documents, scope, document_tokens)
    shared = ray.put(ShardPaths.of(_sampled(dataset, reader, sample), shards))

    def deal(table: Table) -> Table:
        return reader.deal(table, ray.get(shared))

    dealt = dataset.map_batches(deal, batch_format="pyarrow", batch_size=None)
    return dealt.groupby(_SHARD, num_partitions=shards).map_groups(reader.plan, batch_format="pyarrow")


def _sampled(dataset: Dataset, reader: _Reader, most: int) -> list[ShardRequest]:
    """Every row, or every second, fourth, … one."""
    import pyarrow

    kept: list[ShardRequest] = []
    every, first = 1, 0
    rows = dataset.select_columns(reader.columns)
    for table in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
        places = range(-first % every, table.num_rows, every)
        first += table.num_rows
        kept += reader.requests(table.take(pyarrow.array(places, pyarrow.int64())))
        while len(kept) > max(1, most):
            kept, every = kept[::2], 2 * every
    return kept


@dataclass(frozen=True, slots=True)
class _Reader:
    """The columns of a request."""

    documents: str
    scope: str | None
    document_tokens: int

    @property
    def columns(self) -> list[str]:
        return [self.documents] if self.scope is None else [self.documents, self.scope]

    def requests(self, table: Table) -> list[ShardRequest]:
        documents = self._documents(table)
        scopes = [None] * len(documents) if self.scope is None else _column(table, self.scope)
        return [
            self._request(values, None if scope is None else str(scope))
            for values, scope in zip(documents, scopes, strict=True)
        ]

    def deal(self, table: Table, paths: ShardPaths) -> Table:
        import pyarrow

        for name in (_SHARD, _PERMUTATION):
            if name in table.column_names:
                raise ValueError(f"the dataset has a column {name!r}, which the plan adds: rename it")
        shards = [paths.shard(request, number) for number, request in enumerate(self.requests(table))]
        return table.append_column(_SHARD, pyarrow.array(shards, pyarrow.int32()))

    def plan(self, table: Table) -> Table:
        """The rows of a shard in serving order; tenants one after another."""
        import pyarrow

        planned = list(plan_requests(self.requests(table)))
        rows, permutations = [each.number for each in planned], [each.permutation for each in planned]
        given = self._documents(table)
        ordered = [[given[row][rank] for rank in ranks] for row, ranks in zip(rows, permutations, strict=True)]
        place = table.column_names.index(self.documents)
        kind = table.schema.types[place]
        lists = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
        column = pyarrow.array(ordered, kind if lists else None)
        result = table.take(pyarrow.array(rows, pyarrow.int64())).set_column(place, self.documents, column)
        return result.append_column(_PERMUTATION, pyarrow.array(permutations, pyarrow.list_(pyarrow.int64())))

    def _documents(self, table: Table) -> list[list[Any]]:
        # An array of equally many ids may be a tensor, a row without documents null.
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
