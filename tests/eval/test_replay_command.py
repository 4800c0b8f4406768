"""The command `ragorder replay`: what it shows, writes, draws and refuses."""

from __future__ import annotations

import gzip
import json
import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command
from support.replayed import exported, line, written
from support.results import result_lines

from ragorder.eval.cli.replay import replay as command
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.replay import REPLAY_POLICIES, replay
from ragorder.eval.replay.example import EXAMPLE_LOG, example_lines
from ragorder.eval.replay.tables import Replay
from ragorder.eval.report import make_report
from ragorder.eval.report.words import policy_words
from ragorder.eval.running.reading import results_of

pytestmark = pytest.mark.merge

COMMAND = ("-c", "from ragorder.eval.cli.replay import replay; replay(prog_name='ragorder replay')")

invoke = partial(run_command, command, env={"COLUMNS": "160"})


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAGORDER_"):
            monkeypatch.delenv(name)


def written_by(*arguments: str | Path, input: bytes | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The session and the record that a replay writes."""
    done = invoke(*arguments, "-o", "-", input=input)
    assert done.exit_code == 0, done.output
    session, record = (json.loads(each, parse_constant=pytest.fail) for each in done.stdout.splitlines())
    return session, record


def as_json(*arguments: str | Path, input: bytes | None = None) -> dict[str, Any]:
    """What the record of a replay says."""
    _, record = written_by(*arguments, input=input)
    return {**record["facts"], "engine": record["engine"]}


def refusal(*arguments: str | Path, input: bytes | None = None) -> str:
    done = invoke(*arguments, input=input)
    assert done.exit_code != 0, done.output
    assert "Traceback" not in done.output
    return done.stderr


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    """200 requests of a bursty trace, a second apart."""
    workload = make_workload("paper-shuf", 0)
    lines = [
        line([f"d{d}" for d in ranking], number, tokens=[180 + d % 41 for d in ranking])
        for number, ranking in enumerate(workload.rankings[:200])
    ]
    return written(tmp_path, *lines)


class TestTheCommand:
    def test_shows_what_is_cached_what_is_saved_why_and_the_answer(self, log_file: Path) -> None:
        done = invoke(log_file)
        assert done.exit_code == 0, done.output
        shown = " ".join(done.stdout.split())
        words = ["retrieval", "greedy", "earned", "5 %", "100 %", "that ragorder (earned) saves", "helps"]
        words += ["share two documents or more with an earlier one", "so that no order can reuse more than"]
        words += ["would it help? Yes: ragorder (earned) saves"]
        assert [each for each in words if each not in shown] == []

    def test_says_so_where_it_is_not_worth_it(self, tmp_path: Path) -> None:
        path = written(tmp_path, *(line([f"{n} {rank}" for rank in range(5)], n) for n in range(60)))
        shown = " ".join(invoke(path).stdout.split())
        saving = (
            "ragorder (earned) saves 0.0 % of the prefill, 0.0 tokens a request: no more than rounding to whole blocks"
        )
        assert f"{saving} explains" in shown
        assert "would it help? No: ragorder (earned) saves nothing worth having at any of these capacities." in shown
        overlap = as_json(path)["overlap"]
        assert (overlap["sharing_two_ratio"], overlap["jaccard_mean"]) == (0, 0)

    @pytest.mark.parametrize("columns", [80, 200])
    def test_the_tables_fit_a_terminal(self, log_file: Path, columns: int) -> None:
        done = invoke(log_file, "--prefill-rate", "9000", "--capacity-tokens", "12345", env={"COLUMNS": str(columns)})
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= columns

    def test_replays_a_sample_log_without_one_of_ones_own(self, tmp_path: Path) -> None:
        done = invoke("--example", "-o", tmp_path)
        assert done.exit_code == 0, done.output
        assert "400 requests, 2 tenants" in done.stdout and "would it help? Yes" in " ".join(done.stdout.split())
        (record,) = result_lines(tmp_path, "replay")
        assert (record["suite"], record["facts"]["notes"]) == ("replay-example-jsonl", [])

    def test_the_sample_log_is_what_its_command_writes(self) -> None:
        lines = [json.loads(each) for each in EXAMPLE_LOG.read_text("utf-8").splitlines()]
        assert lines == [*example_lines()]

    def test_without_a_log_it_names_the_sample(self, log_file: Path) -> None:
        assert "LOG is missing" in refusal() and "--example" in refusal()
        for other in ((log_file,), ("--format", "langfuse")):
            assert "leave out LOG and --format" in refusal("--example", *other)

    def test_appends_a_session_and_a_record(self, log_file: Path, tmp_path: Path) -> None:
        for _ in range(2):
            assert invoke(log_file, "-o", tmp_path, "--capacity-tokens", "9000").exit_code == 0
        session, record, *again = result_lines(tmp_path)
        assert len(again) == 2 and session["schema"] == 1
        assert {"time", "python", "cores", "packages"} <= session["environment"].keys()
        assert session["arguments"] == {"command": "replay", "log": str(log_file), "capacity_tokens": ["9000"]}
        found = record["facts"]
        assert found["log"]["requests"] == 200
        assert len(found["runs"]) == 4 * 7
        assert {run["policy"] for run in found["runs"]} == {"retrieval", "greedy", "earned", "free"}
        assert all(len(run["tenths"]) == 10 for run in found["runs"])
        assert len(found["savings"]) == 7
        assert found["answer"].startswith("Yes: at 9,000 tokens ragorder (earned) saves")
        assert 0 < found["overlap"]["one_prompt_ratio"] < found["overlap"]["bound_ratio"] < 1
        assert found["speed"]["requests_per_s"] > 0

    def test_the_interval_of_a_headline_holds_the_gain_in_its_points(self, log_file: Path) -> None:
        pytest.importorskip("scipy")
        known, (_, record) = {"replay": Replay}, written_by(log_file)
        found = record["facts"]
        marks = make_report(results_of([record], known), {}, known=known).headline.charts[0].marks
        gains, plain = (
            {run["capacity_tokens"]: run["tenths"] for run in found["runs"] if run["policy"] == policy}
            for policy in ("earned", "retrieval")
        )
        assert len(marks) == len(gains) == len(plain)
        for mark, ordered, before in zip(marks, gains.values(), plain.values(), strict=True):
            tenths = [100 * (a - b) for a, b in zip(ordered, before, strict=True)]
            assert min(tenths) - 0.01 <= mark.low <= mark.high <= max(tenths) + 0.01

    def test_is_as_thin_as_the_python_api(self, log_file: Path) -> None:
        found, report = as_json(log_file), replay(log_file)
        assert found["runs"] == json.loads(json.dumps(report.as_json()["runs"]))
        assert found["savings"] == json.loads(json.dumps(report.as_json()["savings"]))

    def test_reads_standard_input_plain_or_gzipped_and_writes_records_alone_to_standard_output(
        self, log_file: Path
    ) -> None:
        data = log_file.read_bytes()
        runs = as_json(log_file)["runs"]
        assert as_json("-", input=data)["runs"] == runs
        done = invoke("-", "-o", "-", input=gzip.compress(data))
        assert json.loads(done.stdout.splitlines()[-1])["facts"]["runs"] == runs
        assert "would it help?" in done.stderr

    def test_its_lengths_stand_in_where_the_log_tells_none(self, tmp_path: Path) -> None:
        path = written(tmp_path, line("abc"), line("abc", 1))
        lengths = ("--document-tokens", "100", "--prefix-tokens", "10", "--suffix-tokens", "5", "--output-tokens", "7")
        log = as_json(path, *lengths)["log"]
        assert log["prompt_tokens_mean"] == 10 + 300 + 5
        assert log["longest_tokens"] == 10 + 300 + 5 + 7
        assert log["working_set_tokens"] == 300

    def test_its_options_choose_what_is_replayed(self, log_file: Path) -> None:
        options = ("--policy", "prefix", "--policy", "greedy", "--capacity-tokens", "8000", "--capacity-tokens", "30%")
        found = as_json(log_file, *options, "--no-sweep", "--block-size", "32", "--top-k", "3", "--limit", "50")
        assert found["log"]["requests"] == 50
        assert found["log"]["documents_per_request_mean"] == 3
        assert found["engine"]["block_size"] == 32
        replayed = product([each["tokens"] for each in found["capacities"]], ["retrieval", "prefix", "greedy"])
        assert [(run["capacity_tokens"], run["policy"]) for run in found["runs"]] == list(replayed)
        assert {capacity["name"] for capacity in found["capacities"]} == {"8,000 tokens", "30 %"}
        assert all(run["cached_tokens"] % 32 == 0 for run in found["runs"])
        assert len(as_json(log_file, "--sweep")["capacities"]) > 2

    def test_its_rates_bring_requests_at_their_recorded_times(self, log_file: Path) -> None:
        found = as_json(log_file, "--prefill-rate", "2000", "--decode-rate", "8")
        assert found["engine"]["timed"]
        assert all(run["in_flight_mean"] > 2 for run in found["runs"])
        for saving in found["savings"]:
            expected = pytest.approx(saving["tokens_per_1000_requests"] / 2000, abs=1e-3)
            assert saving["seconds_per_1000_requests"] == expected
        in_turn = as_json(log_file)
        assert not in_turn["engine"]["timed"]
        assert all(run["in_flight_mean"] == 1 for run in in_turn["runs"])
        assert in_turn["savings"][0]["seconds_per_1000_requests"] is None

    def test_its_processes_change_nothing(self, log_file: Path) -> None:
        found = as_json(log_file, "--processes", "2")
        assert found["speed"]["processes"] == 2
        assert found["runs"] == as_json(log_file)["runs"]

    def test_says_that_lines_were_sorted(self, tmp_path: Path) -> None:
        path = written(tmp_path, line("ab", 5), line("ab", 3), line("ab", 4))
        assert "Note: lines earlier than the line before them: 1; sorted by time." in invoke(path).stdout

    def test_a_files_name_is_no_markup(self, tmp_path: Path) -> None:
        path = written(tmp_path, line("ab"), name="[red]log.jsonl")
        assert "[red]log.jsonl" in invoke(path).stdout

    @pytest.mark.slow
    def test_the_same_log_gives_the_same_figures_on_every_hash_seed(self, log_file: Path, python: Any) -> None:
        found = []
        for seed in ("0", "1", "4242"):
            done = python(*COMMAND, log_file, "-o", "-", PYTHONHASHSEED=seed)
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout.splitlines()[-1])["facts"]
            found.append({name: report[name] for name in ("log", "overlap", "runs", "savings", "answer")})
        assert found[0] == found[1] == found[2]

    def test_needs_none_of_the_extras(self, log_file: Path, python: Any) -> None:
        blocked = ("numpy", "scipy", "matplotlib", "torch", "vllm", "transformers", "bm25s", "httpx2", "openai")
        done = python(*COMMAND, log_file, blocked=blocked)
        assert done.returncode == 0, done.stderr
        assert "would it help?" in done.stdout


class TestTheCommandRefuses:
    def test_bad_standard_input(self) -> None:
        example = 'a line looks like {"time": 12.5, "documents": ["a", "b"], "tokens": [210, 190]}'
        assert refusal("-", input=b"{}") == f'Error: <stdin>:1: "time" is missing: add it: {example}\n'
        assert refusal("-", input=b"") == f"Error: <stdin>: no requests in it: {example}\n"
        assert "is no capacity" in refusal("-", "--capacity-tokens", "lots", input=b"no log"), "before it is read"

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            *(
                (("--policy", policy), f"policy '{policy}' cannot be replayed: choose from retrieval, greedy, prefix")
                for policy in ("oracle", "events", "none", "queue", "fastest")
            ),
            *(
                (("--capacity-tokens", each), f"'{each}' is no capacity: give tokens")
                for each in ("lots", "0", "-5", "0%", "1e3")
            ),
            (("--block-size", "0"), "--block-size"),
            (("--no-sweep",), "no capacity to replay with: give --capacity-tokens, or leave out --no-sweep"),
            (("--suffix-tokens", "0"), "--suffix-tokens"),
            (("--document-tokens", "99999999999"), "99999999999 is not in the range 0<=x<=10000000"),
            (("--prefill-rate", "0"), "--prefill-rate"),
            (("--decode-rate", "inf"), "must be finite"),
            (("--prefill-rate", "nan"), "finite"),
            (("--plot", "plot.svg"), "--plot draws a PNG: give FILE.png"),
            (("--plot", "/no/such/folder/plot.png"), "in a writable folder"),
        ],
    )
    def test_what_cannot_be_done(self, log_file: Path, options: tuple[str, ...], problem: str) -> None:
        assert problem in refusal(log_file, *options)


class TestThePlot:
    @pytest.fixture(autouse=True)
    def matplotlib(self) -> None:
        pytest.importorskip("matplotlib")

    def test_shows_the_figures(self) -> None:
        from ragorder.eval.replay.plot import draw_report

        report = replay(exported(make_workload("paper-shuf", 0), limit=200), capacities=[9_000])
        figure = draw_report(report)
        by_capacity, along = figure.axes
        assert by_capacity.get_ylabel() == "cached tokens, % of prompt tokens"
        assert along.get_title() == "Along the log, cache 9,000 tokens"
        lines = {drawn.get_label(): list(drawn.get_ydata()) for drawn in by_capacity.lines}
        for policy in report.policies:
            expected = [100 * report.at(policy, capacity).cached_ratio for capacity in report.capacities]
            assert lines[policy_words(policy)] == expected
        tenths = {drawn.get_label(): list(drawn.get_ydata()) for drawn in along.lines}
        assert tenths["ragorder (free)"] == [100 * ratio for ratio in report.at("free", report.focus).tenths]
        bounds = [ydata[0] for label, ydata in lines.items() if label.startswith("bound")]
        assert bounds == [100 * report.overlap.bound_ratio, 100 * report.overlap.one_prompt_ratio]

    def test_nothing_of_it_is_cut_off(self) -> None:
        from ragorder.eval.replay.plot import draw_report

        report = replay(exported(make_workload("paper-shuf", 0), limit=200), policies=REPLAY_POLICIES)
        figure = draw_report(report)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        for box in (part.get_tightbbox() for part in (legend, *figure.axes)):
            assert min(box.x0, box.y0) >= 0 and box.x1 <= 1_200 and box.y1 <= 600

    def test_is_a_png_also_of_a_single_request(self, tmp_path: Path) -> None:
        from matplotlib.image import imread

        path = written(tmp_path, line("ab"))
        assert invoke(path, "--plot", tmp_path / "plot.png").exit_code == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        assert imread(tmp_path / "plot.png").shape[:2] == (600, 1_200)

    def test_without_matplotlib_names_the_extra_before_anything_is_read(self, tmp_path: Path, python: Any) -> None:
        done = python(*COMMAND, "-", "--plot", tmp_path / "plot.png", blocked=("matplotlib",), input="no log")
        assert done.returncode == 1
        assert done.stderr == "Error: a plot needs matplotlib: in a clone of ragorder, pip install '.[eval]'\n"
