"""The command `ragorder plan`: shards on the disk, whole or not there."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import select
import shutil
import threading
import time
from collections import Counter, namedtuple
from contextlib import suppress
from itertools import chain, pairwise, takewhile
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from support.commands import invoke, read_lines, write_lines
from support.inside import set_bounds

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
    return write_lines(tmp_path / "requests.jsonl", REQUESTS)


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
    return [read_lines(folder / shard["file"]) for shard in manifest(folder)["shards"]]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for shard in shards(folder) for row in shard]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class TestPlan:
    def test_every_request_comes_once_and_says_what_it_shares_with_the_last(
        self, requests: Path, tmp_path: Path
    ) -> None:
        said = plan(requests, tmp_path / "plan", "--shards", "4")
        found = rows(tmp_path / "plan")
        names = ["manifest.json", *(f"shard-0000{number}.jsonl" for number in range(4))]
        assert len(shards(tmp_path / "plan")) == 4 and list(contents(tmp_path / "plan")) == names
        assert sorted(row["index"] for row in found) == list(range(len(REQUESTS)))
        for row in found:
            given = REQUESTS[row["index"]]
            assert row["id"] == given["id"]
            assert row["documents"] == [given["documents"][rank]["id"] for rank in row["permutation"]]
            assert sorted(row["permutation"]) == list(range(5))
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
            set_bounds(monkeypatch, documents_per_shard=most)
        plan(requests, tmp_path / "plan")
        assert len(shards(tmp_path / "plan")) == count

    def test_tenants_share_nothing_and_stand_together(self, tmp_path: Path) -> None:
        named = [request(number, tenant=f"tenant-{number % 3}") for number in range(120)]
        plan(write_lines(tmp_path / "requests.jsonl", [*named, *REQUESTS[:40]]), tmp_path / "plan", "--shards", "2")
        for shard in shards(tmp_path / "plan"):
            order = [row.get("tenant") for row in shard]
            assert len(set(order)) == 1 + sum(one != other for one, other in pairwise(order))
            for before, row in pairwise(shard):
                assert before.get("tenant") == row.get("tenant") or row["prefix_documents"] == 0

    def test_a_document_twice_is_there_twice(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "requests.jsonl", [{"documents": list("aba")}, {"documents": list("baa")}])
        plan(source, tmp_path / "plan")
        assert [Counter(row["documents"]) for row in rows(tmp_path / "plan")] == [Counter("aab")] * 2

    @pytest.mark.parametrize("count", [1, 3])
    def test_nothing_in_is_nothing_out(self, tmp_path: Path, count: int) -> None:
        plan(write_lines(tmp_path / "requests.jsonl", []), tmp_path / "plan", "--shards", str(count))
        assert shards(tmp_path / "plan") == [[]] * count

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
        source = write_lines(tmp_path / "requests.jsonl", [*REQUESTS[:3], {"documents": [{"text": "a"}]}])
        said = refusal(source, "--out", tmp_path / "plan")
        assert f'{source}:4: "documents[0].id" is missing: add it' in said
        assert "<stdin>:1: not JSON" in refusal("-", "--out", tmp_path / "plan", input="oops\n")
        assert not (tmp_path / "plan").exists()
        assert "--out" in refusal("-")

    def test_a_disk_too_small_is_said_early(
        self, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, 10_000))
        said = refusal(requests, "--out", tmp_path / "plan")
        assert f"the disk of {tmp_path / 'plan'} has 0.0 MiB free, and the plan needs 0." in said
        assert "make room, or name a folder on another disk" in said
        assert not (tmp_path / "plan").exists()

    def test_a_disk_that_fills_is_said_and_nothing_is_left(self, requests: Path, tmp_path: Path, python: Any) -> None:
        """A process may write files of 20 KB."""
        limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2); "
        limited += "runpy.run_module('ragorder', run_name='__main__')"
        done = python("-c", limited, "plan", requests, "-o", tmp_path / "plan", "--workers", "1")
        said = " ".join(done.stderr.split())
        assert done.returncode == 1
        assert f"cannot be written to {tmp_path / 'plan'} (disk I/O error): name a folder elsewhere" in said
        assert not (tmp_path / "plan").exists()

    def test_a_shard_larger_than_the_memory_is_refused_with_the_number_that_fits(
        self, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, planned_bytes=1 << 20)
        said = refusal(requests, "--out", tmp_path / "plan", "--shards", "2", "--memory", "512MiB")
        assert "--shards 2" in said and "--memory 0.5GiB" in said and "give --shards 5 or more" in said
        plan(requests, tmp_path / "plan", "--shards", "5", "--memory", "512MiB")
        assert len(rows(tmp_path / "plan")) == len(REQUESTS)

    def test_a_shard_of_many_short_documents_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, planned_bytes=200_000)
        uneven = [
            {**each, "tenant": f"{tokens}", "documents": [{**given, "tokens": tokens} for given in each["documents"]]}
            for each in REQUESTS
            for tokens in (1, 10_000)
        ]
        source = write_lines(tmp_path / "uneven.jsonl", uneven)
        said = refusal(source, "--out", tmp_path / "plan", "--shards", "4", "--memory", "256MiB")
        assert re.search(r"--shards 4 a shard of [\d,]+ documents does not fit into --memory 0.25GiB: give", said)
        plan(source, tmp_path / "plan", "--shards", "4", "--memory", "1GiB")
        assert len(rows(tmp_path / "plan")) == len(uneven)

    @pytest.mark.parametrize("name", ["manifest.json", "shard-00000.jsonl"])
    def test_files_of_an_earlier_plan_stay(self, requests: Path, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("mine", "utf-8")
        assert "holds shards or a manifest: name another folder" in refusal(requests, "--out", tmp_path)
        assert contents(tmp_path) == {name: b"mine", "requests.jsonl": requests.read_bytes()}

    def test_a_second_run_in_one_folder_is_refused(self, requests: Path, tmp_path: Path) -> None:
        (tmp_path / "plan" / ".plan").mkdir(parents=True)
        said = refusal(requests, "--out", tmp_path / "plan")
        assert "another `ragorder plan` writes to" in said and f"delete {tmp_path / 'plan' / '.plan'}" in said


class TestEnded:
    def test_a_process_that_is_killed_is_said_and_nothing_is_left(self, requests: Path, tmp_path: Path) -> None:
        def kill_one() -> None:
            while not (started := active_children()):
                time.sleep(0.001)
            started[0].kill()

        killer = threading.Thread(target=kill_one, daemon=True)
        killer.start()
        said = refusal(requests, "--out", tmp_path / "plan", "--shards", "4", "--workers", "2")
        killer.join()
        assert "memory ran out, or a process was ended: give fewer --workers or more --shards" in said
        assert not (tmp_path / "plan").exists() and not active_children()

    @pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
    def test_of_a_killed_run_no_process_is_left_and_no_plan(self, requests: Path, tmp_path: Path, python: Any) -> None:
        done = python("-c", KILLED, "plan", requests, "-o", tmp_path / "plan", "--shards", "12", "--workers", "3")
        assert done.returncode == -9, done.stderr
        left = [int(number) for number in done.stdout.split()]
        assert len(left) == 3
        for number in left:
            with suppress(ProcessLookupError):
                process = os.pidfd_open(number)
                assert select.select([process], [], [], 60)[0] == [process]
                os.close(process)
        assert os.listdir(tmp_path / "plan") == [".plan"]


KILLED = """
import os, signal, sys, threading, time
from multiprocessing import active_children

from ragorder.cli import main

def end():
    while len(active_children()) < 3:
        time.sleep(0.001)
    print(*(process.pid for process in active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=end, daemon=True).start()
main(sys.argv[1:], prog_name="ragorder")
"""
