"""`ragorder fuse`: a corpus' KV built into a folder, extended, reduced and shown."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import run_command, write_lines

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder import Document, PromptBuilder
from ragorder.cli import main
from ragorder.kernels.preprocessing.manifest import Manifest

fuse = partial(run_command, main, "fuse", env={"COLUMNS": "120"})
TEXTS = ["The cat sleeps.", "Interest rates were raised.", "A parser never looks back.", "Glaciers carve valleys."]


def documents(count: int = 4) -> list[dict[str, str]]:
    return [{"id": f"d{number}", "text": text, "title": "t"} for number, text in enumerate(TEXTS[:count])]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "corpus.jsonl", documents())


def options_in(folder: Path, model_folder: Path) -> list[Any]:
    graph = write_lines(folder / "graph.jsonl", [{"id": f"d{n}", "neighbours": [f"d{n + 1}", "d0"]} for n in range(4)])
    return [
        *("--model", model_folder, "--out", folder / "kv", "--neighbours-by", f"graph:{graph}", "--neighbours", 2),
        *("--profile", "none", "--device-tokens", 2048, "--device", "cpu"),
    ]


@pytest.fixture
def options(model_folder: Path, tmp_path: Path) -> list[Any]:
    return options_in(tmp_path, model_folder)


@pytest.fixture(scope="module")
def built_once(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    done = fuse("build", write_lines(folder / "corpus.jsonl", documents()), *options_in(folder, model_folder))
    assert done.exit_code == 0, done.output
    return folder / "kv"


@pytest.fixture
def built(built_once: Path, tmp_path: Path) -> Path:
    """A build of four documents."""
    return shutil.copytree(built_once, tmp_path / "kv")


def figures(folder: Path) -> dict[str, Any]:
    done = run_command(main, "stats", folder, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusal(*arguments: Any) -> str:
    done = fuse(*arguments)
    assert done.exit_code != 0
    return done.stderr


def test_a_build_is_made_shown_extended_and_reduced(corpus: Path, options: list[Any], tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    done = fuse("build", corpus, *options)
    assert done.exit_code == 0, done.output
    assert "4 documents to compute" in done.stderr
    assert f"4 of 4 documents are in {kv}" in done.stdout
    assert f"--reuse fused --copies all --disk-path {kv} --disk-bytes 1GiB" in done.stdout
    shown = figures(kv)
    assert (shown["documents"], shown["stored"], shown["missing"], shown["other_chunks"]) == (4, 4, 0, 1)
    assert shown["bytes"] / shown["tokens"] == shown["bytes_per_token"] > shown["token_bytes"]
    assert "with KV on the disk" in run_command(main, "stats", kv).stdout

    changed = [documents()[1] | {"text": "Rates were lowered."}, {"id": "d4", "text": "New."}, documents()[2]]
    done = fuse("add", kv, write_lines(tmp_path / "more.jsonl", changed))
    assert done.exit_code == 0, done.output
    assert "2 of 3 documents are new or changed" in done.stderr
    assert "other neighbours now: --refresh recomputes them" in done.stderr
    assert figures(kv)["documents"] == figures(kv)["stored"] == 5
    done = fuse("add", kv, tmp_path / "more.jsonl", "--refresh")
    assert done.exit_code == 0 and "0 of 3 documents are new" in done.stderr
    assert "other neighbours" not in fuse("add", kv, tmp_path / "more.jsonl").stderr

    done = fuse("remove", kv, "d1", "d4")
    assert done.stdout == "2 documents removed, 3 left\n"
    assert figures(kv)["documents"] == figures(kv)["stored"] == 3
    assert "no document 'd1': nothing was removed" in refusal("remove", kv, "d0", "d1")


def test_documents_are_those_of_prompts(corpus: Path, options: list[Any], model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = "{title}: {text}\n"
    tenant = ["--salt", "tenant", "--max-batch-tokens", 7, "--host-bytes", 0]
    done = fuse("build", corpus, *options, *tenant, "--system", "Say.", "--document-template", template)
    assert done.exit_code == 0, done.output
    prompts = PromptBuilder("Say.", document_template=template, tokenizer=AutoTokenizer.from_pretrained(model_folder))
    expected = [Document(each["id"], each["text"], metadata={"title": "t"}) for each in documents()]
    manifest = Manifest.of(tmp_path / "kv")
    assert [list(each.token_ids) for each in manifest] == [list(prompts.document_ids(each)) for each in expected]
    assert manifest.facts["prefix_tokens"] == prompts.prefix_tokens
    manifest.close()


def test_a_build_is_gone_on_with_only_if_it_is_the_same(corpus: Path, options: list[Any], tmp_path: Path) -> None:
    assert fuse("build", corpus, *options, "--shard", "1/2", "--batch-documents", 1).exit_code == 0
    assert figures(tmp_path / "kv")["missing"] == 2
    assert "has a build: go on with --resume" in refusal("build", corpus, *options)
    again = ["--resume", "--batch-documents", 1]
    assert "--system 'unset', not 'X'" in refusal("build", corpus, *options, *again, "--system", "X")
    other = write_lines(tmp_path / "other.jsonl", documents(3))
    assert "is of other documents: use `ragorder fuse add`" in refusal("build", other, *options, *again)
    done = fuse("build", corpus, *options, *again)
    assert done.exit_code == 0 and "2 documents to compute" in done.stderr
    path = next((tmp_path / "kv" / "chunks").glob("??/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = fuse("build", corpus, *options, *again)
    assert "1 damaged (1 checksum): computed again" in done.stderr
    assert figures(tmp_path / "kv")["missing"] == 0


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([{"text": "x"}], 'corpus.jsonl:1: "id" is missing: add it'),
        ([{"id": "a", "text": "x"}, {"id": "", "text": "x"}], 'corpus.jsonl:2: "id" must not be empty'),
        ([{"id": "a", "text": "x"}, {"id": 2, "text": "x"}], 'corpus.jsonl:2: "id" must be a string, not an integer'),
        ([{"id": "a", "text": "x"}] * 2, "corpus.jsonl:2: the id 'a' occurs twice, first in line 1"),
        ([], "the file holds no lines: add at least one"),
        ([{"id": "a", "text": "word " * 3000}], "document 'a' has more than"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named(
    corpus: Path, options: list[Any], lines: list[Any], problem: str, tmp_path: Path
) -> None:
    write_lines(corpus, lines)
    assert problem in refusal("build", corpus, *options)
    assert list((tmp_path / "kv").glob("chunks/??/*")) == []


def test_a_corpus_is_checked_before_the_model_is_loaded(options: list[Any], built: Path, tmp_path: Path) -> None:
    wrong, absent = write_lines(tmp_path / "wrong.jsonl", [{"text": "x"}]), ["--model", tmp_path / "no-model"]
    for command in (["build", wrong, *options], ["add", built, wrong]):
        assert 'wrong.jsonl:1: "id" is missing: add it' in refusal(*command, *absent)


def test_a_disk_too_small_is_said_with_the_size_needed(
    corpus: Path, options: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=4096, f_frsize=1))
    said = " ".join(refusal("build", corpus, *options).split())
    assert "has 4,096 bytes free, but the KV of 4 documents" in said and "make room" in said


def test_a_server_with_less_disk_than_the_build_takes_does_not_start(built: Path, model_folder: Path) -> None:
    """It would have removed a part of the build."""
    size = figures(built)["bytes"]
    serve = ["engine", "--model", model_folder, "--reuse", "fused", "--disk-path", built]
    done = run_command(main, *serve, "--disk-bytes", size - 1)
    said = " ".join(done.stderr.split())
    assert done.exit_code != 0
    assert f"holds a build of {size:,} bytes, and a disk tier of {size - 1:,} would evict a part of it" in said
    assert "give --disk-bytes 1GiB" in said
    assert figures(built)["stored"] == 4


def kill_within_a_change(built: Path) -> None:
    """Leave the manifest as a killed `ragorder fuse add` does: half changed, with the journal that undoes it."""
    manifest, journal = built / "documents.sqlite", built / "documents.sqlite-journal"
    halfway = {}
    with closing(sqlite3.connect(manifest)) as db:
        db.execute("PRAGMA cache_size = 1")
        db.execute("UPDATE documents SET tokens = zeroblob(1 << 20)")
        for path in (manifest, journal):
            halfway[path] = path.read_bytes()
        db.rollback()
    for path, content in halfway.items():
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("stats KV", "with KV on the disk"),
        ("fuse remove KV nobody", "no document 'nobody'"),
        ("fuse add KV CORPUS", "0 of 4 documents are new"),
        ("engine --model KV --disk-path KV --disk-bytes 1", "would evict a part of it"),
    ],
)
def test_the_first_command_after_a_killed_change_undoes_it(built: Path, corpus: Path, command: str, said: str) -> None:
    before = figures(built)
    kill_within_a_change(built)
    paths = {"KV": built, "CORPUS": corpus}
    done = run_command(main, *(paths.get(word, word) for word in command.split()))
    assert said in " ".join(done.output.split())
    assert figures(built) == before


def test_what_is_no_build_or_another_models_is_said(
    corpus: Path, options: list[Any], built: Path, tmp_path: Path
) -> None:
    for command in (["remove", tmp_path, "a"], ["add", tmp_path, corpus]):
        assert "has no build: name the folder of one" in refusal(*command)
    said = refusal("build", corpus, *options, "--resume", "--dtype", "float32")
    assert "another model, or of the same one set up differently" in said


DAMAGE = {
    "content that is text": "UPDATE documents SET content = 'hunter2' WHERE place = 2",
    "content of another length": "UPDATE documents SET content = x'01' WHERE place = 2",
    "tokens that are a number": "UPDATE documents SET tokens = 5",
    "no tokens": "UPDATE documents SET tokens = x''",
    "half a token": "UPDATE documents SET tokens = x'010203' WHERE place = 2",
    "tokens below 0": "UPDATE documents SET tokens = x'FFFFFFFFFFFFFFFF'",
    "half a neighbour": "UPDATE documents SET neighbours = x'010203' WHERE place = 2",
    "a vector that is text": "UPDATE documents SET vector = 'hunter2'",
    "half a number": "UPDATE documents SET vector = x'01'",
    "an id that is no Unicode": "UPDATE documents SET id = CAST(x'68756E74657232FF' AS TEXT) WHERE place = 2",
    "a recipe that is a list": "UPDATE facts SET value = '[\"hunter2\"]' WHERE name = 'recipe'",
    "a recipe that is no JSON": "UPDATE facts SET value = 'hunter2' WHERE name = 'recipe'",
    "a fact that is gone": "DELETE FROM facts WHERE name = 'token_bytes'",
    "a fact of another type": "UPDATE facts SET value = '\"hunter2\"' WHERE name = 'prefix_tokens'",
    "a table that is gone": "DROP TABLE documents",
}


class TestADamagedManifest:
    def damage(self, built: Path, statement: str) -> None:
        with closing(sqlite3.connect(built / "documents.sqlite")) as db, db:
            db.execute(statement)

    @pytest.mark.parametrize("statement", DAMAGE.values(), ids=DAMAGE)
    def test_is_refused_by_each_command_and_not_quoted(self, built: Path, tmp_path: Path, statement: str) -> None:
        self.damage(built, statement)
        more = write_lines(tmp_path / "more.jsonl", [{"id": "new", "text": "Some new words."}])
        for command in (["stats", built], ["fuse", "remove", built, "d1"], ["fuse", "add", built, more]):
            done = run_command(main, *command)
            said = done.stderr
            assert done.exit_code != 0
            assert "documents.sqlite cannot be read (" in said or "the build has no document 'd1'" in said, command
            assert "hunter2" not in said

    @pytest.mark.parametrize(("room", "starts"), [(-1, False), (0, True)])
    def test_lets_a_server_start_only_if_its_disk_tier_takes_all_that_is_there(
        self, built: Path, room: int, starts: bool
    ) -> None:
        """Any of it may be the build's, whose size is not known."""
        shown = figures(built)
        size = shown["bytes"] + shown["other_bytes"]
        self.damage(built, DAMAGE["a table that is gone"])
        done = run_command(main, "engine", "--model", built, "--disk-path", built, "--disk-bytes", size + room)
        said = " ".join(done.stderr.split())
        assert (f"a disk tier of {size - 1:,} would evict a part of it" in said) is not starts
        # The folder has no model.
        assert (f"--model {built}: " in said) is starts

    def test_with_tokens_that_the_model_does_not_have_is_given_to_no_model(self, built: Path, tmp_path: Path) -> None:
        self.damage(built, "UPDATE documents SET tokens = x'FFFFFF7F00000000'")
        more = write_lines(tmp_path / "more.jsonl", [{"id": "new", "text": "Some new words."}])
        assert "a document has tokens outside the model's vocabulary" in refusal("add", built, more)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (["--shard", "3/2"], "write 1/4 for the first of four"),
        (["--shard", "x"], "write 1/4 for the first of four"),
        (["--neighbours-by", "friends"], "must be one of 'embedding', 'graph', 'vectors'"),
        (["--neighbours-by", "graph:/nowhere"], "/nowhere: No such file"),
        (["--document-template", "{question}"], "document_template"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_options_are_named(corpus: Path, options: list[Any], wrong: list[str], problem: str) -> None:
    assert problem in refusal("build", corpus, *options, *wrong)
