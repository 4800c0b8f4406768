"""KV held by a knowledge base and its users' uploads: the suites of kind "fused-storage"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.fusion.fused_orders import SimulatedFusion
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import THIN, format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.orderer import Orderer

__all__ = ["POLICIES", "FusedStorage", "StorageCell", "StorageRecord", "draw", "make_part", "measure"]


class StorageCell(SuiteCell):
    """Requests for `documents` of `document_tokens` tokens, at an engine with room for `device_tokens`, unlimited by
    default. 60 % of them are any of the `known` ones, which were computed before the first request, 30 % any of the
    `uploads` that several users share, and 10 % are asked for once (FusionRAG 5.3.3; the numbers are ours)."""

    documents: int = Field(10, ge=1)
    document_tokens: int = Field(200, ge=1)
    known: int = Field(1_000, ge=10)
    uploads: int = Field(1_000, ge=10)
    device_tokens: int | None = Field(None, ge=1)


class StorageRecord(Record):
    """By request: its documents, those of which KV was `found`, those `computed`, of these those computed `again`; and
    the tokens of KV `held` afterwards."""

    called: ClassVar[str] = "a count of KV held"
    is_run: ClassVar[bool] = False

    type: Literal["fused-storage"] = "fused-storage"
    cell: dict[str, Any]
    rows: dict[str, list[float]]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "documents", "found", "computed", "again", "held"


POLICIES = ("prefix cache", "alternative path", "alternative path, ordered")
"""KV found as a prefix; also elsewhere (FusionRAG 4.1); the same, with documents ordered by ragorder."""

_KNOWN, _UPLOADED = 0.6, 0.3


def draw(cell: StorageCell, requests: int, seed: int) -> Iterator[list[int]]:
    """Numbers of documents: the known ones first, then the uploads, then those that are asked for once."""
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
    """Rows of a `StorageRecord`."""
    drawn = list(draw(cell, requests, seed))
    tokens = [cell.document_tokens] * (1 + max(cell.known, *map(max, drawn)))
    fuses = policy != "prefix cache"
    engine = SimulatedFusion(tokens, cell.device_tokens, recompute=0.0, copied=False, fuses=fuses)
    place = _ordered(cell) if policy.endswith("ordered") else lambda documents: (documents, lambda _: None)
    for document in range(cell.known):
        own, confirm = place([document])
        confirm(engine.serve(own, 0, 0).exact)
    computed_before = set(range(cell.known))
    rows: dict[str, list[float]] = {name: [] for name in ("documents", "found", "computed", "again", "held")}
    for documents in drawn:
        own, confirm = place(documents)
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


def _ordered(cell: StorageCell) -> Callable[[list[int]], tuple[list[int], Callable[[int], None]]]:
    orderer = Orderer(
        key=lambda document: document,
        tokens=lambda _: cell.document_tokens,
        capacity_tokens=cell.device_tokens,
        block_size=1,
        suffix_tokens=0,
        reuse="fused",
        strict=True,
    )

    def place(documents: list[int]) -> tuple[list[int], Callable[[int], None]]:
        ordering = orderer.order(documents)
        return list(ordering.documents), ordering.confirm

    return place


class FusedStorage(Experiment):
    kind = "fused-storage"
    record = StorageRecord
    cell = StorageCell
    policies: ClassVar[Any] = POLICIES

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        for policy in job.policies:
            rows = measure(job.cell, policy, job.requests, job.seed, advance)
            yield {"policy": policy, "engine": {"name": "sim"}, "rows": rows}


_BASELINE = "prefix cache"
_HEADINGS = (
    "device, tokens",
    "KV found",
    "held in the end, thousand tokens",
    "less, %",
    "documents computed again",
    "less, %",
    "of all documents found, %",
)


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(StorageRecord, suite.name))
    if not groups:
        return Part([])
    table = Table("KV of a knowledge base and of uploads", list(_HEADINGS), labels=2)
    for group in groups:
        cell = StorageCell.read(group.cell, "fusion-storage")
        room = "unlimited" if cell.device_tokens is None else f"{cell.device_tokens:,}".replace(",", THIN)
        for policy in group.policies:
            runs = group.runs(policy)
            held, again = _held(runs), _mean(runs, "again")
            before = group.runs(_BASELINE)
            table.add(
                room,
                policy,
                format_number(held / 1e3),
                _less(held, _held(before)) if before else "",
                format_number(again, 0),
                _less(again, _mean(before, "again")) if before else "",
                format_number(100 * _mean(runs, "found") / _mean(runs, "documents")),
            )
    first = groups[0]
    cell = StorageCell.read(first.cell, "fusion-storage")
    table.note = (
        f"Means of seeds {', '.join(map(str, first.seeds))}: {len(first.runs()[0].rows['held']):,} requests for "
        f"{cell.documents} documents of {cell.document_tokens} tokens, 60 % of them of {cell.known:,} that were "
        f"computed before, 30 % of {cell.uploads:,} uploads, 10 % asked for once. Less: than with a prefix cache "
        "alone. Again: of documents that had been computed before. The paper has 71.0 % less, 82.3 % less and 77.9 % "
        "found; it does not say of how many documents."
    )
    return Part([table])


def _held(runs: Sequence[StorageRecord]) -> float:
    return fmean(run.rows["held"][-1] for run in runs)


def _mean(runs: Sequence[StorageRecord], column: str) -> float:
    """Of the seeds' sums."""
    return fmean(sum(run.rows[column]) for run in runs)


def _less(value: float, before: float) -> str:
    return "" if value == before else format_number(100 * (1 - value / before))
