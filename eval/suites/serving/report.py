"""Tables and pictures of policies compared on one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragorder.eval.report.groups import Group, group_runs
from ragorder.eval.report.metrics import (
    CACHED,
    DOCUMENTS,
    PLACES,
    SHARE_MOVED,
    TBT_P50,
    TBT_P99,
    TTFT_MEAN,
    TTFT_P50,
    TTFT_P95,
    TTFT_P99,
    Metric,
)
from ragorder.eval.report.paper import paper_beside, paper_heading
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import (
    PairedDifference,
    StatisticsError,
    Summary,
    compare_seeds,
    known_mean,
    summary,
)
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import (
    THIN,
    cell_words,
    change_words,
    format_number,
    policy_words,
    range_words,
    seeds_by_row,
    served_words,
    verdict_words,
)
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import Suite
from ragorder.eval.suites.serving.moves import moves_table
from ragorder.eval.suites.serving.objective import objective_table, opens_loop
from ragorder.eval.suites.serving.pictures import pictures_of

_FEW_CELLS = 3
_FEW_SEEDS = 3
_MOVED = (SHARE_MOVED, PLACES)
_FAST = 0.6
"""Of the median warm-up: RAGCache++ section 4.1."""
_ENGINES = {
    "sim": "simulated engine, exact to the block",
    "vllm": "vLLM in this process",
    "torch": "the embedded engine in this process",
    "openai": "a live server",
}


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(RunRecord, suite.name))
    policies = [policy for group in groups for policy in group.policies]
    baseline = suite.baseline if suite.baseline in policies else next(iter(policies), "")
    return Part(
        [*_comparison_tables(suite, groups, baseline), *_detail_tables(suite, groups, baseline)],
        engine=_engines(groups),
        setting=_setting(groups),
        groups=groups,
        baseline=baseline,
        pictures=lambda: pictures_of(suite, groups, baseline),
    )


def _engines(groups: Sequence[Group]) -> str:
    found = []
    for group in groups:
        name, model = str(group.engine.get("name", "unknown engine")), group.engine.get("model")
        block = group.engine.get("block_size")
        found.append(
            _ENGINES.get(name, name)
            + (f", model {model}" if model else "")
            + (f", blocks of {block} tokens" if block else "")
        )
    return "; ".join(dict.fromkeys(found))


def _setting(groups: Sequence[Group]) -> str:
    if not groups:
        return ""
    same = {name: value for name, value in groups[0].cell.items() if name not in groups[0].varies}
    words = cell_words({name: value for name, value in same.items() if value not in ([], {}, 0, False, "none", "")})
    sizes = {group.engine.get("capacity_tokens") for group in groups}
    if len(sizes) == 1 and not any("capacity" in name for name in groups[0].cell):
        size = sizes.pop()
        words += f"{', ' if words else ''}cache {'unlimited' if size is None else f'{size:,} tokens'}"
    return words


def _comparison_tables(suite: Suite, groups: Sequence[Group], baseline: str) -> list[Table]:
    if not groups:
        return []
    if len(groups) <= _FEW_CELLS:
        return [_policies_table(suite, group, baseline) for group in groups]
    metrics = [CACHED] + [TTFT_P50, TTFT_MEAN, TTFT_P95] * any(group.has("ttft_ms") for group in groups)
    if opens_loop(groups):
        tails = [TTFT_P99, TBT_P50, TBT_P99]
        metrics += [metric for metric in tails if any(group.has(metric.column) for group in groups)]
    return [_cells_table(suite, groups, baseline, metric) for metric in metrics]


def _policies_table(suite: Suite, group: Group, baseline: str) -> Table:
    timed, predicted = group.has("ttft_ms"), group.has("predicted_tokens")
    paper = paper_heading(suite, group.cell)
    headings = ["policy", CACHED.heading, "whole documents cached, mean"]
    headings += [*(f"TTFT {name}, ms" for name in ("p50", "mean", "p95", "p99"))] if timed else []
    answered = group.has("tbt_ms")
    headings += [TBT_P50.heading, TBT_P99.heading] if answered else []
    headings += ["predicted within a block, % of requests"] if predicted else []
    lost = [name for name in ("failures", "fallbacks") if any(getattr(run, name) for run in group.runs())]
    headings += lost
    table = Table(group.label, [*headings, *paper])
    for policy in group.policies:
        row = [Entry(policy_words(policy)), _compared(group, policy, baseline, CACHED)]
        row.append(Entry(format_number(group.value(policy, DOCUMENTS), 2)))
        if timed:
            row += [_compared(group, policy, baseline, metric) for metric in (TTFT_P50, TTFT_MEAN, TTFT_P95)]
            row.append(Entry(format_number(group.value(policy, TTFT_P99))))
        if answered:
            row += [Entry(format_number(group.value(policy, metric))) for metric in (TBT_P50, TBT_P99)]
        if predicted:
            row.append(Entry(format_number(_predicted(group, policy))))
        counts = [sum(getattr(run, name) for run in group.runs(policy)) for name in lost]
        row += [Entry(f"{count:,}", tone="bad" if count else "") for count in counts]
        row += [Entry(*beside) for beside in paper_beside(suite, group.cell, policy, baseline)]
        table.rows.append(row)
    table.note = _counted([group])
    return table


def _cells_table(suite: Suite, groups: Sequence[Group], baseline: str, metric: Metric) -> Table:
    policies = list(dict.fromkeys(policy for group in groups for policy in group.policies))
    paper = paper_heading(suite, None) if metric is CACHED or metric is TTFT_P50 else []
    table = Table(metric.heading, ["", *map(policy_words, policies), *paper])
    for group, seeds in zip(groups, _seeds(groups)[0], strict=True):
        row = [Entry(group.label, seeds)]
        row += [_compared(group, p, baseline, metric) if p in group.policies else Entry("–") for p in policies]
        row += [Entry(*beside) for beside in paper_beside(suite, group.cell, None, baseline)] if paper else []
        table.rows.append(row)
    table.note = _counted(groups)
    return table


def _compared(group: Group, policy: str, baseline: str, metric: Metric) -> Entry:
    value = format_number(group.value(policy, metric), metric.decimals)
    comparison = group.compare(policy, baseline, metric)
    if comparison is None:
        return Entry(value, "baseline" if policy == baseline else "")
    return Entry(value, change_words(comparison, metric.decimals), verdict_words(comparison))


def _predicted(group: Group, policy: str) -> float | None:
    predicted, cached = group.values(policy, "predicted_tokens"), group.values(policy, "cached_tokens")
    if len(predicted) != len(cached):
        return None
    errors = abs(predicted - cached)
    within = summary(100.0 * (errors[errors == errors] <= group.block_size))
    return within.mean if within else None


def _seeds(groups: Sequence[Group]) -> tuple[list[str], str]:
    return seeds_by_row([group.seeds for group in groups])


def _counted(groups: Sequence[Group]) -> str:
    served = [run for group in groups for run in group.runs()]
    words = [served_words([run.requests for run in served], [run.warmup for run in served]), _seeds(groups)[1]]
    if any(len({len(runs) for runs in group.policies.values()}) > 1 for group in groups):
        words.append("not every policy has every seed yet")
    return "; ".join(words)


def _detail_tables(suite: Suite, groups: Sequence[Group], baseline: str) -> list[Table]:
    tables: list[Table] = []
    few = len(groups) <= _FEW_CELLS
    if any(run.throughput for group in groups for run in group.runs()):
        tables.append(_throughput(groups, baseline))
    if (found := objective_table(groups, baseline)) is not None:
        tables.append(found)
    if suite.about("breakdown", "order_us", "build_us"):
        tables.append(_breakdown(groups) if few else _by_cell("Time to order, p50, µs", groups, _order_time))
    if suite.about("hits"):
        tables.append(_hits(groups))
    if suite.name == "table-7":
        tables.append(_saved(groups))
    if suite.about("moves"):
        tables.append(moves_table(groups, baseline, short=not suite.source))
    if suite.about("position", "moved_share", "displacement"):
        tables += [_positions(groups, baseline)] if few else [_by_cell(m.heading, groups, _value(m)) for m in _MOVED]
    if suite.about("tenths"):
        tables += [table for group in groups if (table := _tenths(group)) is not None]
    if suite.about("predicted_tokens", "staleness") and not few:
        tables.append(_by_cell("Predicted to within one block, % of requests", groups, _prediction_entry))
    return [table for table in tables if any(entry.text != "–" for row in table.rows for entry in row[table.labels :])]


def _tenths(group: Group) -> Table | None:
    """The runs under load, tenth by tenth; memory is of this process, all policies together."""
    import numpy as np

    headings = ["policy", "tenth", CACHED.heading, "order p50, µs", "in flight", "memory, MB", "tree nodes"]
    table = Table(f"The run in tenths{f' ({group.label})' if group.label else ''}", headings, labels=2)
    for policy in group.policies:
        runs = [run for run in group.runs(policy) if "tenths" in run.facts]
        if not runs:
            continue
        parts = {
            name: [np.array_split(run.rows[name], 10) for run in runs]
            for name in ("cached_tokens", "prompt_tokens", "order_us")
        }
        for tenth in range(len(runs[0].facts["tenths"]["in_flight"])):
            cached, prompts, order = (
                np.concatenate([each[tenth] for each in parts[name]]).astype(float)
                for name in ("cached_tokens", "prompt_tokens", "order_us")
            )
            told = [
                known_mean(run.facts["tenths"][name][tenth] for run in runs)
                for name in ("in_flight", "rss_mb", "tree_nodes")
            ]
            shares = [100 * np.nansum(cached) / max(1.0, float(np.nansum(prompts))), np.nanmedian(order)]
            numbers = zip([*shares, *told], (1, 0, 1, 0, 0), strict=True)
            table.add(
                "" if tenth else policy_words(policy),
                str(tenth + 1),
                *(format_number(value, decimals) for value, decimals in numbers),
            )
        table.divide()
    return table if table.rows else None


def _by_cell(title: str, groups: Sequence[Group], make: Callable[[Group, str], Entry]) -> Table:
    policies = list(dict.fromkeys(policy for group in groups for policy in group.policies))
    table = Table(title, ["", *map(policy_words, policies)])
    for group in groups:
        row = [make(group, policy) if policy in group.policies else Entry("–") for policy in policies]
        table.rows.append([Entry(group.label), *row])
    return table


def _order_time(group: Group, policy: str) -> Entry:
    found = group.summary(policy, "order_us")
    return Entry(format_number(found.p50), f"p99 {format_number(found.p99)}") if found else Entry("–")


def _value(metric: Metric) -> Callable[[Group, str], Entry]:
    return lambda group, policy: Entry(format_number(group.value(policy, metric), metric.decimals))


def _prediction_entry(group: Group, policy: str) -> Entry:
    return Entry(format_number(_predicted(group, policy)))


def _each(groups: Sequence[Group], make: Callable[[Group, str], list[Entry] | None]) -> list[list[Entry]]:
    several = len(groups) > 1
    rows = []
    for group in groups:
        for policy in group.policies:
            entries = make(group, policy)
            if entries is not None:
                rows.append([*([Entry(group.label)] * several), Entry(policy_words(policy)), *entries])
    return rows


def _table(title: str, groups: Sequence[Group], headings: Sequence[str], rows: list[list[Entry]], note: str) -> Table:
    several = len(groups) > 1
    return Table(title, [*[""] * several, "policy", *headings], rows, 1 + several, note)


def _spread(found: Summary | None) -> Entry:
    return (
        Entry(format_number(found.mean), f"p50 {format_number(found.p50)}, p99 {format_number(found.p99)}")
        if found
        else Entry("–")
    )


def _throughput(groups: Sequence[Group], baseline: str) -> Table:
    names = ("requests_per_s", "tokens_per_s")

    def row(group: Group, policy: str) -> list[Entry] | None:
        entries = []
        for name in names:
            values = _rates(group, policy, name)
            decimals = 2 if name == "requests_per_s" else 0
            spread = range_words(values.values(), decimals) if len(values) > 1 else ""
            mean = sum(values.values()) / len(values) if values else None
            entries.append(Entry(format_number(mean, decimals), spread))
        found = None if policy == baseline else _change_of_rates(group, policy, baseline)
        if found is not None:
            entries[0] = Entry(entries[0].text, change_words(found), verdict_words(found))
        return entries if any(entry.text != "–" for entry in entries) else None

    rows = _each(groups, row)
    note = "Mean of the seeds, below it their range"
    note += (
        f", or the change with Student's interval over the seeds, where there are {_FEW_SEEDS} or more."
        if any(entry.verdict for entries in rows for entry in entries)
        else ": a seed has one throughput, and these are too few for an interval."
    )
    return _table("Throughput", groups, ["requests/s", "tokens/s"], rows, note)


def _rates(group: Group, policy: str, name: str) -> dict[int, float]:
    """By seed."""
    runs = group.policies.get(policy, {})
    return {
        seed: float(run.throughput[name]) for seed, run in runs.items() if run.throughput and name in run.throughput
    }


def _change_of_rates(group: Group, policy: str, baseline: str) -> PairedDifference | None:
    """Seeds are drawn, not requests: those of one run wait for one another."""
    theirs, ours = (_rates(group, each, "requests_per_s") for each in (baseline, policy))
    seeds = sorted(theirs.keys() & ours.keys())
    if len(seeds) < _FEW_SEEDS:
        return None
    try:
        return compare_seeds([theirs[seed] for seed in seeds], [ours[seed] for seed in seeds], relative=True)
    except StatisticsError:
        return None


def _breakdown(groups: Sequence[Group]) -> Table:
    def row(group: Group, policy: str) -> list[Entry] | None:
        parts = [group.summary(policy, column) for column in ("order_us", "build_us", "ttft_ms")]
        order, build, times = parts
        ours = sum(part.mean for part in (order, build) if part) / 1e3
        overhead = 100 * ours / (ours + times.mean) if times and (order or build) else None
        return [*map(_spread, parts), Entry(format_number(overhead, 3))]

    headings = ["order, µs", "build, µs", "generate (to the first token), ms", "order + build, % of the whole"]
    note = "Means. Ordering and building are thread CPU time; a simulated engine takes no time to generate."
    return _table("Where the time of a request goes", groups, headings, _each(groups, row), note)


def _saved(groups: Sequence[Group]) -> Table:
    def row(group: Group, policy: str) -> list[Entry] | None:
        import numpy as np

        cached, prompts = group.values(policy, "cached_tokens"), group.values(policy, "prompt_tokens")
        documents = group.values(policy, "cached_documents")
        if len(cached) != len(prompts) or not len(cached):
            return None
        share = summary(100 * cached / np.maximum(1, prompts))
        assert share is not None
        plain, times = group.summary("none", "ttft_ms"), group.values(policy, "ttft_ms")
        saved = summary(100 * (1 - times / plain.p50)) if plain and len(times) else None
        found = int((documents >= 1).sum())
        return [
            *[Entry(f"{format_number(value)}{THIN}%") for value in (share.p50, share.mean, share.p95)],
            Entry(f"{found:,} of {len(documents):,}" if len(documents) else "–"),
            Entry(
                f"{format_number(saved.p50)}{THIN}%" if saved else "–",
                f"mean {format_number(saved.mean)}{THIN}%" if saved else "",
            ),
        ]

    headings = ["prefill saved p50", "mean", "p95", "requests with a document cached", "time saved p50"]
    note = (
        "Prefill saved: cached tokens of a request's prompt tokens. Time saved, as the paper counts it: 1 − TTFT / the "
        "p50 without a cache, where both were timed."
    )
    return _table("Prefill saved per request", groups, headings, _each(groups, row), note)


def _hits(groups: Sequence[Group]) -> Table:
    import numpy as np

    def row(group: Group, policy: str) -> list[Entry] | None:
        documents, times = group.values(policy, "cached_documents"), group.values(policy, "ttft_ms")
        if not len(documents):
            return None
        hits = documents[documents >= 1]
        warm = [
            (each, np.median(np.asarray(run.rows["ttft_ms"][: run.warmup], dtype=float)))
            for run in group.runs(policy)
            if run.warmup and (each := run.column("ttft_ms")) is not None
        ]
        fast = [each < _FAST * bar for each, bar in warm]
        cold = group.summary("none", "ttft_ms")
        share = 100 * len(hits) / len(documents)
        return [
            Entry(f"{format_number(share)}{THIN}%", f"{len(hits):,} of {len(documents):,}"),
            Entry(format_number(float(hits.mean()) if len(hits) else None, 2)),
            Entry(format_number(100 * float(np.concatenate(fast).mean()) if fast else None)),
            Entry(format_number(100 * float((times < _FAST * cold.p50).mean()) if cold and len(times) else None)),
        ]

    headings = ["requests with a document cached", "documents cached in such a request, mean"]
    headings += ["Fast%, as the paper counts it", "the same by one bar for all"]
    note = (
        "Fast%: requests faster than 0.6 times the median of the policy's own warm-up. A warm-up that hits lowers that "
        "bar, so a policy that hits early seems to hit less. By one bar: 0.6 times the p50 without a cache."
    )
    return _table("Hits, and the paper's Fast%", groups, headings, _each(groups, row), note)


def _positions(groups: Sequence[Group], baseline: str) -> Table:
    def row(group: Group, policy: str) -> list[Entry] | None:
        if group.value(policy, PLACES) is None and group.value(policy, SHARE_MOVED) is None:
            return None
        places = group.summary(policy, "displacement")
        return [
            Entry(format_number(group.value(policy, SHARE_MOVED))),
            Entry(format_number(places.mean, 2), f"p95 {format_number(places.p95, 2)}") if places else Entry("–"),
            _compared(group, policy, baseline, CACHED),
        ]

    headings = [SHARE_MOVED.heading, PLACES.heading, CACHED.heading]
    note = "How many documents stand elsewhere than retrieval ranked them, how far from there, and what it brings."
    return _table("What was moved", groups, headings, _each(groups, row), note)
