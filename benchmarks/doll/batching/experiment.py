"""Retrieval and generation within a memory budget on a virtual clock, with costs fitted to RAGDoll's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, quantiles
from typing import Any, ClassVar

from ragorder.benchmarks.common.served import share
from ragorder.benchmarks.doll.batching.settings import SETTINGS, BatchingCell, System
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.report.canvas import Picture, draw, style
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number, signed
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record, key_of
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

SYSTEMS = {
    "accrag": System("serial static batches, accelerate (AccRAG)", "accelerate", True, "rate", placed=False),
    "vllmrag": System("serial static batches, vLLM (vLLMRAG)", "vllm", True, "rate", placed=False),
    "flexgen": System("serial static batches, one layer ahead (FlexGen)", "prefetch", True, "rate", False, depth=1),
    "ragdoll": System("RAGDoll"),
    "ragdoll-serial": System("RAGDoll, not pipelined", serial=True),
    "ragdoll-fixed": System("RAGDoll, fixed batches", sizes="fixed"),
    "ragdoll-depth1": System("RAGDoll, one layer ahead (FlexGen)", depth=1),
    "ragdoll-depth0": System("RAGDoll, no prefetch", depth=0),
    "ragdoll-unplaced": System("RAGDoll, no resident partitions", placed=False),
    "server": System("RAGDoll's batches by DecoupledServer", server=True),
    "joined": System("requests join at each step", joined=True),
    "kept": System("and prefixes are kept", joined=True, kept="rank"),
    "ours": System("and documents are ordered (ours)", joined=True, kept="ordered"),
    "ours-server": System("the same by DecoupledServer", joined=True, kept="ordered", server=True),
    "ours+passes": System("ours, and requests join a pass", joined=True, kept="ordered", passes=True),
    "ours-server+passes": System("the same by DecoupledServer", joined=True, kept="ordered", passes=True, server=True),
}
"""By policy; from "joined" each adds to the one before."""


class Batching(Experiment):
    """Columns: of each request its arrival, and the seconds of each part. Facts: see `serve`."""

    kind = "batching"
    cell = BatchingCell
    columns = ("latency_s", "at_s", "waiting_s", "retrieval_s", "generation_s")
    facts = ("total_s", "searching_s", "generating_s", "trace")
    runs = True
    policies: ClassVar[Any] = tuple(SYSTEMS)
    unit = "runs"
    counts = "policies"

    def obstacle(self, suite: Suite, cell: BatchingCell, policy: str) -> str | None:
        """Only systems that keep KV need a corpus."""
        return super().obstacle(suite, cell, policy) if SYSTEMS[policy].kept else None

    def corpus(self, cell: BatchingCell) -> Corpus | None:
        found = self._corpus(cell)
        return None if isinstance(found, str) else found

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.batching.generation import Prompts
        from ragorder.benchmarks.doll.batching.serving import serve
        from ragorder.eval.virtual.loop import run_virtual

        cell: BatchingCell = job.cell
        arrivals = cell.arrivals
        at_s = [each.at_s for each in arrivals.draw(job.requests, job.seed)]
        for policy in job.policies:
            system = SYSTEMS[policy]
            prompts = None
            if system.kept and job.corpus is not None:
                prompts = Prompts.of(job.corpus, job.requests, top_k=cell.top_k, seed=job.seed)
            yield {
                "policy": policy,
                "engine": {"name": "virtual", "model": cell.setting},
                **run_virtual(serve(system, cell, at_s, arrivals.steps, prompts)),
            }
            advance()


# The page's colours by system.
_LOOKS = {
    "accrag": "none",
    "vllmrag": "retrieval",
    "flexgen": "greedy",
    "ragdoll": "prefix",
    "joined": "sorted",
    "kept": "recency",
    "ours": "earned",
    "ours+passes": "oracle",
}


def latency_picture(setting: str, records: Mapping[str, Record]) -> Picture:
    """Latency of each request in the order of arrival (Figure 7)."""

    def paint(axes: Any) -> None:
        for policy, record in records.items():
            looks = style(_LOOKS.get(policy, policy))
            axes.plot(record.rows["latency_s"], looks.dashes, color=looks.colour, label=policy, linewidth=1.2)
        axes.set_yscale("log")
        axes.set_xlabel("request")
        axes.set_ylabel("latency, s")
        axes.legend(fontsize=7.5, frameon=False, ncols=2)

    said = (
        f"{policy} {format_number(fmean(record.rows['latency_s']), 0)} s on average"
        for policy, record in records.items()
    )
    return draw(paint, title=f"Latency of each request: {setting}", alt="; ".join(said), caption="One seed.")


_SERIAL = "vllmrag"
_RAGDOLL = "ragdoll"
_BATCHED = "ragdoll-serial"

_COSTS = (
    "Fitted to the paper: seconds of a pass over the database and of a batch's generation, by engine (Table 1); its"
    " growth with the batch (Figure 4 for 8B, FLOPs for 70B); the largest batches, on PF-Low so that waiting is "
    "that of Table 1, RAGDoll's with 70B and thus its ratio among them; memory of partitions (Figure 9); "
    "what generation costs retrieval beside it (Table 1, one figure). Predicted: waiting, totals and ratios otherwise, "
    "ablations, idle times. Guessed: how much the times of layers vary (exponential), answers of 32 tokens. Ours on "
    "top is no measurement: its documents, orders and prefixes are real, its times are these costs.",
)

# Table 2, mean seconds.
_TABLE_2 = {
    "high-8b": {"ragdoll": 480, "ragdoll-serial": 663, "ragdoll-fixed": 657, "ragdoll-depth1": 531},
    "high-70b": {"ragdoll": 1236, "ragdoll-serial": 1954, "ragdoll-fixed": 1841, "ragdoll-depth1": 1283},
}

_Runs = Mapping[str, list[Record]]
_Cells = list[tuple[BatchingCell, dict[str, list[Record]]]]


def make_part(suite: Suite, results: Results) -> Part:
    found: dict[object, tuple[BatchingCell, dict[str, list[Record]]]] = {}
    for record in results.of(Batching.record, suite.name):
        cell = BatchingCell.read(record.cell, suite.name)
        found.setdefault(key_of(record.cell), (cell, {}))[1].setdefault(record.policy, []).append(record)
    if not found:
        return Part()
    cells = list(found.values())
    tables = _TABLES.get(suite.report.chart, _serving)
    # The other suites refer to this one.
    words = _COSTS if tables is _serving else ()
    return Part(list(tables(cells)), words=words, pictures=lambda: _pictures(suite.report.chart, cells))


def _by_setting(
    title: str,
    cells: _Cells,
    entry: Callable[[BatchingCell, _Runs, str], str | Entry],
    note: str = "",
    policies: Sequence[str] | None = None,
) -> Table:
    """Return a table with a row for each policy and a column for each cell."""
    table = Table(title, ["", *(cell.setting for cell, _ in cells)], note=note)
    for policy in _policies(cells) if policies is None else policies:
        table.add(SYSTEMS[policy].words, *(entry(cell, runs, policy) for cell, runs in cells))
    return table


def _serving(cells: _Cells) -> Iterator[Table]:
    note = "Below it: the paper's, and how far ours is from it."
    yield _by_setting("Mean latency, s", cells, _latency_entry, note)
    others = [policy for policy in _policies(cells) if policy != _SERIAL]
    note = "Least to most of the seeds below it, with the paper's."
    yield _by_setting(f"Times shorter than {_SERIAL}", cells, _ratio_entry, note, others)
    for cell, runs in cells:
        table = Table(f"Parts of the latency, s: {SETTINGS[cell.setting].words}", ["", *_PARTS])
        for policy in _policies([(cell, runs)]):
            known = SETTINGS[cell.setting].paper.get(policy)
            theirs = [f"paper {getattr(known, part):,.0f}" if known else "" for part in _PARTS]
            ours = [format_number(_mean(runs[policy], column), 0) for column in _PARTS.values()]
            table.add(SYSTEMS[policy].words, *map(Entry, ours, theirs))
        yield table
    note = "25, 50 and 75 % of the requests, and the longest (Figure 8)."
    yield _by_setting("Latency, s: quartiles and most", cells, lambda _, runs, policy: _spread(runs.get(policy)), note)
    yield from _kept(cells)


_PARTS = {"waiting": "waiting_s", "retrieval": "retrieval_s", "generation": "generation_s"}


def _kept(cells: _Cells) -> Iterator[Table]:
    def entry(_: BatchingCell, runs: _Runs, policy: str) -> str:
        computed = share(runs.get(policy, ()), "computed_tokens", "prompt_tokens")
        return format_number(None if computed is None else 100 * (1 - computed))

    policies = [policy for policy in _policies(cells) if SYSTEMS[policy].kept]
    if policies:
        yield _by_setting("Prompt tokens that were kept, %", cells, entry, policies=policies)


def _ablation(cells: _Cells) -> Iterator[Table]:
    def entry(cell: BatchingCell, runs: _Runs, policy: str) -> Entry:
        whole, without = _mean(runs.get(_RAGDOLL)), _mean(runs.get(policy))
        if whole is None or without is None:
            return Entry("–")
        paper = _TABLE_2.get(cell.setting, {})
        said = f"paper {paper[policy]:,}" if policy in paper else ""
        if policy == _RAGDOLL:
            return Entry(f"{format_number(whole, 0)} s", said)
        if said:
            said += f", {signed(100 * (paper[policy] / paper[_RAGDOLL] - 1), 0)} %"
        return Entry(f"{signed(100 * (without / whole - 1), 0)} %", said)

    yield _by_setting("Mean latency, % longer than RAGDoll's", cells, entry)


def _placement(cells: _Cells) -> Iterator[Table]:
    for name, words in (
        ("resident", "partitions in host memory"),
        ("weights", "share of weights on the device"),
        ("batch", "requests in a batch"),
    ):
        others = [other for other in ("resident", "weights") if other != name]
        chosen = [
            each
            for each in cells
            if getattr(each[0], name) is not None and all(getattr(each[0], other) is None for other in others)
        ]
        table = Table(f"Seconds by {words}", ["", words, *_PARTS, "latency"], labels=2)
        for cell, runs in chosen:
            records = next(iter(runs.values()))
            row = (format_number(_mean(records, column), 0) for column in (*_PARTS.values(), "latency_s"))
            table.add(SETTINGS[cell.setting].words, f"{getattr(cell, name):g}", *row)
        if chosen:
            yield table


def _idle(cells: _Cells) -> Iterator[Table]:
    headings = ["", "", "searching", "generating", "idle, mean of both"]
    table = Table("Time, % of all until the last answer", headings, labels=2)
    for cell, runs in cells:
        for policy in _policies([(cell, runs)]):
            if cell.batch and policy != _BATCHED:
                # The others have batches of their own.
                continue
            facts: list[Any] = [record.facts for record in runs[policy]]
            total = sum(each["total_s"] for each in facts)
            searching, generating = (
                100 * sum(each[name] for each in facts) / total for name in ("searching_s", "generating_s")
            )
            setting = SETTINGS[cell.setting].words + (f", batches of {cell.batch}" if cell.batch else "")
            figures = (searching, generating, 100 - (searching + generating) / 2)
            table.add(setting, SYSTEMS[policy].words, *(format_number(each, 0) for each in figures))
    yield table

    batched = [each for each in cells if each[0].batch]
    if batched:
        table = Table("Seconds of a batch in a serial system", ["", "requests in a batch", "retrieval", "generation"])
        for cell, runs in batched:
            records = runs.get(_BATCHED)
            if records is not None:
                row = (format_number(_mean(records, column), 0) for column in ("retrieval_s", "generation_s"))
                table.add(SETTINGS[cell.setting].words, str(cell.batch), *row)
        table.note = "The paper's: retrieval nearly constant up to 64, generation twice as long (Figure 4)."
        yield table


def _by_corpus(cells: _Cells) -> Iterator[Table]:
    def entry(_: BatchingCell, runs: _Runs, policy: str) -> Entry:
        seconds, theirs = _mean(runs.get(policy)), _mean(runs.get(_SERIAL))
        ratio = f"{format_number(theirs / seconds, 2)} times shorter" if seconds and theirs else ""
        return Entry(format_number(seconds, 0), "" if policy == _SERIAL else ratio)

    for corpus in dict.fromkeys(cell.corpus for cell, _ in cells):
        chosen = [each for each in cells if each[0].corpus == corpus]
        yield _by_setting(f"Mean latency on {corpus}, s", chosen, entry, f"Below it: against {_SERIAL}.")
        yield from _kept(chosen)


_TABLES: dict[str, Callable[[_Cells], Iterator[Table]]] = {
    "ablation": _ablation,
    "placement": _placement,
    "idle": _idle,
    "kept": _by_corpus,
}


def _pictures(chart: str, cells: _Cells) -> list[Picture]:
    if chart == "serving":
        return [
            latency_picture(SETTINGS[cell.setting].words, {name: runs[name][0] for name in _policies([(cell, runs)])})
            for cell, runs in cells
        ]
    return []


def _policies(cells: _Cells) -> list[str]:
    measured = {policy for _, runs in cells for policy in runs}
    return [policy for policy in SYSTEMS if policy in measured]


def _mean(records: Sequence[Record] | None, column: str = "latency_s") -> float | None:
    return fmean(fmean(record.rows[column]) for record in records) if records else None


def _latency_entry(cell: BatchingCell, runs: _Runs, policy: str) -> Entry:
    seconds, paper = _mean(runs.get(policy)), SETTINGS[cell.setting].paper.get(policy)
    if seconds is None:
        return Entry("–")
    note = ""
    if paper is not None:
        note = f"paper {paper.latency:,.0f}, {signed(100 * (seconds / paper.latency - 1), 0)} %"
    return Entry(format_number(seconds, 0), note)


def _ratio_entry(cell: BatchingCell, runs: _Runs, policy: str) -> Entry:
    theirs = {record.seed: fmean(record.rows["latency_s"]) for record in runs.get(_SERIAL, ())}
    ratios = [
        theirs[record.seed] / fmean(record.rows["latency_s"])
        for record in runs.get(policy, ())
        if record.seed in theirs
    ]
    if not ratios:
        return Entry("–")
    note = f"{format_number(min(ratios), 2)} to {format_number(max(ratios), 2)}"
    paper = SETTINGS[cell.setting].paper
    if policy in paper:
        note += f", paper {format_number(paper[_SERIAL].latency / paper[policy].latency, 2)}"
    return Entry(format_number(fmean(ratios), 2), note)


def _spread(records: Sequence[Record] | None) -> str:
    if not records:
        return "–"
    values = [value for record in records for value in record.rows["latency_s"]]
    return ", ".join(format_number(value, 0) for value in (*quantiles(values, n=4), max(values)))
