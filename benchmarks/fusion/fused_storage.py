"""KV that a knowledge base and uploads take, on a simulated engine (FusionRAG 5.3.3; suite fusion-storage)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from ragorder.benchmarks.fusion.fused_orders import Place, SimulatedFusion, placing, room_column, total
from ragorder.eval.report.declared import Block, Column, Row, TableForm, figure, policy_column
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line

POLICIES = ("prefix cache", "alternative path", "alternative path, ordered")
"""KV found as a prefix; also elsewhere (FusionRAG 4.1); the same, with documents ordered by ragorder."""
_KNOWN, _UPLOADED = 0.6, 0.3
_BASELINE = "prefix cache"


class StorageCell(SuiteCell):
    """Requests for `documents` of `document_tokens` tokens, at an engine with room for `device_tokens`, unlimited by
    default. 60 % of them are any of the `known` ones, which were computed before the first request, 30 % any of the
    `uploads` that several users share, and 10 % are asked for once (FusionRAG 5.3.3; the numbers are ours)."""

    documents: int = Field(10, ge=1)
    document_tokens: int = Field(200, ge=1)
    known: int = Field(1_000, ge=10)
    uploads: int = Field(1_000, ge=10)
    device_tokens: int | None = Field(None, ge=1)


def _held(run: Record) -> float:
    return float(run.rows["held"][-1])


def _less_column(of: Callable[[Record], float]) -> Column:
    def entry(row: Row) -> str:
        value, before = row.mean(of), row.mean(of, _BASELINE)
        return "" if value is None or before is None or value == before else format_number(100 * (1 - value / before))

    return Column("less, %", entry)


def _found(row: Row) -> str:
    found, documents = (row.mean(partial(total, column=name)) or 0.0 for name in ("found", "documents"))
    return format_number(100 * found / documents)


def _note(block: Block) -> str:
    cell, first = block.cell, block.groups[0]
    return (
        f"Means of seeds {', '.join(map(str, first.seeds))}: {len(block.first.rows['held']):,} requests for "
        f"{cell.documents} documents of {cell.document_tokens} tokens, 60 % of them of {cell.known:,} that were "
        f"computed before, 30 % of {cell.uploads:,} uploads, 10 % asked for once. Less: than with a prefix cache "
        "alone. Again: of documents that had been computed before. The paper has 71.0 % less, 82.3 % less and 77.9 % "
        "found; it does not say of how many documents."
    )


class FusedStorage(Experiment):
    """Columns, by request: documents `found`, `computed`, computed `again`; and the tokens of KV `held` afterwards."""

    kind = "fused-storage"
    cell = StorageCell
    columns = ("documents", "found", "computed", "again", "held")
    policies: ClassVar[Any] = POLICIES
    tables = (
        TableForm(
            "KV of a knowledge base and of uploads",
            [
                room_column(),
                policy_column("KV found"),
                figure("held in the end, thousand tokens", _held, scale=1e-3),
                _less_column(_held),
                figure("documents computed again", partial(total, column="again"), 0),
                _less_column(partial(total, column="again")),
                Column("of all documents found, %", _found),
            ],
            note=_note,
            labels=2,
            by=(),
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        for policy in job.policies:
            rows = measure(job.cell, policy, job.requests, job.seed, advance)
            yield {"policy": policy, "engine": {"name": "sim"}, "rows": rows}


def draw(cell: StorageCell, requests: int, seed: int) -> Iterator[list[int]]:
    """Draw numbers of documents: the known ones first, then the uploads, then those that are asked for once."""
    random, unique = Random(seed), cell.known + cell.uploads
    for _ in range(requests):
        chosen: dict[int, None] = {}
        while len(chosen) < cell.documents:
            place = random.random()
            if place < _KNOWN:
                chosen[random.randrange(cell.known)] = None
            elif place < _KNOWN + _UPLOADED:
                chosen[cell.known + random.randrange(cell.uploads)] = None
            else:
                chosen[unique] = None
                unique += 1
        yield list(chosen)


def measure(
    cell: StorageCell, policy: str, requests: int, seed: int, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the columns of a record."""
    drawn = list(draw(cell, requests, seed))
    tokens = [cell.document_tokens] * (1 + max(cell.known, *map(max, drawn)))
    fuses = policy != "prefix cache"
    engine = SimulatedFusion(tokens, cell.device_tokens, recompute=0.0, copied=False, fuses=fuses)
    place: Place = lambda documents: (list(documents), 0, lambda _: None)  # noqa: E731
    if policy.endswith("ordered"):
        options: dict[str, Any] = {"capacity_tokens": cell.device_tokens, "suffix_tokens": 0, "reuse": "fused"}
        place = placing(lambda _: cell.document_tokens, **options)
    for document in range(cell.known):
        own, _, confirm = place([document])
        confirm(engine.serve(own, 0, 0).exact)
    computed_before = set(range(cell.known))
    rows: dict[str, list[float]] = {name: [] for name in FusedStorage.columns}
    for documents in drawn:
        own, _, confirm = place(documents)
        found = engine.serve(own, 0, 0)
        confirm(found.exact)
        computed = round(found.computed / cell.document_tokens)
        new = len(set(documents) - computed_before)
        computed_before.update(documents)
        counts = len(documents), len(documents) - computed, computed, computed - new, engine.held_tokens
        for name, count in zip(rows, counts, strict=True):
            rows[name].append(count)
        advance()
    return rows
