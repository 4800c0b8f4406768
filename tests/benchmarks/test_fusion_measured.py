"""Suites fusion-answers and fusion-deviation: answers and KV of reused documents, against full attention's."""

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


pytestmark = pytest.mark.merge

WORDS = tuple(f"word{letter}" for letter in "abcdefghijklmnopqrst")
# Far above what bfloat16 rounds, far below what a document before it changes.
ROUNDING = 1e-3

Found = dict[str, dict[str, Any]]


def documents(words: int) -> list[str]:
    return [" ".join(WORDS[(place * step) % 20] for place in range(words)) for step in (1, 3, 7, 9)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of both suites, by a small random model."""
    from ragorder.kernels.random_model import make_model

    folder, out = tmp_path_factory.mktemp("corpora"), tmp_path_factory.mktemp("results")
    model = make_model(folder / "model", texts=[" ".join(WORDS)], layers=3, hidden_size=64, vocab_size=300)
    options = ("--corpora", folder, "--engine", "torch", "--model", model)
    # Each of five questions with three of four documents; only the last has no answer.
    answers = [{"answers": [WORDS[number]]} for number in range(4)]
    questions = [{"question": f"what of {WORDS[number]}?", **answer} for number, answer in enumerate([*answers, {}])]
    rankings = [[(number + place) % 4 for place in range(3)] for number in range(5)]
    write_corpus(folder / "threes", documents(30), questions, rankings)
    neighbours = [{"id": f"d{number}#0", "neighbours": [f"d{(number + 1) % 4}#0"]} for number in range(4)]
    cell = {"corpus": "threes", "documents": 3, "by": graph(folder, *neighbours)}
    run_suites(out / "answers", "fusion-answers", *options, "--seeds", "0,1", "--limit", "2", **cell)
    # Each question is answered by the first two of four documents; the second one is preprocessed after the first.
    write_corpus(folder / "pair", documents(40), [{"question": f"what of {word}?"} for word in WORDS[:3]], [[0, 1]] * 3)
    cell = {
        "corpus": "pair",
        "documents": 2,
        "neighbours": 3,
        "by": graph(folder, {"id": "d1#0", "neighbours": ["d0#0"]}),
    }
    run_suites(out / "deviation", "fusion-deviation", *options, "--seeds", 0, **cell)
    return out


def graph(folder: Path, *neighbours: Any) -> str:
    path = folder / f"graph-{len(neighbours)}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in neighbours))
    return f"graph:{path}"


class TestAnswers:
    @pytest.fixture(scope="class")
    def lines(self, measured: Path) -> list[dict[str, Any]]:
        return result_lines(measured / "answers", "fused-answers")

    @pytest.fixture(scope="class")
    def found(self, lines: list[dict[str, Any]]) -> Found:
        return {line["policy"]: line["rows"] for line in lines if line["seed"] == 0}

    def test_every_way_answers_the_same_questions_of_a_seed_that_have_an_answer(
        self, found: Found, lines: list[dict[str, Any]]
    ) -> None:
        for name in ("id", "prompt"):
            assert len({tuple(rows[name]) for rows in found.values()}) == 1
        assert len(found["full attention"]["id"]) == 2
        asked = {line["seed"]: line["rows"]["id"] for line in lines}
        assert sorted(asked[0] + asked[1]) == ["q0", "q1", "q2", "q3"]

    def test_are_compared_with_those_of_full_attention_by_the_share_that_is_recomputed(self, found: Found) -> None:
        assert found["full attention"]["kl 1"] == [0, 0]
        blended, reused, preprocessed = (found[name] for name in ("CacheBlend", "full reuse", "FusionRAG"))
        assert min(reused["kl 0"]) > 0 and reused["recomputed 0"] == [0, 0]
        assert blended["recomputed 0.5"] == [round(0.5 * tokens) for tokens in blended["reused"]]
        # KV computed after neighbours is other KV.
        assert preprocessed["kl 0"] != reused["kl 0"] and preprocessed["reused"] == reused["reused"]


class TestDeviation:
    @pytest.fixture(scope="class")
    def found(self, measured: Path) -> Found:
        return {line["policy"]: line for line in result_lines(measured / "deviation", "fusion-deviation")}

    def test_later_layers_of_later_documents_deviate(self, found: Found) -> None:
        assert set(found) == {"alone", "preprocessed"}
        assert all(len(line["rows"]["deviation"]) == 3 for line in found.values())
        first, second, third = found["alone"]["facts"]["layers"]
        assert first < ROUNDING < min(second, third)
        first, second = found["alone"]["facts"]["places"]
        assert max(first) < ROUNDING < min(second)

    def test_a_document_preprocessed_after_the_one_before_it_does_not_deviate(self, found: Found) -> None:
        assert max(found["preprocessed"]["rows"]["deviation"]) < ROUNDING < min(found["alone"]["rows"]["deviation"])
        assert max(found["preprocessed"]["facts"]["layers"]) < ROUNDING

    def test_selections_choose_their_share_where_kv_deviates_or_by_the_question(self, found: Found) -> None:
        selected = found["alone"]["facts"]["chosen"]
        for chosen in selected.values():
            shares = [share for row in chosen for share in row]
            assert 0.1 < sum(shares) / len(shares) < 0.2
            assert max(shares) <= 1
        first, second = selected["deviation"]
        assert not any(first) and sum(second) > 0
        first, second = selected["query"]
        assert any(first) and any(second)
