"""Contents of a report, before it is rendered."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.compared import Compared, Headline, compare_groups, finding, headline_of, overview_of
from ragorder.eval.report.groups import Group
from ragorder.eval.report.paper import paper_rows
from ragorder.eval.report.part import part_of
from ragorder.eval.report.statistics import BLOCK, need_scipy
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import cell_words, policy_words, range_words
from ragorder.eval.running.load import Progress, silent
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record, SessionRecord
from ragorder.eval.running.suite import Kind, Suite, kinds

STATISTICS = (
    "Every policy serves the same requests, so differences are paired request by request. In brackets: 95 % intervals "
    f"(percentile bootstrap, 2,000 resamples of blocks of up to {BLOCK} consecutive requests within each seed), the "
    "warm-up left out. Where an interval covers zero, it says: no difference. About one interval in twenty misses the "
    "truth, and there are many here: look for what holds across rows. Cached tokens differ by percentage points, times "
    "by per cent of the baseline's."
)


@dataclass(slots=True)
class Section:
    suite: Suite
    baseline: str
    groups: list[Group]
    engine: str
    setting: str
    tables: list[Table] = field(default_factory=list)
    unavailable: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    drawings: list[Callable[[], Sequence[Picture]]] = field(default_factory=list)
    headline: Headline = field(default_factory=Headline)
    compared: list[Compared] = field(default_factory=list)

    @property
    def pictures(self) -> list[Picture]:
        return [picture for draw in self.drawings for picture in draw()]


@dataclass(slots=True)
class Report:
    title: str
    measured: str
    headline: Headline
    overview: Table | None
    statistics: str
    finding: list[str]
    side_by_side: Table | None
    sections: list[Section]
    not_measured: list[str]
    checks: Table | None
    machines: list[str]
    commands: list[str]
    notes: list[str]


def make_report(
    results: Results,
    suites: Mapping[str, Suite],
    progress: Progress = silent,
    title: str | None = None,
    known: Mapping[str, type[Kind]] | None = None,
) -> Report:
    """`title`: instead of the suites' titles; `known`: the kinds of records, all by default. Raises ImportError naming
    the extra."""
    known = kinds() if known is None else known
    numbers = any(line.type != "replay" for line in results.records)
    if numbers:
        need_scipy()
    order = [*(name for name in suites if name in results.suites), *(n for n in results.suites if n not in suites)]
    advance = progress("comparing", len(order)) if order else silent("", 0)
    own = {name: info for each in known.values() for name, info in each.own_suites().items()}
    sections = []
    for name in order:
        sections.append(_section(suites.get(name) or own.get(name) or Suite.unlisted(name), results, known))
        advance()
    papers = any(_on_papers_trace(section) for section in sections)
    words, side_by_side = finding([group for section in sections for group in section.groups]) if papers else ([], None)
    return Report(
        title=title or f"ragorder: {_titles(sections)}",
        measured=_measured(results),
        headline=_headline(sections),
        overview=_overview(sections),
        statistics=STATISTICS if numbers or not results.records else "",
        finding=words,
        side_by_side=side_by_side,
        sections=sections,
        not_measured=_not_measured(results, known),
        checks=_checks(results),
        machines=_machines(results),
        commands=list(dict.fromkeys(_command(session, results.folder_of(session)) for session in results.sessions)),
        notes=results.notes,
    )


def _titles(sections: Sequence[Section]) -> str:
    titles = [section.suite.title for section in sections] or ["nothing was measured"]
    return " and ".join(titles) if len(titles) < 3 else f"{titles[0]}, and {len(titles) - 1} more"


def _on_papers_trace(section: Section) -> bool:
    traces = {group.cell.get("workload") for group in section.groups}
    published = bool(section.suite.source and traces)
    return published and (section.suite.from_paper or bool(traces & {"paper", "paper-shuf"}))


def _headline(sections: Sequence[Section]) -> Headline:
    found = [section.headline for section in sections]
    compared = [section for section in sections if section.compared]
    own = [section for section in compared if not section.suite.source]
    found.append(headline_of([(section.suite.title, section.compared) for section in own or compared]))
    if not compared and any(section.groups for section in sections):
        found.append(Headline(["Not decided: no two policies were compared."]))
    found.sort(key=lambda each: each.lead is None)
    words = [words for each in found for words in each.words]
    lead = next((each.lead for each in found if each.lead is not None), None)
    return Headline(words, [chart for each in found for chart in each.charts], lead)


def _overview(sections: Sequence[Section]) -> Table | None:
    return overview_of([(Entry(each.suite.title, each.suite.name), each.compared) for each in sections])


def _section(suite: Suite, results: Results, known: Mapping[str, type[Kind]]) -> Section:
    section = Section(suite, "", [], "", "")
    for kind, experiment in known.items():
        shown = kind == suite.kind or results.of(experiment.record, suite.name)
        part = part_of(experiment, suite, results) if shown else None
        if part is not None:
            if part.title:
                section.suite = suite.model_copy(update={"title": part.title})
            section.tables += part.tables
            section.words += part.words
            section.headline.words.extend(part.headline)
            section.groups += part.groups
            section.compared += part.compared
            section.engine = section.engine or part.engine
            section.setting = section.setting or part.setting
            section.baseline = section.baseline or part.baseline
            section.drawings.append(part.pictures)
    section.baseline = section.baseline or suite.baseline
    section.compared = section.compared or compare_groups(section.groups, section.baseline)
    headings, rows = paper_rows(suite)
    if rows:
        labels = sum(heading in ("at", "policy", "hardware") for heading in headings)
        table = Table("The paper's own numbers", headings, [[Entry(each) for each in row] for row in rows], labels)
        table.note = f"{suite.source}. Its hardware, its model: compare the changes, not the milliseconds."
        section.tables.append(table)
    missing = [line for line in results.unavailable if line.suite == suite.name]
    measured = {policy for group in section.groups for policy in group.policies}
    reasons: dict[str, dict[str, list[str]]] = {}
    for line in missing:
        reasons.setdefault(line.reason, {}).setdefault(line.policy, []).append(cell_words(line.cell))
    for reason, policies_of in reasons.items():
        cells = list(dict.fromkeys(cell for cells in policies_of.values() for cell in cells))
        where = f" ({_few(cells)})" if measured & policies_of.keys() and cells != [""] else ""
        # A data set that is not here is missing in all orders, and a stream under all policies.
        by_cell = suite.kind in known and known[suite.kind].missing_by_cell and cells != [""]
        names = cells if by_cell else map(policy_words, policies_of)
        section.unavailable.append((", ".join(names), f"{reason}{where}"))
    return section


def _few(cells: Sequence[str]) -> str:
    more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
    return "; ".join(cells[:3]) + more


def _measured(results: Results) -> str:
    every = _all_runs(results)
    runs = [run for run in every if "copied_from" not in (run.model_extra or {})]
    if not runs:
        return ""
    copies = len(every) - len(runs)
    again = f" ({copies:,} results in other suites are copies of these runs, and add no evidence)" if copies else ""
    return f"{len(runs):,} runs, {sum(run.requests for run in runs):,} requests after warm-up{again}"


def _all_runs(results: Results) -> list[Record]:
    return [line for line in results.records if line.is_run]


def _not_measured(results: Results, known: Mapping[str, type[Kind]]) -> list[str]:
    runs = [run for run in results.runs if "copied_from" not in (run.model_extra or {})]
    served = [run for run in runs if run.engine.get("name") != "sim"]
    said = []
    if runs and not served:
        said.append("Times: the engine is simulated. Cached tokens are those of a real engine, to the block.")
    elif any(run.column("ttft_ms") is not None for run in served) and not any(map(_gpu, results.sessions)):
        said.append("Times on a GPU: these are of a CPU. Cached tokens do not depend on it.")
    if any("random" in str(run.engine.get("model") or "random") for run in served):
        said.append("Answers: the served model has random weights. Cached tokens and times do not depend on them.")
    said += [why for each in known.values() if (why := each.not_measured(results.records, results.own_checks))]
    return said


def _gpu(session: SessionRecord) -> bool:
    return any(session.environment.get(name) for name in ("gpu", "gpus", "accelerator", "cuda"))


def _checks(results: Results) -> Table | None:
    if not results.checks:
        return None
    rows = []
    for check in results.checks:
        figures = {name: value for name, value in check.items() if name not in ("name", "session")}
        words = ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in figures.items())
        rows.append([Entry(str(check["name"])), Entry(words)])
    return Table("Checks", ["check", "found"], rows)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _machines(results: Results) -> list[str]:
    """A line for each machine and set of versions, with the seeds and the load of what ran there."""
    said = []
    loads: dict[str, list[float]] = {}
    seeds: dict[str, set[int]] = {}
    for session in results.sessions:
        machine = _machine(session.environment) or "a machine that was not recorded"
        of_it = [run for run in results.records if run.is_run and run.session == session.id]
        before = session.environment.get("load_average") or []
        after = [run.load_average for run in of_it if run.load_average is not None]
        loads.setdefault(machine, []).extend([*before[:1], *after])
        seeds.setdefault(machine, set()).update(run.seed for run in of_it)
    for machine, found in loads.items():
        load = f"; load average {range_words(found, 1)}" if found else ""
        names = ", ".join(map(str, sorted(seeds[machine])))
        said.append(f"{machine}{load}{f'; seeds {names}' if names else ''}")
    return said


def _machine(environment: Mapping[str, Any]) -> str:
    """What figures depend on; when and on what system they were measured is in the results."""
    cores = environment.get("cores")
    parts = [environment.get("processor"), environment.get("gpu"), f"{cores} cores" if cores else None]
    packages = {"Python": environment.get("python"), **dict(environment.get("packages") or {})}
    versions = [f"{name} {version}" for name, version in packages.items() if version]
    commit = [f"commit {environment['commit']}"] if environment.get("commit") else []
    return "; ".join(filter(None, (", ".join(filter(None, parts)), ", ".join([*versions, *commit]))))


def _command(session: SessionRecord, folder: Path) -> str:
    given = dict(session.arguments)
    command, suites, seeds = (given.pop(name, None) for name in ("command", "suites", "seeds"))
    about = [given.pop(name, None) for name in ("dataset", "log")]
    start = {None: ["eval", "run", *(suites or [])], "quality": ["eval", "quality"]}.get(command, [command])
    words = ["ragorder", *start, *filter(None, about), "-o", folder]
    words += ["--seeds", ",".join(map(str, seeds))] if seeds else []
    for name, value in given.items():
        if name in _NO_OPTIONS or value in (None, False, [], ""):
            continue
        option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
        for each in value if isinstance(value, list) else [value]:
            words += [option] if each is True else [option, each]
    return shlex.join(map(str, words))


_NO_OPTIONS = ("output", "like")
"""Shown elsewhere, and the engine that the simulated one mimics, which is not an option."""

_OPTIONS = {"policies": "--policy", "orders": "--policy", "question_order": "--order", "capacity": "--capacity-tokens"}
"""Options whose names are not those of the arguments as a session keeps them."""
