"""The report: reads what the harness wrote, says what it means, and is one page that needs nothing else."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from importlib.resources import files as files_of
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.benched import runs_of
from support.results import result_lines, titles
from support.rings import ALL, grid

np = pytest.importorskip("numpy")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from click.testing import CliRunner
from rich.console import Console

from ragorder.cli import main
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.report import Report, ResultsError, make_report, read_results, render_html, render_markdown
from ragorder.eval.report.page import csv_text, json_text
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.specs import Bench
from ragorder.eval.running.suite import Suite, load_suites, read_suite
from ragorder.eval.suites.quality.compare import summarise

pytestmark = pytest.mark.merge

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
COMMITTED = sorted(path.parent for path in Path(__file__).parents[2].glob("docs/results/*/results.jsonl.xz"))
SMALL = ("served", "hedra-client")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"

SUITES = {
    "table-1": """
title = "Strategies"
source = "RAGCache++ Table 1"
says = "What each strategy finds in the cache, on the paper's trace and on its shuffled clone."
policies = ["none", "retrieval", "sorted", "greedy", "free"]
baseline = "retrieval"
cell = { top_k = 5, capacity_tokens = 100000 }
sweep = { workload = ["paper", "paper-shuf"] }
report = { chart = "strategies" }
paper = [
  { policy = "retrieval", label = "APC", hardware = "4090", workload = "paper", unit = "ms", p50 = 59.6, p95 = 117.4 },
  { policy = "greedy", label = "APC+", hardware = "4090", workload = "paper", unit = "ms", p50 = 40.1, p95 = 117.4 },
]
""",
    "figure-3": """
title = "Overlap between consecutive queries"
source = "RAGCache++ Figure 3, Table 12"
says = "What ordering changes by the share of documents that two queries have in common."
policies = ["retrieval", "greedy", "free"]
baseline = "retrieval"
sweep = { workload = ["ov0.0", "ov0.2", "ov0.4", "ov0.6", "ov0.8"] }
report = { chart = "sweep", x = "workload" }
paper = [
  { policy = "retrieval", label = "retrieval", hardware = "RTX 4060 Ti", workload = "ov0.4", unit = "ms", p50 = 111.1 },
  { policy = "greedy", label = "optimized", hardware = "RTX 4060 Ti", workload = "ov0.4", unit = "ms", p50 = 77.8 },
]
""",
    "pressure": """
title = "Cache pressure"
source = "ragorder"
says = "How much is left of it in a small cache."
policies = ["retrieval", "free"]
sweep = { workload = ["mix8", "geo"], capacity_tokens = ["5%", "25%", "100%"] }
report = { chart = "sweep", x = "capacity_tokens" }
""",
    "guards": """
title = "What the guards cost"
source = "ragorder"
says = "Guards keep documents near where retrieval put them; this is what that costs."
policies = ["retrieval", "free"]
sweep = { workload = ["paper-shuf"] }
report = { chart = "position" }
""",
    "table-2": """
title = "Answers on HotpotQA"
source = "RAGCache++ Table 2"
says = "Whether another order changes answers."
kind = "quality"
policies = ["retrieval", "free"]
sweep = { dataset = ["hotpotqa"] }
report = { chart = "quality" }
paper = [{ policy = "retrieval", label = "APC+Retrieval", em = 0.0, f1 = 0.047 }]
""",
}


def suites() -> dict[str, Suite]:
    return {name: read_suite(name, text, name) for name, text in SUITES.items()}


def simulated(
    suite: str, policies: Sequence[str], *, timed: bool = False, capacity: str = "100000", **cell: Any
) -> Iterator[dict[str, Any]]:
    """Lines of runs on the simulator; `timed` as on an engine that takes 0.2 ms for an uncached token."""
    sizes: dict[str, Any] = {"capacity": Capacity.parse(capacity), "top_k": 5, "limit": 45}
    bench = Bench(workloads=[cell["workload"]], policies=policies, seeds=(0, 1, 2), timelines=True, **sizes)
    for runs in run_traces(bench):
        for run in runs:
            key = {"session": "s1", "suite": suite, "cell": cell, "seed": run.seed, "policy": run.policy_name}
            line = {"type": "run", **key, **run.fields(None, 5)}
            if timed:
                noise = np.random.default_rng(run.seed).gamma(4, 1, 45).tolist()
                lengths = zip(line["rows"]["prompt_tokens"], line["rows"]["cached_tokens"], noise, strict=True)
                line["rows"]["ttft_ms"] = [20 + 0.2 * (prompt - cached) + wait for prompt, cached, wait in lengths]
                line["engine"] |= {"name": "vllm", "model": "random weights"}
                line["throughput"] = {"requests_per_s": 4.0 + run.seed / 10, "tokens_per_s": 4_000.0}
            yield line


SESSION = {
    "type": "session",
    "schema": 1,
    "session": "s1",
    "started": "2026-11-21T17:00:00+00:00",
    "arguments": {"suites": ["paper"], "output": "results/paper", "seeds": [0, 1, 2]},
    "environment": {"processor": "EPYC", "cores": 2, "python": "3.11.9", "load_average": [1, 0.9, 0.8], "packages": {}},
}
MISSING = {"type": "unavailable", "session": "s1", "suite": "table-1", "cell": {"workload": "paper"}}
MISSING |= {"policy": "contextpilot", "reason": "could not be installed <no network>"}
DRY = {"type": "quality", "session": "s1", "suite": "table-2", "cell": {"dataset": "hotpotqa"}, "seed": 0}
DRY |= {"policy": "free", "rows": {"id": ["a"], "em": [1], "f1": [1.0], "cached_tokens": [0]}, "dry_run": True}
CHECK = {"type": "check", "session": "s1", "name": "sim-vs-vllm", "requests": 500, "identical_share": 0.998}


def measured() -> Iterator[dict[str, Any]]:
    """The lines of a reduced run of a few suites."""
    yield SESSION
    for workload in ("paper", "paper-shuf"):
        policies, cell = ("none", "retrieval", "sorted", "greedy", "free"), {"top_k": 5, "capacity_tokens": 100_000}
        yield from simulated("table-1", policies, timed=True, workload=workload, **cell)
    for workload in ("ov0.0", "ov0.2", "ov0.4", "ov0.6", "ov0.8"):
        yield from simulated("figure-3", ("retrieval", "greedy", "free"), workload=workload)
    for workload, size in product(("mix8", "geo"), ("5%", "25%", "100%")):
        sizes = {"capacity": size, "capacity_tokens": size}
        yield from simulated("pressure", ("retrieval", "free"), workload=workload, **sizes)
    for guards, moved in GUARDS.items():
        for line in simulated("guards", ("retrieval", "free"), workload="paper-shuf", guards=guards):
            share, rows = moved if line["policy"] == "free" else 0.0, line["rows"]
            rows["cached_tokens"] = [int(share and c * (0.5 + share)) or c for c in rows["cached_tokens"]]
            rows |= {"moved_share": [share] * 45, "displacement": [2 * share] * 45}
            yield line
    yield from (MISSING, DRY, CHECK)


GUARDS = {"none": 0.6, "keep_first=1": 0.5, "keep_first=2": 0.35, "max_displacement=1": 0.4}
GUARDS |= {"keep_last=1+keep_groups": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a session that was interrupted: its last line is torn."""
    folder = tmp_path_factory.mktemp("results")
    lines = "".join(json.dumps(line) + "\n" for line in measured())
    (folder / "results.jsonl").write_text(lines + '{"type": "run", "session": "s1", "sui')
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two suites, each with a cell and a chart of its own."""
    policies, cell = ("retrieval", "free"), {"workload": "paper", "top_k": 5, "capacity_tokens": 100_000}
    strategies = simulated("table-1", policies, timed=True, **cell)
    sweep = simulated("figure-3", policies, workload="ov0.4")
    return written(tmp_path_factory.mktemp("small"), SESSION, *strategies, *sweep)


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return make_report(read_results(folder), suites())


@pytest.fixture(scope="module")
def page(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(report), "utf-8")
    return path


XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink"'


def written(folder: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "results.jsonl").write_text(text)
    return folder


def a_run(**changed: Any) -> dict[str, Any]:
    """A run of ten requests of a hundred tokens, of which half are cached."""
    rows = {"prompt_tokens": [100] * 10, "cached_tokens": [50] * 10, "cached_documents": [2] * 10}
    run = {"type": "run", "session": "s1", "suite": "own", "cell": {}, "seed": 0, "policy": "free", "warmup": 2}
    return run | {"engine": {"name": "sim", "block_size": 16}, "failures": 0, "rows": rows} | changed


def report_on(folder: Path, *lines: Any, known: dict[str, Suite] | None = None) -> Report:
    return make_report(read_results(written(folder, *lines)), known or {})


class TestReading:
    def test_takes_what_it_can_and_says_what_it_could_not(self, tmp_path: Path) -> None:
        odd = {"type": "weather", "session": "s1"}
        deep = '{"type": "run", "cell": ' + "[" * 100_000 + "]" * 100_000 + "}"
        lines = (SESSION, a_run(), a_run(), odd, {"type": "run"}, "[1]", deep, '{"type": "r')
        results = read_results(written(tmp_path, *lines))
        assert len(results.runs) == 1
        notes = " ".join(results.notes)
        assert all(words in notes for words in ("results.jsonl:6: must be an object", "'weather'", "there already"))
        assert all(words in notes for words in ("with missing fields", "3 × an incomplete line"))

    def test_takes_several_sessions(self, tmp_path: Path) -> None:
        again = SESSION | {"session": "s2"}
        results = read_results(written(tmp_path, SESSION, a_run(), again, a_run(session="s2", seed=1)))
        assert [session.id for session in results.sessions] == ["s1", "s2"]
        assert [run.seed for run in results.runs] == [0, 1]

    def test_leaves_the_warm_up_out(self, tmp_path: Path) -> None:
        rows = {"prompt_tokens": [100] * 10, "cached_tokens": [0, 0] + [80] * 8}
        run = read_results(written(tmp_path, a_run(rows=rows))).runs[0]
        assert run.requests == 8
        assert run.column("cached_tokens").tolist() == [80] * 8

    def test_a_request_that_failed_is_no_zero(self, tmp_path: Path) -> None:
        rows = {"prompt_tokens": [100] * 9 + [None], "cached_tokens": [50] * 9 + [None]}
        found = report_on(tmp_path, a_run(rows=rows, failures=1))
        assert [row[1].text for row in found.sections[0].tables[0].rows] == ["50.0"]
        assert "failures" in found.sections[0].tables[0].headings

    def test_of_a_session_that_measured_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ResultsError, match="holds no measurement"):
            read_results(written(tmp_path, SESSION))


def rows_of(report: Report, suite: str, table: int = 0) -> dict[str, Any]:
    section = next(section for section in report.sections if section.suite.name == suite)
    return {row[0].text: row for row in section.tables[table].rows}


class TestTitle:
    def test_is_the_suites(self, tmp_path: Path) -> None:
        known = load_suites()
        assert report_on(tmp_path, a_run(suite="skew"), known=known).title == f"ragorder: {known['skew'].title}"
        more = report_on(tmp_path, *(a_run(suite=suite) for suite in ("guards", "skew", "tails")), known=known)
        assert more.title.endswith(", and 2 more")

    def test_is_the_one_that_was_given(self, small: Path) -> None:
        assert reported(small, "--title", "Two suites", "--markdown", "-").startswith("# Two suites\n")


class TestHeadline:
    """The figure in large letters is the one of the first sentence."""

    def test_of_several_suites(self, report: Report) -> None:
        lead, first = report.headline.lead, report.headline.words[0]
        changes = values_of([row[3].text for row in report.overview.rows if row[2].text == "cached tokens"])
        assert lead.figure == f"{changes[0]} to {changes[-1]}"
        assert f"ragorder (free) changes the cached tokens by {lead.figure} points" in first
        assert f"in {len({row[0].text for row in report.overview.rows})} suites" in first

    def test_of_one_cell(self, tmp_path: Path) -> None:
        lines = simulated("figure-3", ("retrieval", "free"), workload="ov0.4")
        found = report_on(tmp_path, SESSION, *lines, known=suites()).headline
        assert f": {found.lead.figure} [" in found.words[0]


def values_of(changes: Sequence[str]) -> list[str]:
    """From the least to the most: changes of fields such as "+4.1 to +28.1 points" and "+4.1 [+3.0, +5.3]"."""
    found = [each for change in changes for each in re.findall(r"[+−]?\d+\.\d", change.partition("[")[0])]
    return sorted(found, key=lambda change: float(change.replace("−", "-")))


class TestTables:
    def test_stand_beside_the_papers_own_numbers(self, report: Report) -> None:
        rows = rows_of(report, "table-1")
        assert rows["RAGCache++ (greedy)"][-1].text == "40.1"
        assert rows["RAGCache++ (greedy)"][-1].note.startswith("−32.7")
        assert rows["ragorder (free)"][-1].text == "–"

    def test_say_what_the_runs_say(self, folder: Path, report: Report) -> None:
        runs = [r for r in read_results(folder).runs if r.suite == "table-1" and r.cell["workload"] == "paper-shuf"]

        def share(policy: str) -> float:
            ran = [run for run in runs if run.policy == policy]
            cached, prompts = (sum(run.column(f"{name}_tokens").sum() for run in ran) for name in ("cached", "prompt"))
            return 100 * cached / prompts

        plain, ours = map(share, ("retrieval", "free"))
        row = rows_of(report, "table-1", 1)["ragorder (free)"][1]
        assert (row.text, row.verdict) == (f"{ours:.1f}", "better")
        assert row.note.startswith(f"+{ours - plain:.1f} [+")

    def test_have_one_row_a_cell_where_there_are_many(self, report: Report) -> None:
        assert list(rows_of(report, "figure-3")) == ["ov0.0", "ov0.2", "ov0.4", "ov0.6", "ov0.8"]
        assert rows_of(report, "figure-3")["ov0.4"][-1].text == "111.1 → 77.8"

    def test_times_are_compared_where_there_are_any(self, report: Report) -> None:
        timed = next(section for section in report.sections if section.suite.name == "table-1").tables[0]
        untimed = next(section for section in report.sections if section.suite.name == "figure-3").tables
        assert {f"TTFT {name}, ms" for name in ("p50", "p95", "p99", "mean")} <= set(timed.headings)
        assert not [table for table in untimed if "TTFT" in table.title]

    @pytest.mark.parametrize("width", [50, 80, 200])
    def test_have_all_columns_on_any_console(self, width: int) -> None:
        figures = ["TTFT p50, ms", "TTFT p95, ms", "exposed, ms", "cached, %", "right", "tokens wasted", "failed"]
        table = Table("Times", ["retrieval", "mode", *figures], labels=2, note="From the question.")
        table.add("mix8, 60 ms", "none", Entry("71.25", "+3 % [1, 5]", "worse"), *(f"{n},000" for n in range(6)))
        with (console := Console(width=width)).capture() as shown:
            console.print(table)
        lines = shown.get().splitlines()
        assert max(map(len, lines)) <= width
        words = re.findall(r"[\w.,%]+", shown.get())
        assert {*" ".join(figures).split(), "71.25", *(f"{n},000" for n in range(6))} <= {*words}
        parts = words.count("mix8,")
        assert (words.count("none"), words.count("Times"), words.count("question.")) == (parts, 1, 1)
        assert parts == {50: 4, 80: 2, 200: 1}[width]

    def test_have_no_empty_column_on_the_console(self) -> None:
        table = Table("Times", ["", "policy", "ms"], labels=2)
        table.add("", "free", "3")
        with (console := Console(width=80)).capture() as shown:
            console.print(table)
        assert re.findall(r"[^│\s]+|│", shown.get().splitlines()[4]) == ["│", "free", "│", "3", "│"]

    def test_a_policy_that_changes_nothing_makes_no_difference(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        runs = [
            a_run(policy=policy, rows={"prompt_tokens": [100] * 99, "cached_tokens": rng.integers(0, 99, 99).tolist()})
            for policy in ("retrieval", "free")
        ]
        assert report_on(tmp_path, *runs).sections[0].tables[0].rows[1][1].verdict == "no difference"

    @pytest.mark.parametrize("same", [True, False])
    def test_rows_of_different_seeds_name_them(self, tmp_path: Path, same: bool) -> None:
        names = ("mix8", "geo", "zipf10", "paper")
        seeds = {name: (0, 1) if same or name == "geo" else (0,) for name in names}
        runs = [a_run(cell={"workload": name}, seed=seed) for name in names for seed in seeds[name]]
        table = report_on(tmp_path, *runs).sections[0].tables[0]
        notes = [row[0].note for row in table.rows]
        assert notes == ([""] * 4 if same else ["seed 0", "seeds 0, 1", "seed 0", "seed 0"])
        assert ("rows differ in their seeds, which stand in each" in table.note) != same
        assert table.note.endswith("seeds 0, 1") == same

    def test_a_run_that_another_suite_shows_again_counts_once(self, tmp_path: Path) -> None:
        found = report_on(tmp_path, a_run(), a_run(suite="other", copied_from="own"))
        assert found.measured.startswith("1 runs, ")
        assert "(1 results in other suites are copies of these runs" in found.measured

    def test_hits_are_the_engines_and_fast_percent_is_relative_to_the_policys_own_warm_up(self, tmp_path: Path) -> None:
        def rows(warm: float, times: list[float], documents: list[int]) -> dict[str, Any]:
            columns = {"ttft_ms": [warm, *times], "cached_documents": [0, *documents]}
            return {"prompt_tokens": [100] * 5, "cached_tokens": [10] * 5, **columns}

        runs = [
            a_run(policy=policy, suite="figure-2", cell={"workload": "paper"}, warmup=1, rows=figures)
            for policy, figures in {
                "none": rows(100, [100, 100, 100, 100], [0, 0, 0, 0]),
                "retrieval": rows(60, [40, 40, 40, 100], [3, 3, 3, 0]),
                "sorted": rows(100, [50, 50, 100, 100], [2, 2, 0, 0]),
            }.items()
        ]
        found = report_on(tmp_path, *runs, known=load_suites())
        (table,) = (each for each in found.sections[0].tables if "Fast%" in each.title)
        hits = {row[0].text: [entry.text.replace("\u00a0", " ") for entry in row[1:]] for row in table.rows}
        assert hits["retrieval order"] == ["75.0 %", "3.00", "0.0", "75.0"]
        assert hits["sorted by id"] == ["50.0 %", "2.00", "50.0", "50.0"]

    def test_name_peers_that_were_not_available(self, report: Report) -> None:
        assert report.sections[0].unavailable == [("ContextPilot", "could not be installed <no network>")]


class TestTheFinding:
    def test_sets_the_papers_trace_beside_its_shuffled_twin(self, report: Report) -> None:
        said = report.finding[0].replace("\u00a0", " ")
        kept, shuffled = (rows_of(report, "table-1", table)["retrieval order"][1].text for table in (0, 1))
        assert float(kept) > 2 * float(shuffled)
        assert f"finds {kept} % of the prompt tokens" in said
        assert f"retrieval order finds {shuffled} %" in said
        assert report.side_by_side.rows[0][0].text == "retrieval order"

    def test_says_when_only_one_was_measured(self, tmp_path: Path) -> None:
        cell = {"workload": "paper"}
        runs = [a_run(suite="table-1", policy=policy, cell=cell) for policy in ("retrieval", "free")]
        found = report_on(tmp_path, *runs, known=load_suites())
        assert "only paper was measured" in found.finding[0]
        assert found.side_by_side is None


class TestWhatWasNotMeasured:
    def test_is_listed_with_its_reason(self, report: Report) -> None:
        said = " ".join(report.not_measured)
        for words in ("random weights", "Times on a GPU", "dry run"):
            assert words in said

    def test_does_not_list_what_nobody_asked_for(self, tmp_path: Path) -> None:
        found = report_on(tmp_path, SESSION, a_run(), known=load_suites())
        assert [words.partition(":")[0] for words in found.not_measured] == ["Times"]


def answered(policy: str, shift: float = 0.0, **changed: Any) -> dict[str, Any]:
    """Sixty questions that a capable model answered in an order, a little better by `shift`."""
    scores = [number / 100 + shift for number in range(60)]
    rows: dict[str, Any] = {"id": [f"q{number}" for number in range(60)], "f1": scores, "gold_places": [[0, 2]] * 60}
    rows |= {name: [int(score >= 0.55) for score in scores] for name in ("em", "contains")}
    rows["displacement"] = [0.0 if policy == "retrieval" else 1.0] * 60
    model = {"name": "big-7B", "parameters": 7_000_000_000, "random_weights": False}
    return DRY | {"dry_run": False, "policy": policy, "model": model, "rows": rows} | changed


class TestQuality:
    def found(self, folder: Path, *lines: dict[str, Any]) -> Report:
        return report_on(folder, SESSION, *lines, known=suites())

    def measured(self, folder: Path, **changed: Any) -> Report:
        lines = [answered("retrieval", **changed), answered("free", 0.1, **changed)]
        return self.found(folder, *lines, *summarise(lines))

    def test_says_what_the_checks_say_of_each_order_and_place_of_a_gold_document(self, tmp_path: Path) -> None:
        report = self.measured(tmp_path)
        table, places = report.sections[0].tables[:2]
        assert table.title == "Answers: hotpotqa, big-7B"
        plain, ours = table.rows
        assert [entry.note for entry in plain[1:4]] == ["[3.6, 18.1]; baseline", "baseline", "baseline"]
        for ours_right in ours[1:3]:
            assert "+16.7: 10 won, 0 lost, p 0.002" in ours_right.note.replace("\u00a0", " ")
        assert ours[3].note == "+10.0 [+10.0, +10.0]"
        assert [entry.verdict for entry in ours[1:4]] == ["better", "better", "better"]
        assert [entry.text for entry in ours[4:]] == ["60", "100.0"]
        scores = ["120", "16.7", "16.7", "34.5"]
        assert [[entry.text for entry in row] for row in places.rows] == [["1", *scores], ["3", *scores]]
        assert report.sections[0].words == []
        assert report.checks is None, "they stand in no other table"
        assert not any("EM, F1" in words for words in report.not_measured)

    def test_the_last_check_on_the_same_counts(self, tmp_path: Path) -> None:
        lines = [answered("retrieval"), answered("free", 0.1)]
        early = summarise([answered("retrieval"), answered("free", -0.1)])
        report = self.found(tmp_path, *lines, *early, *summarise(lines))
        assert report.sections[0].tables[0].rows[1][2].verdict == "better"
        assert len(report.sections[0].tables[1].rows) == 2

    def test_seeds_are_not_thrown_together(self, tmp_path: Path) -> None:
        lines = [answered(policy, seed=seed) for seed in (0, 1) for policy in ("retrieval", "free")]
        report = self.found(tmp_path, *lines, *summarise(lines))
        answers = [table.title for table in report.sections[0].tables if table.title.startswith("Answers")]
        assert answers == ["Answers: hotpotqa, big-7B, seed 0", "Answers: hotpotqa, big-7B, seed 1"]

    def test_a_verdict_that_nothing_was_measured_takes_the_place_of_the_scores(self, tmp_path: Path) -> None:
        noise = {"name": "tiny", "parameters": 9_000, "random_weights": True}
        report = self.measured(tmp_path, model=noise)
        assert report.sections[0].words == [
            "hotpotqa, tiny: Quality was NOT measured: the model has random weights: its answers are noise."
        ]
        assert [table.title for table in report.sections[0].tables] == ["The paper's own numbers"]
        assert any("(EM, F1): the model has random weights" in words for words in report.not_measured)

    def test_answers_that_were_not_compared_are_marked(self, tmp_path: Path) -> None:
        lines = [answered("retrieval"), answered("free", 0.1)]
        for checks in ([], summarise(lines[:1])):
            report = self.found(tmp_path, *lines, *checks)
            assert "hotpotqa, big-7B: The answers were not compared" in report.sections[0].words[0]
            assert [row[2].verdict for row in report.sections[0].tables[0].rows] == ["", ""]

    def test_a_check_that_does_not_say_all_it_must_is_passed_over(self, tmp_path: Path) -> None:
        lines = [answered("retrieval"), answered("free")]
        verdict = {name: value for name, value in summarise(lines)[-1].items() if name != "measured"}
        report = self.found(tmp_path, *lines, verdict)
        assert "'check' with missing fields" in " ".join(report.notes)

    def test_a_data_set_that_is_not_here_is_named_once(self, tmp_path: Path) -> None:
        gone = MISSING | {"suite": "table-2", "cell": {"dataset": "nq"}, "reason": "not here"}
        report = self.found(tmp_path, gone | {"policy": "retrieval"}, gone | {"policy": "free"})
        assert report.sections[0].unavailable == [("nq", "not here")]

    def test_the_command_that_asked_about_it_alone_can_be_repeated(self, tmp_path: Path) -> None:
        arguments = {"command": "quality", "dataset": "nq", "question_order": "random", "orders": ["none", "free"]}
        arguments |= {"capacity": "5%", "dry_run": True, "data": None, "output": "elsewhere"}
        report = report_on(tmp_path, SESSION | {"arguments": arguments}, DRY, known=suites())
        said = f"ragorder eval quality nq -o {tmp_path} --order random --policy none --policy free"
        assert report.commands == [f"{said} --capacity-tokens 5% --dry-run"]


class TestMarkdown:
    def test_has_every_table_whole(self, report: Report) -> None:
        text = render_markdown(report)
        for section in report.sections:
            assert f"## {section.suite.title}" in text
        assert "| RAGCache++ (greedy) |" in text
        assert "ragorder eval run paper -o" in text
        assert "<no" not in text
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


class TestDownloads:
    def test_numbers_are_numbers_and_notes_have_columns_of_their_own(self) -> None:
        table = Table("Cached tokens", ["policy", "cached, %", "requests"])
        table.add("retrieval", Entry("31.0", "baseline"), "1,200")
        table.add('auto, or "best"', Entry("−4.5", verdict="worse"), "–")
        assert list(csv.reader(csv_text(table).splitlines())) == [
            ["policy", "cached, %", "cached, % (note)", "cached, % (verdict)", "requests"],
            ["retrieval", "31.0", "baseline", "", "1200"],
            ['auto, or "best"', "-4.5", "", "worse", ""],
        ]
        assert [row["cached, %"] for row in json.loads(json_text(table))] == [31.0, -4.5]


class TestPage:
    def test_the_page_is_one_file_without_requests(self, report: Report, page: Path) -> None:
        text = page.read_text("utf-8")
        (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in text
        assert text.count("<script") == 1
        (shown,) = re.findall(r'class="big">(.*?) <small>percentage points', text)
        assert shown == report.headline.lead.figure
        assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text.replace(XLINK, ""))
        assert "could not be installed &lt;no network&gt;" in text

    def test_every_picture_has_words_and_ids_of_its_own(self, page: Path) -> None:
        text = page.read_text("utf-8")
        pictures = re.findall(r"<svg [^>]*>", text)
        assert len(pictures) >= 15
        assert all('role="img"' in picture and re.search(r'aria-label="[^"]{20,}"', picture) for picture in pictures)
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len(ids) == len(set(ids))
        assert "#a1b2" not in text

    def test_is_the_same_every_time(self, small: Path) -> None:
        report = make_report(read_results(small), suites())
        first, second = render_html(report), render_html(report)
        assert first.count("<svg ") >= 2
        assert first == second


class TestWhatIsCommitted:
    """docs/results: what ../docs/results.md speaks of."""

    @pytest.mark.parametrize(
        "folder", [each for each in COMMITTED if ALL or each.name in SMALL], ids=lambda folder: folder.name
    )
    def test_renders_whole_and_as_it_was_written_down(self, folder: Path) -> None:
        results = read_results(folder)
        assert results.notes == []
        report = make_report(results, load_suites(), title=titles()[folder.name])
        # Results without ordering have none of the three.
        found = {bool(report.headline.words), bool(report.headline.charts), report.overview is not None}
        assert len(found) == 1
        assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', render_html(report).replace(XLINK, ""))
        text = (folder / "report.md").read_text("utf-8")
        kept, made = (re.findall(r"^#.*", each, re.MULTILINE) for each in (text, render_markdown(report)))
        assert kept == made
        lead = report.headline.lead
        assert lead is None or f" {lead.figure}" in text.split("\n\n")[1]

    def test_each_has_a_title_of_its_own_and_a_place_among_all(self) -> None:
        assert sorted(titles()) == [folder.name for folder in COMMITTED]
        assert len(set(titles().values())) == len(COMMITTED)

    @pytest.mark.parametrize("folder", grid(COMMITTED, 6), ids=lambda folder: folder.name)
    def test_the_command_that_repeats_it_is_one(self, folder: Path, tmp_path: Path) -> None:
        for line in re.findall(r"^ragorder (eval .*)$", (folder / "report.md").read_text("utf-8"), re.MULTILINE):
            words = [word for word in shlex.split(line) if not word.startswith("../") and word != "--corpora"]
            invoked(*words, "--dry-run", "-o", tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium")
class TestInABrowser:
    @pytest.fixture(scope="class")
    def browser(self) -> Iterator[Any]:
        playwright = pytest.importorskip("playwright.sync_api")
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
            yield browser
            browser.close()

    @pytest.mark.parametrize(("width", "scheme"), grid(list(product([390, 768, 1280, 1920], ["light", "dark"])), 1))
    def test_the_page_fits_the_screen_and_makes_no_requests(
        self, browser: Any, page: Path, width: int, scheme: str
    ) -> None:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        tab = context.new_page()
        asked: list[str] = []
        problems: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: problems.append(message.text))
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert asked == [page.as_uri()]
        assert problems == []
        for name in SUITES.keys() - {"table-5"}:
            assert tab.locator(f"#{name} table").count() >= 1
        for picture in tab.locator("svg").all():
            assert picture.bounding_box()["width"] > 250
        context.close()

    def test_answers_to_the_pointer(self, browser: Any, page: Path) -> None:
        """Values under it, lines that go with their name, columns that sort, tables as files."""
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.goto(page.as_uri())
        line = tab.locator("svg[data-points]:has(g.name)").first
        line.scroll_into_view_if_needed()
        points = json.loads(line.get_attribute("data-points"))
        x, y, said, _ = points[0]
        place = line.evaluate(
            "(svg, [x, y]) => { const p = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM()); return [p.x, p.y]; }",
            [x, y],
        )
        tab.mouse.move(*place)
        assert tab.locator("#tip").is_visible()
        assert tab.text_content("#tip") in {words for _, _, words, _ in points} and said
        name = line.locator("g.name:has(text)").first
        for gone in (True, False):
            name.dispatch_event("click")
            assert (line.locator("g.gone").count() > 0) is gone

        table = tab.locator("#table-1 table").first
        heading = table.locator("th.sorts").nth(1)
        column = "rows => rows.map(row => row.cells[1].firstChild.textContent)"
        rows = table.locator("tbody tr")
        as_written = rows.evaluate_all(column)
        ways = []
        for _ in range(3):
            heading.click()
            ways.append(rows.evaluate_all(column))
        assert ways[0] == ways[1][::-1] != as_written == ways[2]
        with tab.expect_download() as saved:
            tab.locator("#table-1 a[download$='.csv']").first.click()
        lines = Path(saved.value.path()).read_text("utf-8").splitlines()
        assert len(lines) == 1 + rows.count()
        assert lines[0].startswith(table.locator("th").first.text_content())
        tab.close()

    @pytest.mark.slow
    def test_is_light_in_print_and_no_table_is_cut_off(self, browser: Any, page: Path) -> None:
        context = browser.new_context(viewport={"width": 688, "height": 1000}, color_scheme="dark")
        tab = context.new_page()
        tab.emulate_media(media="print", color_scheme="dark")
        tab.goto(page.as_uri())
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert tab.evaluate(
            "[...document.querySelectorAll('table')].every(t => t.getBoundingClientRect().right <= 688)"
        )
        context.close()


class TestTheCommand:
    def test_writes_page_and_markdown(self, small: Path, tmp_path: Path) -> None:
        page, markdown = tmp_path / "page.html", tmp_path / "results.md"
        assert reported(small, "--html", page, "--markdown", markdown) == ""
        assert page.read_text("utf-8").startswith("<!doctype html>")
        assert markdown.read_text("utf-8").startswith("# ragorder")
        assert reported(small, "--markdown", "-") == markdown.read_text("utf-8")

    @pytest.mark.parametrize(("name", "said"), [("nowhere", "is no folder"), (".", "has no results.jsonl")])
    def test_names_what_to_change(self, tmp_path: Path, name: str, said: str) -> None:
        done = CliRunner().invoke(main, ["report", str(tmp_path / name)])
        assert done.exit_code == 1
        assert re.search(f"{said}: give the folder that 'ragorder eval run SUITE -o DIR' wrote to", done.output)

    @pytest.mark.parametrize("package", ["jinja2", "matplotlib", "scipy"])
    def test_names_the_extra_that_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        written(tmp_path, a_run(policy="retrieval"), a_run())
        monkeypatch.setitem(sys.modules, package, None)
        done = CliRunner().invoke(main, ["report", str(tmp_path), "--html", str(tmp_path / "page.html")])
        assert done.exit_code == 1
        assert "pip install '.[eval]'" in done.output


def invoked(*arguments: Any) -> str:
    """What a command prints."""
    done = CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.stdout


reported = partial(invoked, "report")


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    arguments = ["--workload", "mix8", "--limit", "40", "--capacity-tokens", "50k", "--seeds", "0,1,2"]
    invoked("bench", *arguments, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    pairs = [["a", "b", "c"], ["c", "a", "d"], ["b", "a", "c"]] * 20
    lines = [{"time": at, "documents": ids, "tokens": [300] * 3} for at, ids in enumerate(pairs)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    invoked("replay", folder / "log.jsonl", "-o", folder)
    return folder


class TestReportOnAnyResult:
    def test_of_a_benchmark_begins_with_the_saving_and_its_interval(self, benched: Path) -> None:
        headline = " ".join(reported(benched).split("Cached tokens, against")[0].split())
        numbers = r"ragorder \(earned\) finds ([\d.]+)\W%.* order ([\d.]+)\W%: \+([\d.]+) \[\+[\d.]+, \+[\d.]+\]"
        found = re.search(numbers, headline)
        assert found, headline
        ours, plain, gain = map(float, found.groups())
        runs = [run for run in runs_of((benched / "results.jsonl").read_text("utf-8")) if run["policy"] == "earned"]
        cached, prompts = (sum(run[name] for run in runs) for name in ("cached_tokens", "prompt_tokens"))
        assert ours == pytest.approx(100 * cached / prompts, abs=0.06)
        assert gain == pytest.approx(ours - plain, abs=0.11)

    def test_of_a_replay_gives_the_answer_of_the_replay(self, replayed: Path) -> None:
        (record,) = result_lines(replayed, "replay")
        text = " ".join(reported(replayed).split())
        assert f"log.jsonl: would it help? {record['facts']['answer']}" in text
        assert "Cached tokens, against the baseline" in text

    def test_repeats_the_commands_that_measured(self, benched: Path, replayed: Path) -> None:
        assert "paper" not in reported(benched, "--markdown", "-")
        text = reported(benched, replayed, "--markdown", "-")
        assert "--seeds 0,1,2 --workload mix8 --limit 40 --capacity-tokens 50000" in text
        assert re.search(r"ragorder bench -o \S+ --seeds", text) and re.search(r"ragorder replay \S+log.jsonl -o", text)

    def test_of_a_suite_has_its_picture_on_the_console(self, small: Path) -> None:
        text = reported(small)
        assert "█" in text.partition("At a glance")[0]
        assert "Strategies compared" in text

    def test_a_file_of_results_is_read_like_its_folder(self, small: Path) -> None:
        assert reported(small / "results.jsonl") == reported(small)

    def test_several_are_one_report(self, benched: Path, replayed: Path, small: Path, tmp_path: Path) -> None:
        page, markdown = tmp_path / "page.html", tmp_path / "report.md"
        reported(benched, small, replayed, "--html", page, "--markdown", markdown)
        titles = [line for line in markdown.read_text("utf-8").splitlines() if line.startswith("## ")]
        assert {"## Benchmark", "## Replay of log.jsonl", "## Strategies compared"} <= set(titles)
        text = page.read_text("utf-8")
        assert text.index('id="headline"') < text.index("<svg") < text.index('id="bench"')

    def test_has_its_pictures_as_files_too(self, small: Path, tmp_path: Path) -> None:
        """In colours of their own: the page's, on light ground and on dark."""
        reported(small, "--pictures", tmp_path / "pictures")
        files = sorted((tmp_path / "pictures").iterdir())
        assert len(files) >= 2 and all(re.fullmatch(r"[a-z0-9-]+-\d+\.svg", file.name) for file in files)
        page = files_of("ragorder.eval.report").joinpath("page.html").read_text("utf-8")
        for file in files:
            text = file.read_text("utf-8")
            assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314
            rules = dict(re.findall(r"--([a-z]+):(#\w+);", text.partition("@media")[0]))
            assert set(re.findall(r"var\(--([a-z]+)\)", text)) <= rules.keys()
            assert all(f"--{name}: {rules[name]}" in page for name in ("ink", "soft", "line", "card"))

    def test_of_pipelines_is_about_the_time(self, tmp_path: Path) -> None:
        counts = {name: [0] * 20 for name in ("warmed_up", "speculations", "right", "refused", "wasted_prompt_tokens")}
        rows = {
            mode: {"ttft_ms": [ms + place for place in range(20)], "exposed_ms": [10.0] * 20, "tbt_ms": [None] * 20}
            | {"prompt_tokens": [100] * 20, "cached_tokens": [50] * 20, **counts}
            for mode, ms in (("none", 100.0), ("warmup", 80.0))
        }
        cell = {"workload": "mix8", "order": "free", "retrieval_ms": 50.0}
        line = {"type": "pipelines", "suite": "bench-pipelines", "cell": cell, "policy": "warmup", "rows": rows}
        written(tmp_path, line)
        text = " ".join(reported(tmp_path).split())
        assert re.search(r"warm-up changes the median time to the first token by −18\.\d\W%", text), text
        assert "| mix8, ragorder (free), 50" in reported(tmp_path, "--markdown", "-")

    @pytest.mark.parametrize("text", ["{}", "[1]", "hello", '{"runs": [{"policy": "free"}]}'])
    def test_another_file_is_refused_by_name(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "other.json"
        path.write_text(text + "\n")
        done = CliRunner().invoke(main, ["report", str(path)])
        assert done.exit_code == 1
        assert f"{path} holds no measurement" in done.output
        assert "Traceback" not in done.output
