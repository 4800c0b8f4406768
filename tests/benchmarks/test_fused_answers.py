"""Suite fusion-answers: a model's answers from documents' reused KV, against full attention's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.results import result_lines
from support.suites import run_suites, write_corpus

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("scipy")

from ragorder.benchmarks.fusion.fused_answers import make_part
from ragorder.eval.running.reading import read_results
from ragorder.eval.running.suite import load_suites

pytestmark = pytest.mark.merge

WORDS = tuple(f"word{letter}" for letter in "abcdefghijklmnopqrst")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus "threes": each of five questions with three of four documents; only the last has no answer."""
    folder = tmp_path_factory.mktemp("corpora") / "threes"
    texts = [" ".join(WORDS[(place * step) % 20] for place in range(30)) for step in (1, 3, 7, 9)]
    answers = [{"answers": [WORDS[number]]} for number in range(4)]
    questions = [{"question": f"what of {WORDS[number]}?", **answer} for number, answer in enumerate([*answers, {}])]
    rankings = [[(number + place) % 4 for place in range(3)] for number in range(5)]
    write_corpus(folder, texts, questions, rankings)
    graph = [{"id": f"d{number}#0", "neighbours": [f"d{(number + 1) % 4}#0"]} for number in range(4)]
    (folder / "graph.jsonl").write_text("".join(json.dumps(line) + "\n" for line in graph))
    return folder.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ragorder.kernels.random_model import make_model

    folder = tmp_path_factory.mktemp("models") / "three"
    return make_model(folder, texts=[" ".join(WORDS)], layers=3, hidden_size=64, vocab_size=300)


def run(corpora: Path, out: Path, *options: Any, **cell: Any) -> None:
    cell = {"corpus": "threes", "documents": 3, "by": f"graph:{corpora / 'threes' / 'graph.jsonl'}"} | cell
    run_suites(out, "fusion-answers", "--corpora", corpora, *options, **cell)


@pytest.fixture(scope="module")
def measured(corpora: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    run(corpora, out, "--engine", "torch", "--model", model, "--seeds", "0,1", "--limit", "2")
    return out


@pytest.fixture(scope="module")
def found(measured: Path) -> dict[str, dict[str, Any]]:
    return {line["policy"]: line["rows"] for line in result_lines(measured, "fused-answers") if line["seed"] == 0}


def test_every_way_answers_the_same_questions_of_a_seed_that_have_an_answer(
    found: dict[str, dict[str, Any]], measured: Path
) -> None:
    for name in ("id", "prompt"):
        assert len({tuple(rows[name]) for rows in found.values()}) == 1
    assert len(found["full attention"]["id"]) == 2
    asked = {line["seed"]: line["rows"]["id"] for line in result_lines(measured, "fused-answers")}
    assert sorted(asked[0] + asked[1]) == ["q0", "q1", "q2", "q3"]


def test_answers_are_compared_with_those_of_full_attention_by_the_share_that_is_recomputed(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found["full attention"]["kl 1"] == [0, 0]
    blended, reused, preprocessed = (found[name] for name in ("CacheBlend", "full reuse", "FusionRAG"))
    assert min(reused["kl 0"]) > 0 and reused["recomputed 0"] == [0, 0]
    assert blended["recomputed 0.5"] == [round(0.5 * tokens) for tokens in blended["reused"]]
    # KV computed after neighbours is other KV.
    assert preprocessed["kl 0"] != reused["kl 0"] and preprocessed["reused"] == reused["reused"]


def test_what_is_measured_already_is_not_measured_again(corpora: Path, model: Path, measured: Path) -> None:
    before = result_lines(measured, "fused-answers")
    run(corpora, measured, "--engine", "torch", "--model", model, "--seeds", "0,1", "--limit", "2")
    assert result_lines(measured, "fused-answers") == before


def test_a_suite_without_a_model_says_what_to_give(corpora: Path, tmp_path: Path) -> None:
    run(corpora, tmp_path, "--seeds", "0", "--limit", "1")
    reasons = {line["reason"] for line in result_lines(tmp_path, "unavailable")}
    assert reasons == {
        "answers need a model in the embedded engine: give --engine torch --model smollm2, or another one"
    }


def test_the_report_compares_the_ways_question_by_question(measured: Path) -> None:
    part = make_part(load_suites()["fusion-answers"], read_results(measured))
    [table] = [
        table for table in part.tables if table.title.startswith("Less FusionRAG, online only") and "KL" in table.title
    ]
    ways = ["FusionRAG", "FusionRAG, two rounds", "CacheBlend", "EPIC"]
    assert [row[0].text for row in table.rows[: len(ways)]] == ways
    assert all(entry.verdict for row in table.rows for entry in row[1:])


def test_answers_of_one_token_are_not_scored(corpora: Path, model: Path, tmp_path: Path) -> None:
    options = ("--engine", "torch", "--model", model, "--seeds", 0, "--limit", 1)
    run(corpora, tmp_path, *options, "--policy", "full attention", "--policy", "EPIC", output_tokens=1, shares=0.3)
    part = make_part(load_suites()["fusion-answers"], read_results(tmp_path))
    assert not [table.title for table in part.tables if "answer" in table.title or "F1" in table.title]
