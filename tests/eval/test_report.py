"""The report: reads what the harness wrote, says what it means, and is one page that needs nothing else."""

from __future__ import annotations

import csv
import json
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.reported import DRY, MISSING, SESSION, XLINK, a_run, report_on, simulated, written
from support.rings import grid

np = pytest.importorskip("numpy")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from rich.console import Console

from ragorder.eval.report import Report, make_report, read_results, render_html, render_markdown
from ragorder.eval.report.page import csv_text, json_text
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.running.suite import load_suites

pytestmark = pytest.mark.merge

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
OVERLAPS = [f"ov{overlap}-kept" for overlap in ("0.0", "0.2", "0.4", "0.6", "0.8")]
CHECK = {"type": "check", "session": "s1", "name": "sim-vs-vllm", "requests": 500, "identical_share": 0.998}


def measured() -> Iterator[dict[str, Any]]:
    """The lines of a reduced run of a few suites."""
    yield SESSION
    for workload in ("paper", "paper-shuf"):
        policies, cell = ("none", "retrieval", "sorted", "greedy", "free"), {"top_k": 5, "capacity_tokens": 100_000}
        yield from simulated("table-1", policies, timed=True, workload=workload, **cell)
    for workload in OVERLAPS:
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
def report(folder: Path) -> Report:
    return make_report(read_results(folder), load_suites())


@pytest.fixture(scope="module")
def page(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(report), "utf-8")
    return path


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


def rows_of(report: Report, suite: str, table: int = 0) -> dict[str, Any]:
    section = next(section for section in report.sections if section.suite.name == suite)
    return {row[0].text: row for row in section.tables[table].rows}


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
        found = report_on(tmp_path, SESSION, *lines, known=load_suites()).headline
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
        assert list(rows_of(report, "figure-3")) == OVERLAPS
        assert rows_of(report, "figure-3")["ov0.4-kept"][-1].text == "111.1 → 77.8"

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
        for name in ("table-1", "figure-3", "pressure", "guards"):
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
