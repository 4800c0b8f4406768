"""`ragorder order`: requests in, orders out, in this process and as a real command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import invoke, lines, read_lines, refusal
from support.rings import examples
from support.waiting import eventually

from ragorder import Document, Orderer, PromptBuilder, Settings

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
            assert [answer["documents"] for answer in read_lines(target)] == [["a", "b"], ["a", "b"]]

    def test_no_requests_are_a_file_without_orders(self, tmp_path: Path) -> None:
        """The orders of yesterday would be taken for those of today."""
        (tmp_path / "orders.jsonl").write_text(lines({"index": 0, "documents": ["yesterday"]}), "utf-8")
        assert invoke("order", "-o", tmp_path / "orders.jsonl", input="").exit_code == 0
        assert read_lines(tmp_path / "orders.jsonl") == []

    def test_prompts_for_foreign_benchmarks_are_written_in_both_orders(self, tmp_path: Path) -> None:
        requests = asking("abc", "cba", "bca")
        requests[1]["output_tokens"], requests[2]["output_tokens"] = 3, None
        answers = order(*requests, options=["--prompts", str(tmp_path / "new" / "prompts"), "--output-tokens", "9"])
        found = [read_lines(tmp_path / "new" / "prompts" / name) for name in ("retrieval.jsonl", "ordered.jsonl")]
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
        lines = [read_lines(tmp_path / name) for name in ("retrieval.jsonl", "ordered.jsonl")]
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
            assert data == read_lines(tmp_path / name)

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
            (["--batch", "--waiting", "3"], "--waiting and --batch exclude each other"),
            (["--output-tokens", "3"], "--output-tokens requires --prompts"),
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

    @pytest.mark.parametrize("alias", [None, Path.symlink_to, Path.hardlink_to], ids=["same", "symlink", "hard link"])
    @pytest.mark.parametrize(
        ("named", "options"),
        [
            ("requests.jsonl", ["-o", "requests.jsonl"]),
            ("retrieval.jsonl", ["--prompts", "."]),
            ("ordered.jsonl", ["--prompts", "."]),
        ],
        ids=str,
    )
    def test_to_write_over_the_requests(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, options: list[str], alias: Any
    ) -> None:
        """Each order would be read as a request, for ever."""
        monkeypatch.chdir(tmp_path)
        source = Path("requests" if alias else named)
        source.write_text(given := lines(*asking("ab", "ba")), "utf-8")
        if alias:
            alias(Path(named), source)
        assert "the file of the requests" in refusal("order", source, *options)
        assert source.read_text("utf-8") == given

    def test_to_write_orders_and_prompts_into_one_file(self, tmp_path: Path) -> None:
        told = refusal("order", "-o", tmp_path / "ordered.jsonl", "--prompts", tmp_path, input=lines(*asking("ab")))
        assert "-o names a file of --prompts" in told

    def test_a_target_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "--prompts" in refusal("order", "--prompts", tmp_path / "file" / "folder", input=lines(request("a")))
        assert "/nowhere/orders.jsonl" in refusal("order", "-o", "/nowhere/orders.jsonl", input=lines(request("a")))

    @pytest.mark.parametrize(
        "command", [("order",), ("serve", "--upstream", "http://127.0.0.1:9")], ids=lambda one: one[0]
    )
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("tier_policy", "RAGORDER_TIER_POLICY: replacement policy must be one of"),
            ("profile", "give a readable profile"),
            ("block_size", "--block-size"),
        ],
    )
    def test_a_wrong_setting_in_the_environment(
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
        done = python("-m", "ragorder", "order", input=lines({"documents": ids}), PYTHONIOENCODING="ascii", LC_ALL="C")
        assert json.loads(done.stdout)["documents"] == ids

    def test_a_device_may_be_both_input_and_output(self, python: Any) -> None:
        """As a terminal is."""
        assert python("-m", "ragorder", "order", "/dev/null", "-o", "/dev/null").stdout == ""

    def test_refuses_to_append_to_the_requests(self, tmp_path: Path) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_text(given := lines(request("abc")), "utf-8")
        with path.open("rb") as source, path.open("ab") as target:
            done = subprocess.run([SCRIPT, "order"], stdin=source, stdout=target, stderr=subprocess.PIPE, timeout=60)
        assert done.returncode == 2 and b"the file of the requests" in done.stderr
        assert path.read_text("utf-8") == given

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
