"""The command `ragorder plan`: shards on the disk, which a killed run continues to the same bytes."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import select
import shutil
import subprocess
import sys
from collections import Counter, namedtuple
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command

from ragorder.cli import main
from ragorder.cli.planning import run, workers

invoke = partial(run_command, main)
Usage = namedtuple("Usage", "total used free")


def request(number: int, **fields: Any) -> dict[str, Any]:
    """Five documents of one of 30 topics."""
    rng = random.Random(number)
    topic = rng.randrange(30)
    documents = [{"id": f"{topic}-{each}", "tokens": 100 + each} for each in rng.sample(range(8), 5)]
    return {"id": f"q{number}", "documents": documents, **fields}


REQUESTS = [request(number) for number in range(300)]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return written(tmp_path / "requests.jsonl", REQUESTS)


def written(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests), "utf-8")
    return path


def plan(source: Path, folder: Path, *options: str) -> str:
    """What the command says on standard output."""
    given = {"--workers": "1", **dict(zip(options[::2], options[1::2], strict=True))}
    done = invoke("plan", source, "--out", folder, *chain(*given.items()))
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*arguments: str | Path, input: str | bytes | None = None) -> str:
    done = invoke("plan", *arguments, input=input)
    assert done.exit_code != 0, done.output
    return " ".join(done.stderr.split())


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def shards(folder: Path) -> list[list[dict[str, Any]]]:
    texts = [(folder / shard["file"]).read_text("utf-8") for shard in manifest(folder)["shards"]]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for shard in shards(folder) for row in shard]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class TestPlan:
    def test_every_request_comes_once_with_all_its_documents_and_fields(self, requests: Path, tmp_path: Path) -> None:
        plan(requests, tmp_path / "plan", "--shards", "4")
        found = rows(tmp_path / "plan")
        names = ["manifest.json", *(f"shard-0000{number}.jsonl" for number in range(4))]
        assert len(shards(tmp_path / "plan")) == 4 and list(contents(tmp_path / "plan")) == names
        assert sorted(row["index"] for row in found) == list(range(len(REQUESTS)))
        for row in found:
            given = REQUESTS[row["index"]]
            assert row["id"] == given["id"]
            assert row["documents"] == [given["documents"][rank]["id"] for rank in row["permutation"]]
            assert sorted(row["permutation"]) == list(range(5))

    def test_says_what_a_request_shares_with_the_line_before(self, requests: Path, tmp_path: Path) -> None:
        said = plan(requests, tmp_path / "plan", "--shards", "4")
        tokens = {each["id"]: each["tokens"] for row in REQUESTS for each in row["documents"]}
        saved = 0
        for shard in shards(tmp_path / "plan"):
            before: list[str] = []
            for row in shard:
                pairs = zip(before, row["documents"], strict=False)
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                assert row["prefix_documents"] == shared
                assert row["cached_tokens"] == sum(tokens[id] for id in row["documents"][:shared])
                saved, before = saved + row["cached_tokens"], row["documents"]
        everything = sum(each["tokens"] for row in REQUESTS for each in row["documents"])
        figures = manifest(tmp_path / "plan")
        assert (figures["tokens"], figures["saved_tokens"]) == (everything, saved)
        assert saved > 0.5 * everything
        assert f"300 requests in 4 shards in {tmp_path / 'plan'}: of {everything:,} tokens" in said

    def test_processes_and_compression_change_nothing(self, requests: Path, tmp_path: Path) -> None:
        plan(requests, tmp_path / "one", "--shards", "4")
        plan(requests, tmp_path / "two", "--shards", "4", "--workers", "2")
        assert contents(tmp_path / "one") == contents(tmp_path / "two")
        packed = tmp_path / "requests.jsonl.gz"
        packed.write_bytes(gzip.compress(requests.read_bytes()))
        plan(packed, tmp_path / "packed", "--shards", "4")
        assert rows(tmp_path / "packed") == rows(tmp_path / "one")

    @pytest.mark.parametrize(("most", "count"), [(None, 1), (400, 4)])
    def test_large_batches_have_more_shards(
        self, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, count: int
    ) -> None:
        if most is not None:
            monkeypatch.setattr(run, "_DOCUMENTS_PER_SHARD", most)
        plan(requests, tmp_path / "plan")
        assert len(shards(tmp_path / "plan")) == count

    def test_tenants_share_nothing_and_stand_together(self, tmp_path: Path) -> None:
        named = [request(number, tenant=f"tenant-{number % 3}") for number in range(120)]
        plan(written(tmp_path / "requests.jsonl", [*named, *REQUESTS[:40]]), tmp_path / "plan", "--shards", "2")
        for shard in shards(tmp_path / "plan"):
            order = [row.get("tenant") for row in shard]
            assert len(set(order)) == 1 + sum(one != other for one, other in pairwise(order))
            for before, row in pairwise(shard):
                assert before.get("tenant") == row.get("tenant") or row["prefix_documents"] == 0

    def test_a_document_twice_is_there_twice(self, tmp_path: Path) -> None:
        source = written(tmp_path / "requests.jsonl", [{"documents": list("aba")}, {"documents": list("baa")}])
        plan(source, tmp_path / "plan")
        assert [Counter(row["documents"]) for row in rows(tmp_path / "plan")] == [Counter("aab")] * 2

    @pytest.mark.parametrize("count", ["1", "3"])
    def test_nothing_in_is_nothing_out(self, tmp_path: Path, count: str) -> None:
        plan(written(tmp_path / "requests.jsonl", []), tmp_path / "plan", "--shards", count)
        assert shards(tmp_path / "plan") == [[]] * int(count)

    def test_standard_input_is_read(self, tmp_path: Path) -> None:
        done = invoke("plan", "-o", tmp_path / "plan", "--workers", "1", input='{"documents": ["a", "b"]}\n')
        assert done.exit_code == 0, done.output
        assert [row["documents"] for row in rows(tmp_path / "plan")] == [["a", "b"]]

    def test_needs_none_of_the_extras(self, requests: Path, tmp_path: Path, python: Any) -> None:
        blocked = ("torch", "vllm", "faiss", "transformers", "numpy", "scipy", "ray", "pyarrow", "psutil")
        command = ("-m", "ragorder", "plan", requests, "--out", tmp_path / "plan", "--shards", "2", "--workers", "2")
        done = python(*command, blocked=blocked)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "progress is for a terminal"
        assert len(rows(tmp_path / "plan")) == len(REQUESTS)


class TestRefusals:
    def test_a_bad_line_is_named_and_nothing_is_left(self, tmp_path: Path) -> None:
        source = written(tmp_path / "requests.jsonl", [*REQUESTS[:3], {"documents": [{"text": "a"}]}])
        said = refusal(source, "--out", tmp_path / "plan")
        assert f'{source}:4: "documents[0].id" is missing: add it' in said
        assert "<stdin>:1: not JSON" in refusal("-", "--out", tmp_path / "plan", input="oops\n")
        assert not (tmp_path / "plan").exists()
        assert "--out" in refusal("-")

    @pytest.mark.parametrize(("source", "free"), [("requests", 1000), ("-", 10)])
    def test_a_disk_that_is_too_small_is_said_before_the_start(
        self, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, free: int
    ) -> None:
        """Of standard input when it was read."""
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, free))
        given = requests if source == "requests" else source
        said = refusal(given, "--out", tmp_path / "plan", input='{"documents": ["a"]}\n')
        assert "has 0.0 MiB free, and the plan needs about 0." in said
        assert "make room, or name a folder on another disk" in said
        assert source == "-" or not (tmp_path / "plan").exists()

    def test_a_shard_larger_than_the_memory_is_refused_with_the_number_that_fits(
        self, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run, "_PLANNED_BYTES", 1 << 20)
        said = refusal(requests, "--out", tmp_path / "plan", "--shards", "2", "--memory", "512MiB")
        assert "--shards 2" in said and "--memory 0.5GiB" in said and "give --shards 5 or more" in said
        # What was read is of use.
        plan(requests, tmp_path / "plan", "--shards", "5", "--memory", "512MiB")
        assert len(rows(tmp_path / "plan")) == len(REQUESTS)

    def test_so_is_one_of_many_short_documents(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "_PLANNED_BYTES", 200_000)
        uneven = [
            {**each, "tenant": f"{tokens}", "documents": [{**given, "tokens": tokens} for given in each["documents"]]}
            for each in REQUESTS
            for tokens in (1, 10_000)
        ]
        source = written(tmp_path / "uneven.jsonl", uneven)
        said = refusal(source, "--out", tmp_path / "plan", "--shards", "4", "--memory", "256MiB")
        assert "documents, which do not fit into --memory 0.25GiB: give more --shards than 4" in said
        plan(source, tmp_path / "plan", "--shards", "4", "--memory", "1GiB")
        assert len(rows(tmp_path / "plan")) == len(uneven)

    def test_shards_of_something_else_are_left_alone(self, requests: Path, tmp_path: Path) -> None:
        mine = written(tmp_path / "shard-00000.jsonl", REQUESTS)
        for option in ("--resume", "--no-resume"):
            assert "name another folder" in refusal(requests, "--out", tmp_path, option)
        assert len(mine.read_text("utf-8").splitlines()) == len(REQUESTS)

    def test_a_second_run_in_one_folder_is_refused(self, requests: Path, tmp_path: Path) -> None:
        fcntl = pytest.importorskip("fcntl")
        (tmp_path / "plan").mkdir()
        with (tmp_path / "plan" / ".plan.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert "another `ragorder plan` writes to" in refusal(requests, "--out", tmp_path / "plan")


class TestResume:
    def test_a_finished_plan_is_left_as_it_is(self, requests: Path, tmp_path: Path) -> None:
        said = plan(requests, tmp_path / "plan", "--shards", "2")
        times = {path: path.stat().st_mtime_ns for path in (tmp_path / "plan").iterdir()}
        assert plan(requests, tmp_path / "plan", "--shards", "2") == said
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "plan").iterdir()} == times

    @pytest.mark.parametrize(
        ("option", "value", "said"),
        [
            ("--shards", "3", "was made with --shards 2, not 3: give the same, name another folder"),
            ("--document-tokens", "9", "was made with --document-tokens 256, not 9"),
            ("--memory", "1GiB", "was made with --memory 4294967296, not 1073741824"),
        ],
    )
    def test_other_options_are_refused_by_name(
        self, requests: Path, tmp_path: Path, option: str, value: str, said: str
    ) -> None:
        plan(requests, tmp_path / "plan", "--shards", "2")
        given = {"--shards": "2", option: value}
        assert said in refusal(requests, "--out", tmp_path / "plan", *chain(*given.items()))

    def test_another_input_is_refused_and_a_new_plan_takes_its_place(self, requests: Path, tmp_path: Path) -> None:
        plan(requests, tmp_path / "plan", "--shards", "4")
        other = written(tmp_path / "other.jsonl", REQUESTS[:100])
        assert "is of another input" in refusal(other, "--out", tmp_path / "plan", "--shards", "4")
        done = invoke("plan", other, "--out", tmp_path / "plan", "--shards", "2", "--workers", "1", "--no-resume")
        assert done.exit_code == 0, done.output
        assert len(rows(tmp_path / "plan")) == 100
        assert not (tmp_path / "plan" / "shard-00002.jsonl").exists()

    @pytest.mark.parametrize("name", ["manifest.json", ".plan/state.json"])
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            *((damaged, "cannot be read|is no manifest of") for damaged in (b"[" * 100_000, b"\xff", b"[]", b"{")),
            (b'{"format": NaN}', "cannot be read|is no manifest of"),
            (b'{"format": 99}', "was written by another version"),
        ],
        ids=lambda data: data[:9],
    )
    def test_a_file_that_is_damaged_or_of_another_version_is_refused_by_name(
        self, requests: Path, tmp_path: Path, name: str, content: bytes, said: str
    ) -> None:
        path = tmp_path / "plan" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        named = tmp_path / "plan" if "version" in said else path
        assert re.search(f"{re.escape(str(named))} ({said})", refusal(requests, "--out", tmp_path / "plan"))

    @pytest.mark.parametrize("option", ["--resume", "--no-resume"])
    def test_a_file_that_no_plan_has_written_stays(self, requests: Path, tmp_path: Path, option: str) -> None:
        (tmp_path / "manifest.json").write_text('{"name": "mine"}', "utf-8")
        assert "is no manifest of ragorder's: name another folder" in refusal(requests, "--out", tmp_path, option)
        assert (tmp_path / "manifest.json").read_text("utf-8") == '{"name": "mine"}'

    def test_an_input_that_would_be_replaced_stays(self, requests: Path, tmp_path: Path) -> None:
        plan(requests, tmp_path / "plan")
        before = contents(tmp_path / "plan")
        shard = tmp_path / "plan" / "shard-00000.jsonl"
        assert "the input is a shard of the plan" in refusal(shard, "--out", tmp_path / "plan", "--no-resume")
        assert contents(tmp_path / "plan") == before

    def test_a_process_that_ends_is_said_and_the_next_run_continues(
        self, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with monkeypatch.context() as broken:
            # It takes one argument, and is given two.
            broken.setattr(workers, "serve", os._exit)
            said = refusal(requests, "--out", tmp_path / "plan", "--shards", "4", "--workers", "2")
        capfd.readouterr()
        assert "has ended (status 1)" in said and "run the same command again to continue" in said
        plan(requests, tmp_path / "plan", "--shards", "4")
        assert sorted(row["index"] for row in rows(tmp_path / "plan")) == list(range(len(REQUESTS)))


KILLED = """
import os, signal, sys
from multiprocessing import active_children

calls = 0

def counted(function):
    def call(*args, **options):
        global calls
        calls += 1
        if calls == int(sys.argv[1]):
            print(*(process.pid for process in active_children()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return call

os.fsync, os.replace, os.unlink = map(counted, (os.fsync, os.replace, os.unlink))

from ragorder.cli import main

try:
    main(sys.argv[2:], prog_name="ragorder")
finally:
    print(calls)
"""


class TestKilled:
    """At a place where a run has changed something on the disk, or is about to."""

    @pytest.fixture(scope="class")
    def reference(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], int]:
        """The input, the files of a run that nothing has interrupted, and its places."""
        folder = tmp_path_factory.mktemp("killed")
        source = written(folder / "requests.jsonl", REQUESTS)
        done = self.run(0, source, folder / "plan")
        assert done.returncode == 0, done.stderr
        return source, contents(folder / "plan"), int(done.stdout.split()[-1])

    def run(self, place: int, source: Path, folder: Path, workers: int = 1) -> subprocess.CompletedProcess[str]:
        options = ("--out", folder, "--shards", "3", "--workers", workers)
        command = [sys.executable, "-c", KILLED, str(place), "plan", str(source), *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    @pytest.mark.parametrize("share", [0.4, 0.95, *[pytest.param(n / 20, marks=pytest.mark.slow) for n in range(20)]])
    def test_the_next_run_ends_with_the_same_bytes(
        self, reference: tuple[Path, dict[str, bytes], int], tmp_path: Path, share: float
    ) -> None:
        source, expected, places = reference
        assert places >= 20
        done = self.run(1 + int(share * (places - 1)), source, tmp_path / "plan")
        assert done.returncode == -9
        plan(source, tmp_path / "plan", "--shards", "3")
        assert contents(tmp_path / "plan") == expected

    def test_killed_again_and_again_it_ends(
        self, reference: tuple[Path, dict[str, bytes], int], tmp_path: Path
    ) -> None:
        source, expected, _ = reference
        codes = []
        for place in range(6, 100, 6):
            codes.append(self.run(place, source, tmp_path / "plan").returncode)
            if codes[-1] == 0:
                break
        assert len(codes) > 1 and codes[-1] == 0 and set(codes[:-1]) == {-9}
        assert contents(tmp_path / "plan") == expected

    @pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
    def test_no_process_is_left_behind(self, reference: tuple[Path, dict[str, bytes], int], tmp_path: Path) -> None:
        """Processes that plan end with the one that has asked them."""
        source, expected, _ = reference
        # Read, dealt and noted are 14 changes; the next one is made when a process has planned its first shard.
        done = self.run(15, source, tmp_path / "plan", workers=3)
        assert done.returncode == -9
        left = [int(number) for number in done.stdout.split()]
        assert len(left) == 3
        for number in left:
            with suppress(ProcessLookupError):
                process = os.pidfd_open(number)
                assert select.select([process], [], [], 60)[0] == [process]
                os.close(process)
        plan(source, tmp_path / "plan", "--shards", "3")
        assert contents(tmp_path / "plan") == expected
