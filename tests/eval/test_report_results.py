"""Reports on answers, on what is committed, and on whatever the commands measure."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.benched import runs_of
from support.reported import (
    DRY,
    MISSING,
    SESSION,
    XLINK,
    a_run,
    invoked,
    report_on,
    reported,
    simulated,
    written,
)
from support.results import result_lines, titles
from support.rings import ALL, grid

pytest.importorskip("numpy")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from click.testing import CliRunner

from ragorder.cli import main
from ragorder.eval.report import Report, make_report, read_results, render_html, render_markdown
from ragorder.eval.running.suite import load_suites
from ragorder.eval.suites.quality.compare import summarise

pytestmark = pytest.mark.merge

COMMITTED = sorted(path.parent for path in Path(__file__).parents[2].glob("docs/results/*/results.jsonl.xz"))
SMALL = ("served", "hedra-client")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two each with a cell and a chart of its own."""
    policies, cell = ("retrieval", "free"), {"workload": "paper", "top_k": 5, "capacity_tokens": 100_000}
    strategies = simulated("table-1", policies, timed=True, **cell)
    sweep = simulated("figure-3", policies, workload="ov0.4")
    return written(tmp_path_factory.mktemp("small"), SESSION, *strategies, *sweep)


class TestTitle:
    def test_is_the_suites(self, tmp_path: Path) -> None:
        known = load_suites()
        assert report_on(tmp_path, a_run(suite="skew"), known=known).title == f"ragorder: {known['skew'].title}"
        more = report_on(tmp_path, *(a_run(suite=suite) for suite in ("guards", "skew", "tails")), known=known)
        assert more.title.endswith(", and 2 more")

    def test_is_the_one_that_was_given(self, small: Path) -> None:
        assert reported(small, "--title", "Two suites", "--markdown", "-").startswith("# Two suites\n")


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
        return report_on(folder, SESSION, *lines, known=load_suites())

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
        report = report_on(tmp_path, SESSION | {"arguments": arguments}, DRY, known=load_suites())
        said = f"ragorder eval quality nq -o {tmp_path} --order random --policy none --policy free"
        assert report.commands == [f"{said} --capacity-tokens 5% --dry-run"]


class TestWhatIsCommitted:
    """docs/results: what ../docs/results.md speaks of."""

    @pytest.mark.parametrize(
        "folder", [each for each in COMMITTED if ALL or each.name in SMALL], ids=lambda folder: folder.name
    )
    def test_renders_whole_and_as_it_was_written_down(self, folder: Path) -> None:
        results = read_results(folder)
        assert results.notes == []
        report = make_report(results, load_suites(), title=titles()[folder.name])
        # Results without ordering have none of the three, answers alone only words.
        charts = bool(report.headline.charts)
        assert charts == (report.overview is not None)
        assert charts == (bool(report.headline.words) and folder.name != "quality-real")
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
            words = shlex.split(line.replace(" --corpora ../shared/data", ""))
            if "--data" in words:
                if not Path(words[words.index("--data") + 1]).exists():
                    continue
                words += ["--limit", "20"]
            invoked(*words, "--dry-run", "-o", tmp_path)


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

    def test_is_the_same_every_time(self, small: Path) -> None:
        report = make_report(read_results(small), load_suites())
        first, second = render_html(report), render_html(report)
        assert first.count("<svg ") >= 2
        assert first == second
