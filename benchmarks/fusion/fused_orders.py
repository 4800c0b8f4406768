"""Tokens that fused requests compute, by the order of their documents, on a simulated engine (suite fusion-orders)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream, stream_of_trace
from ragorder.benchmarks.ragcache.replacement.tiers import A10G, QUESTION_TOKENS
from ragorder.eval.data.trace import trace_of_corpus
from ragorder.eval.report.declared import Block, Column, Row, TableForm, figure, policy_column, ratio
from ragorder.eval.report.words import THIN, format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line
from ragorder.orderer import Orderer
from ragorder.trie.policies import History, Tier, make_policy
from ragorder.trie.profile import LINEAR

ORDERS = ("prefix cache", "prefix cache, ordered", "retrieval", "ordered", "invested")
"""A prefix cache alone, as ranked and ordered; fused as ranked (FusionRAG); ordered by ragorder; ordered, and copies
computed exactly where later requests pay for it."""
Place = Callable[[Sequence[int]], tuple[list[int], int, Callable[[int], None]]]
Path = tuple[int, ...]
"""A document after others."""
_HISTORY_NODES = 65_536
_FIRST = 100


class FusedOrdersCell(SuiteCell):
    """Requests of a `corpus`, one after the other, at an engine with room for `device_tokens`, unlimited by default.

    `copies`: of the documents that the engine holds (served), or of all, on a disk, as after `ragorder fuse build`; the
    share `recompute` of their tokens is recomputed.
    """

    corpus: str = "covidqa"
    top_k: int = Field(10, ge=1)
    order: Literal["data", "random"] = "data"
    copies: Literal["served", "all"] = "all"
    recompute: float = Field(0.15, ge=0, le=1)
    device_tokens: int | None = Field(None, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return self.order == "random"


def total(run: Record, column: str) -> float:
    return float(sum(run.rows[column]))


def _share(run: Record, column: str) -> float:
    return 100 * total(run, column) / total(run, "document_tokens")


def _reused_later(row: Row) -> str:
    """Exact and reused; empty for fewer requests."""
    rows = row.runs[0].rows
    whole, exact, fused = (sum(rows[name][_FIRST:]) for name in ("document_tokens", "exact_tokens", "fused_tokens"))
    return format_number(100 * (exact + fused) / whole) if whole else ""


def room_column() -> Column:
    def entry(row: Row) -> str:
        tokens = row.cell.device_tokens
        return "unlimited" if tokens is None else f"{tokens:,}".replace(",", THIN)

    return Column("device, tokens", entry)


def _title(block: Block) -> str:
    held = "All documents" if block.cell.copies == "all" else "Documents that are held"
    return f"{held} can be reused"


class FusedOrders(Experiment):
    """Columns, by request: tokens of its documents, exact, reused and computed; `seconds` are estimated from these."""

    kind = "fused-orders"
    cell = FusedOrdersCell
    columns = ("document_tokens", "exact_tokens", "fused_tokens", "computed_tokens", "seconds")
    policies: ClassVar[Any] = ORDERS
    tables = (
        TableForm(
            _title,
            [
                Column("corpus", lambda row: str(row.cell.corpus)),
                room_column(),
                policy_column("order"),
                figure("exact prefix, %", partial(_share, column="exact_tokens")),
                figure("reused, %", partial(_share, column="fused_tokens")),
                Column("reused from the 101st request on, %", _reused_later),
                figure("computed, thousand tokens", partial(total, column="computed_tokens"), scale=1e-3),
                ratio("of the ordered", partial(total, column="computed_tokens"), "ordered", 4),
                figure("estimated, s", partial(total, column="seconds")),
                ratio("of the ordered", partial(total, column="seconds"), "ordered", 4),
            ],
            note="Sums over all requests, in the order of the data. %: of the documents' tokens. Seconds: those of the "
            "replacement suites' estimated A10G for as many tokens computed at the end of a prompt as long.",
            labels=3,
            by=("copies",),
            sort=("copies",),
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: FusedOrdersCell = job.cell
        assert job.corpus is not None, "a cell has a corpus"
        trace = trace_of_corpus(job.corpus, top_k=cell.top_k, order=cell.order, seed=job.seed, limit=job.requests)
        stream = stream_of_trace(trace)
        for policy in job.policies:
            yield {"policy": policy, "engine": {"name": "sim"}, "rows": measure(stream, cell, policy, advance)}


def measure(
    stream: DocumentStream, cell: FusedOrdersCell, policy: str, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the columns of a record."""
    engine = SimulatedFusion(
        stream.tokens,
        cell.device_tokens,
        recompute=cell.recompute,
        copied=cell.copies == "all",
        fuses=not policy.startswith("prefix cache"),
    )
    place = _placing(stream, cell, policy)
    rows: dict[str, list[float]] = {name: [] for name in FusedOrders.columns}
    for request in stream.requests:
        documents, exact_documents, confirm = place(request)
        found = engine.serve(documents, exact_documents, QUESTION_TOKENS)
        confirm(found.exact)
        length = sum(stream.tokens[document] for document in request)
        # What is computed attends to all before it, as a suffix does.
        seconds = A10G(round(length + QUESTION_TOKENS - found.computed), found.computed)
        for name, value in zip(rows, (length, found.exact, found.fused, found.computed, seconds), strict=True):
            rows[name].append(round(value, 4))
        advance()
    return rows


def _placing(stream: DocumentStream, cell: FusedOrdersCell, policy: str) -> Place:
    if policy in ("retrieval", "prefix cache"):
        return lambda request: (list(request), 0, lambda _: None)
    return placing(
        stream.tokens.__getitem__,
        capacity_tokens=cell.device_tokens,
        suffix_tokens=QUESTION_TOKENS,
        reuse="exact" if policy == "prefix cache, ordered" else "fused",
        recompute=cell.recompute,
        copies=cell.copies,
        invest=policy == "invested",
    )


def placing(tokens: Callable[[int], int], **options: Any) -> Place:
    """Return what orders numbered documents: their order, how many are exact, and what confirms cached tokens."""
    orderer = Orderer(key=lambda document: document, tokens=tokens, block_size=1, strict=True, **options)

    def place(request: Sequence[int]) -> tuple[list[int], int, Callable[[int], None]]:
        ordering = orderer.order(request)
        return list(ordering.documents), ordering.exact_documents, ordering.confirm

    return place


@dataclass(frozen=True, slots=True)
class FusedPrefill:
    """Tokens of documents in an exact prefix, and reused; tokens computed, the question's among them."""

    exact: int
    fused: int
    computed: float


class SimulatedFusion:
    """One tier with room for `device_tokens` (None: unlimited), whose leaves PGDSF evicts.

    As on the engine: after the longest cached path come documents that are computed in place, exactly, and stay; from
    the first one on that is reused, all are copied. A document without KV among these is computed by itself, which
    stays, too. Of what is copied the share `recompute` is recomputed. With `copied` all documents have a copy that
    takes no room; else those that stand on a path. One that does not fuse computes all after the longest cached path.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        device_tokens: int | None,
        *,
        recompute: float,
        copied: bool,
        fuses: bool = True,
    ) -> None:
        self._tokens = tokens
        self._room = device_tokens
        self._recompute = recompute
        self._copied = copied
        self._fuses = fuses
        self._tier = Tier(make_policy("pgdsf"), History(_HISTORY_NODES))
        # The paths that end with a document, oldest first.
        self._ending: dict[int, dict[Path, None]] = {}

    @property
    def held_tokens(self) -> int:
        """Of KV, each copy of a document."""
        return self._tier.used

    def serve(self, documents: Sequence[int], exact_documents: int, question_tokens: int) -> FusedPrefill:
        """`exact_documents`: leading ones that are not reused."""
        tokens = self._tokens
        paths = [tuple(documents[:end]) for end in range(1, len(documents) + 1)]
        cached = next((place for place, path in enumerate(paths) if path not in self._tier), len(paths))
        taken = [
            place
            for place in range(max(cached, exact_documents), len(documents))
            if self._fuses and (self._copied or self._ending.get(documents[place]))
        ]
        first = taken[0] if taken else len(documents)
        sources = [] if self._copied else [next(iter(self._ending[documents[place]])) for place in taken]
        alone = [(documents[place],) for place in range(first, len(documents)) if place not in taken]
        in_use = {*paths[:cached], *sources}
        # Documents computed by themselves come first, and are copied like the others.
        self._insert(alone, in_use)
        in_use.update(alone)
        new = sum(tokens[document] for document in documents[cached:first])
        copied = sum(tokens[document] for document in documents[first:])
        by_themselves = sum(tokens[document] for (document,) in alone)
        self._make_room(new + copied + question_tokens, in_use)
        self._insert(paths[cached:first], in_use)
        prompt = sum(tokens[document] for document in documents)
        computed = new + by_themselves + self._recompute * copied + question_tokens
        self._tier.use(paths[:first], cost=LINEAR.cost(prompt - new, new), computed=frozenset(paths[cached:first]))
        self._tier.use([*sources, *alone], cost=LINEAR.cost(0, prompt), computed=frozenset(alone))
        return FusedPrefill(prompt - new - copied, copied - by_themselves, computed)

    def _insert(self, paths: Iterable[Path], in_use: set[Path]) -> None:
        """While there is room."""
        for path in paths:
            size = self._tokens[path[-1]]
            parent = path[:-1] or None
            if path in self._tier or (parent is not None and parent not in self._tier):
                continue
            if self._make_room(size, in_use | {path[:-1]}):
                self._tier.insert(path, size, parent)
                self._ending.setdefault(path[-1], {})[path] = None

    def _make_room(self, tokens: int, in_use: set[Path]) -> bool:
        """Return whether there is room then."""
        if self._room is None:
            return True
        missing = self._tier.used + tokens - self._room
        evicted = self._tier.evict(missing, in_use) if missing > 0 else []
        for path in cast("list[Path]", evicted or []):
            ending = self._ending[path[-1]]
            del ending[path]
            if not ending:
                del self._ending[path[-1]]
        return evicted is not None
