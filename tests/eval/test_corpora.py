"""Corpora: a folder of JSON lines, and the standard library's documentation."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragorder.common.corpus import CorpusError
from ragorder.eval.data.corpora.base import Corpus
from ragorder.eval.data.corpora.folder import load_folder
from ragorder.eval.data.corpora.pydocs import load_asked, load_pydocs

pytestmark = pytest.mark.merge

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
GIVEN = ("covidqa", "bing_covid_cord", "nqopen")

DOCUMENTS = [
    {"id": "a", "title": "Cats", "text": "Cats sleep. Cats hunt at night. "},
    {"id": "b", "title": "Banks", "text": "Banks lend money."},
    {"id": "ü", "title": "Größe", "text": "Zürich 🙂 lies at a lake."},
]
CHUNKS = [
    {"cid": 10, "doc": "a", "start": 0, "end": 12, "tokens": 4},
    {"cid": 20, "doc": "b", "start": 0, "end": 17, "tokens": 5},
    {"cid": 30, "doc": "a", "start": 12, "end": 32, "tokens": 6},
    {"cid": 40, "doc": "ü", "start": 7, "end": 13, "tokens": 3},
]
QUESTIONS = [{"id": "q1", "question": "When do cats hunt?"}, {"id": "q2", "question": "Who lends money?"}]
RUN = [{"id": "q2", "chunks": [20, 10]}, {"id": "q1", "chunks": [30, 10, 20]}]

Lines = Sequence[Any]
Write = Callable[..., Path]


class Backwards:
    """Ranks the last document first."""

    name = "backwards"

    def __init__(self) -> None:
        self.calls: list[tuple[Sequence[str], Sequence[str], int]] = []

    def search(self, documents: Sequence[str], queries: Sequence[str], top_k: int) -> list[list[int]]:
        self.calls.append((documents, queries, top_k))
        return [list(range(len(documents)))[::-1][:top_k] for _ in queries]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a small corpus; a keyword replaces a file's lines (None: no such file, a string: as it stands)."""

    def write(gzipped: bool = False, **changed: Lines | str | None) -> Path:
        files: dict[str, Lines | str | None] = {
            "documents": DOCUMENTS,
            "questions": QUESTIONS,
            "chunks": CHUNKS,
            "run_top20": RUN,
            **changed,
        }
        folder = tmp_path / "small"
        folder.mkdir()
        for name, lines in files.items():
            if lines is None:
                continue
            text = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
            if gzipped:
                (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
            else:
                (folder / f"{name}.jsonl").write_text(text, "utf-8")
        return folder

    return write


def changed(lines: Sequence[dict[str, Any]], number: int, **fields: Any) -> list[dict[str, Any]]:
    """The lines with fields of line `number` (from 1) replaced, or removed where the value is `...`."""
    copy = [dict(line) for line in lines]
    copy[number - 1].update(fields)
    copy[number - 1] = {name: value for name, value in copy[number - 1].items() if value is not ...}
    return copy


def assert_is_sound(corpus: Corpus, top_k: int) -> None:
    assert len(corpus.rankings) == len(corpus.questions) > 0
    assert len({document.id for document in corpus.documents}) == len(corpus.documents) > 0
    assert len({question.id for question in corpus.questions}) == len(corpus.questions)
    for ranking in corpus.rankings:
        assert len(ranking) <= top_k
        assert len(set(ranking)) == len(ranking)
        assert all(0 <= position < len(corpus.documents) for position in ranking)


class TestFolder:
    @pytest.mark.parametrize("gzipped", [False, True])
    def test_chunks_are_slices_of_the_documents(self, write: Write, gzipped: bool) -> None:
        corpus = load_folder(write(gzipped))
        assert corpus.name == "small"
        assert [(document.id, document.text, document.tokens) for document in corpus.documents] == [
            ("a#0", "Cats sleep. ", 4),
            ("b#0", "Banks lend money.", 5),
            ("a#1", "Cats hunt at night. ", 6),
            ("ü#0", "🙂 lies", 3),
        ]
        assert dict(corpus.documents[2].metadata) == {"source": "a", "title": "Cats"}

    def test_questions_stay_in_order_and_the_run_is_found_by_id_and_cut_at_top_k(self, write: Write) -> None:
        folder = write()
        corpus = load_folder(folder)
        asked = [(question.id, question.text) for question in corpus.questions]
        assert asked == [("q1", "When do cats hunt?"), ("q2", "Who lends money?")]
        assert [list(ranking) for ranking in corpus.rankings] == [[2, 0, 1], [1, 0]]
        assert [list(ranking) for ranking in load_folder(folder, top_k=1).rankings] == [[2], [1]]
        with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
            load_folder(folder, top_k=0)

    def test_without_chunks_a_document_is_a_chunk_which_needs_no_title(self, write: Write) -> None:
        run = [{"id": "q1", "chunks": ["a", "ü"]}, {"id": "q2", "chunks": ["b"]}]
        corpus = load_folder(write(chunks=None, run_top20=run, documents=changed(DOCUMENTS, 1, title=...)))
        titled = [(document.id, document.metadata["title"]) for document in corpus.documents]
        assert titled == [("a#0", ""), ("b#0", "Banks"), ("ü#0", "Größe")]
        assert (corpus.documents[1].text, corpus.documents[1].token_count) == ("Banks lend money.", 5)
        assert [list(ranking) for ranking in corpus.rankings] == [[0, 2], [1]]

    def test_a_retriever_is_asked_instead_of_the_run(self, write: Write) -> None:
        retriever = Backwards()
        corpus = load_folder(write(run_top20="not json"), retriever=retriever, top_k=2)
        assert [list(ranking) for ranking in corpus.rankings] == [[3, 2], [3, 2]]
        documents = ["Cats sleep. ", "Banks lend money.", "Cats hunt at night. ", "🙂 lies"]
        assert retriever.calls == [(documents, ["When do cats hunt?", "Who lends money?"], 2)]

    def test_any_run_file_will_do_and_run_top20_is_preferred(self, write: Write) -> None:
        other = [{"id": "q1", "chunks": [40]}, {"id": "q2", "chunks": []}]
        folder = write(run_top20=None, run_other=other)
        assert [list(ranking) for ranking in load_folder(folder).rankings] == [[3], []]
        (folder / "run_top20.jsonl").write_text("".join(json.dumps(line) + "\n" for line in RUN), "utf-8")
        assert list(load_folder(folder).rankings[0]) == [2, 0, 1]

    def test_lone_surrogates_are_kept(self, write: Write) -> None:
        corpus = load_folder(write(documents=changed(DOCUMENTS, 2, text="Banks \ud800 lend money")))
        assert corpus.documents[1].text == "Banks \ud800 lend mone"

    @pytest.mark.usefixtures("no_garbage_of_others")
    @pytest.mark.parametrize("name", GIVEN)
    def test_a_given_corpus_is_sound_and_loads_fast(self, name: str) -> None:
        if not (DATA / name).is_dir():
            pytest.skip(f"needs {DATA / name}")
        start = time.thread_time()
        corpus = load_folder(DATA / name)
        assert time.thread_time() - start < 1.5
        assert corpus.name == name
        assert all(len(ranking) == 20 for ranking in corpus.rankings)
        assert all(document.tokens for document in corpus.documents)
        assert_is_sound(corpus, 20)


class TestBrokenFolder:
    """Every error names the file and the line, and says what to change."""

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"documents": changed(DOCUMENTS, 2, text=...)}, r'documents.jsonl:2: "text" is missing: add it'),
            ({"documents": changed(DOCUMENTS, 3, id="a")}, r"documents.jsonl:3: the id 'a' occurs twice.*line 1"),
            ({"documents": changed(DOCUMENTS, 3, id="")}, r'documents.jsonl:3: "id" must not be empty'),
            ({"documents": ""}, r"documents.jsonl:1: the file holds no lines"),
            ({"documents": None}, r"documents.jsonl: the file is missing: add documents.jsonl or"),
            ({"questions": None}, r"questions.jsonl: the file is missing: add questions.jsonl or"),
            (
                {"questions": [*QUESTIONS, {"id": "q3", "question": "?"}]},
                r"questions.jsonl:3: .*'q3' has no line in run",
            ),
            ({"chunks": changed(CHUNKS, 2, doc="z")}, r"chunks.jsonl:2: there is no document 'z'"),
            (
                {"chunks": changed(CHUNKS, 2, end=18)},
                r"chunks.jsonl:2: start 0 and end 18 do not fit the 17 characters",
            ),
            ({"chunks": changed(CHUNKS, 2, start=-1)}, r"chunks.jsonl:2: start -1 and end 17 do not fit"),
            ({"chunks": changed(CHUNKS, 2, start=17)}, r"chunks.jsonl:2: start 17 and end 17 do not fit"),
            ({"chunks": changed(CHUNKS, 2, start="0")}, r'chunks.jsonl:2: "start" must be an integer, not a string'),
            ({"chunks": changed(CHUNKS, 2, tokens=-1)}, r'chunks.jsonl:2: "tokens" must be at least 0'),
            ({"chunks": changed(CHUNKS, 2, cid=10)}, r"chunks.jsonl:2: the chunk id 10 occurs twice"),
            ({"run_top20": changed(RUN, 1, id="q9")}, r"run_top20.jsonl:1: there is no question 'q9'"),
            ({"run_top20": changed(RUN, 1, id="q1")}, r"run_top20.jsonl:2: the id 'q1' occurs twice"),
            ({"run_top20": changed(RUN, 2, chunks=[30, 99])}, r"run_top20.jsonl:2: there is no chunk 99"),
            ({"run_top20": changed(RUN, 2, chunks=[30.0])}, r'run_top20.jsonl:2: "chunks\[0\]" must be a string or an'),
            ({"run_top20": changed(RUN, 2, chunks=[30, 30])}, r"run_top20.jsonl:2: chunk 30 is ranked twice"),
            (
                {"run_top20": RUN[:1]},
                r"questions.jsonl:1: question 'q1' has no line in run_top20.jsonl: add one, or pass",
            ),
            ({"run_top20": None}, r"there is no run_\*.jsonl.*pass a retriever"),
            ({"run_top20": None, "run_a": RUN, "run_b": RUN}, r"run_b.jsonl: there are several runs, run_a.jsonl too"),
        ],
    )
    def test_the_error_names_the_place(self, write: Write, files: dict[str, Lines | str | None], message: str) -> None:
        with pytest.raises(CorpusError, match=message):
            load_folder(write(**files))

    def test_a_folder_that_is_absent(self, tmp_path: Path) -> None:
        with pytest.raises(CorpusError, match=r"absent: not a folder: pass the folder"):
            load_folder(tmp_path / "absent")

    @pytest.mark.parametrize(
        ("gzipped", "said"),
        [
            (False, "chunks.jsonl.gz: the folder also holds chunks.jsonl: keep one"),
            (True, 'chunks.jsonl.gz:1: "doc" is missing'),
        ],
        ids=["beside a plain one", "not compressed, and read as it is"],
    )
    def test_a_gz_file_beside_a_plain_one_or_not_compressed(self, write: Write, gzipped: bool, said: str) -> None:
        folder = write(gzipped=gzipped)
        (folder / "chunks.jsonl.gz").write_text('{"cid": 1}\n', "utf-8")
        with pytest.raises(CorpusError, match=said):
            load_folder(folder)


@pytest.fixture(scope="module")
def documentation() -> Corpus:
    pytest.importorskip("bm25s")
    return load_pydocs()


def session_of(corpus: Corpus, number: int) -> str:
    return corpus.questions[number].id.partition("/")[0]


class TestPydocs:
    def test_is_sound_and_of_the_promised_size_in_chunks_that_say_where_they_are_from(
        self, documentation: Corpus
    ) -> None:
        assert documentation.name == "pydocs"
        assert_is_sound(documentation, 20)
        assert 500 <= len(documentation.questions) <= 700
        assert 800 <= len(documentation.documents) <= 2500
        lengths = sorted(document.token_count for document in documentation.documents)
        assert 150 <= statistics.median(lengths) <= 300
        assert lengths[int(len(lengths) * 0.95)] <= 320
        for document in documentation.documents:
            assert document.id.startswith(f"{document.metadata['source']}#")
            assert document.metadata["title"].startswith(document.metadata["source"])
            assert document.metadata["title"] in document.text

    def test_chunks_hold_signatures_and_docstrings(self, documentation: Corpus) -> None:
        texts = {document.id: document for document in documentation.documents}
        assert "json.decoder.JSONDecoder.raw_decode(s, idx=0)" in " ".join(
            document.text for document in documentation.documents if document.metadata["source"] == "json.decoder"
        )
        chunk = texts["json#1"]
        assert "JSON" in chunk.text
        assert dict(chunk.metadata) == {"source": "json", "title": "json"}

    def test_nothing_private_and_no_tests(self, documentation: Corpus) -> None:
        modules = {document.metadata["source"] for document in documentation.documents}
        parts = {part for module in modules for part in module.split(".")}
        assert {"argparse", "json", "subprocess", "email"} <= parts
        assert not parts & {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages"}
        assert not [part for part in parts if part.startswith("_")]

    @pytest.mark.slow
    def test_modules_are_not_imported(self) -> None:
        code = (
            "import sys; from ragorder.eval.data.corpora.pydocs import load_pydocs\n"
            "class Nothing:\n    name = 'nothing'\n    search = lambda self, texts, queries, k: [[]] * len(queries)\n"
            "load_pydocs(retriever=Nothing())\n"
            "print([name for name in ('turtle', 'tkinter', 'ftplib', 'xmlrpc.server') if name in sys.modules])"
        )
        assert _python(code).communicate(timeout=120)[0] == "[]\n"

    def test_sessions_are_six_to_ten_consecutive_questions_about_one_module(self, documentation: Corpus) -> None:
        numbers = range(len(documentation.questions))
        sessions = [list(group) for _, group in itertools.groupby(numbers, lambda n: session_of(documentation, n))]
        assert len(sessions) == len({question.id.partition("/")[0] for question in documentation.questions})
        for number, session in enumerate(sessions):
            assert 6 <= len(session) <= 10
            assert [documentation.questions[n].id for n in session] == [
                f"session-{number}/{place}" for place in range(len(session))
            ]

    def test_follow_up_questions_share_documents_and_new_sessions_do_not(self, documentation: Corpus) -> None:
        tops = [set(ranking[:5]) for ranking in documentation.rankings]
        inside: list[float] = []
        across: list[float] = []
        for number, (before, now) in enumerate(itertools.pairwise(tops)):
            same = session_of(documentation, number) == session_of(documentation, number + 1)
            (inside if same else across).append(len(before & now) / max(1, len(before | now)))
        assert 0.2 <= statistics.mean(inside) <= 0.5
        assert statistics.mean(across) < 0.05

    @pytest.mark.slow
    def test_is_the_same_under_another_hash_seed_and_locale(self) -> None:
        code = (
            "import hashlib; from ragorder.eval.data.corpora.pydocs import load_pydocs\n"
            "corpus = load_pydocs(top_k=5)\n"
            "content = ascii([corpus.documents, corpus.questions, corpus.rankings])\n"
            "print(hashlib.sha256(content.encode()).hexdigest())"
        )
        pytest.importorskip("bm25s")
        environments = ({"PYTHONHASHSEED": "1", "LC_ALL": "C"}, {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8"})
        processes = [_python(code, **environment) for environment in environments]
        first, second = (process.communicate(timeout=120)[0] for process in processes)
        assert len(first) == 65
        assert first == second

    def test_without_sources_the_error_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(CorpusError, match="holds no Python sources: install"):
            load_pydocs(retriever=Backwards())


class TestAsked:
    def test_the_documents_retrieved_hold_the_answer(self, documentation: Corpus) -> None:
        asked = load_asked(top_k=5)
        assert asked.documents == documentation.documents
        topics = [question.id.partition("/")[0] for question in asked.questions]
        assert {topic: topics.count(topic) for topic in topics} == {"shutil": 6, "statistics": 6, "threading": 6}
        for question, ranking in zip(asked.questions, asked.rankings, strict=True):
            (answer,) = question.answers
            texts = [asked.documents[place].text.lower() for place in ranking]
            assert any(answer.lower() in text for text in texts), question.text


class TestPydocsCache:
    @pytest.fixture
    def library(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """A standard library of one module."""
        folder = tmp_path / "library"
        folder.mkdir()
        functions = "".join(f'def step{n}(value):\n    """Return step {n} of value."""\n\n' for n in range(7))
        (folder / "steps.py").write_text(f'"""Steps."""\n{functions}', "utf-8")
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
        return folder

    def test_the_second_call_reads_what_the_first_kept_and_another_top_k_or_source_is_another(
        self, library: Path, tmp_path: Path
    ) -> None:
        retriever = Backwards()

        def load(top_k: int) -> Corpus:
            return load_pydocs(retriever=retriever, cache=tmp_path / "cache", top_k=top_k)

        first, second = load(1), load(1)
        assert len(retriever.calls) == 1
        assert first == second
        assert [document.metadata for document in first.documents] == [doc.metadata for doc in second.documents]
        load(2)
        (library / "more.py").write_text('"""More steps."""\n', "utf-8")
        load(2)
        assert len(retriever.calls) == 3

    @pytest.mark.parametrize("damage", ["", "{", "[]", '{"name": 1, "documents": [[1, 2]]}'])
    def test_a_damaged_cache_is_replaced(self, library: Path, tmp_path: Path, damage: str) -> None:
        first = load_pydocs(retriever=Backwards(), cache=tmp_path / "cache")
        (path,) = (tmp_path / "cache").iterdir()
        kept = path.read_text("utf-8")
        path.write_text(damage, "utf-8")
        assert load_pydocs(retriever=Backwards(), cache=tmp_path / "cache") == first
        assert path.read_text("utf-8") == kept
        assert list((tmp_path / "cache").iterdir()) == [path]


def _python(code: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


class TestFoldersOfOnesOwn:
    def test_what_the_documentation_shows_can_be_read(self, tmp_path: Path) -> None:
        """The files of docs/corpora.md, as they stand there."""
        text = (Path(__file__).parents[2] / "docs" / "corpora.md").read_text("utf-8")
        files = dict(re.findall(r"`(\w+\.jsonl)`[^\n]*\n+```json\n(.*?)```", text, re.DOTALL))
        assert {"documents.jsonl", "questions.jsonl", "run_mine.jsonl"} <= files.keys()
        for name in ("documents.jsonl", "questions.jsonl", "run_mine.jsonl"):
            (tmp_path / name).write_text(files[name], "utf-8")
        corpus = load_folder(tmp_path)
        assert len(corpus.questions) == 2 and all(len(ranking) >= 2 for ranking in corpus.rankings)
        (tmp_path / "chunks.jsonl").write_text(files["chunks.jsonl"], "utf-8")
        (tmp_path / "run_mine.jsonl").write_text('{"id": "q1", "chunks": [1]}\n{"id": "q2", "chunks": [2]}\n', "utf-8")
        assert all(document.tokens for document in load_folder(tmp_path).documents)
