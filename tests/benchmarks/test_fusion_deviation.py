"""Suite fusion-deviation: how far reused KV is from full attention's, and where critical tokens are."""

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

from ragorder.benchmarks.fusion.fusion_deviation.experiment import make_part
from ragorder.eval.running.reading import read_results
from ragorder.eval.running.suite import load_suites

pytestmark = pytest.mark.merge

WORDS = tuple(f"word{letter}" for letter in "abcdefghijklmnopqrst")
# Far above what bfloat16 rounds, far below what a document before it changes.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus "pair": each question is answered by the first two of its four documents."""
    folder = tmp_path_factory.mktemp("corpora") / "pair"
    texts = [" ".join(WORDS[(place * step) % 20] for place in range(40)) for step in (1, 3, 7, 9)]
    write_corpus(folder, texts, [{"question": f"what of {word}?"} for word in WORDS[:3]], [[0, 1]] * 3)
    # The second document of each prompt is preprocessed after the first one.
    (folder / "graph.jsonl").write_text(json.dumps({"id": "d1#0", "neighbours": ["d0#0"]}) + "\n")
    return folder.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ragorder.kernels.random_model import make_model

    folder = tmp_path_factory.mktemp("models") / "three"
    return make_model(folder, texts=[" ".join(WORDS)], layers=3, hidden_size=64, vocab_size=300)


def run(corpora: Path, model: Path, out: Path, **cell: Any) -> None:
    graph = f"graph:{corpora / 'pair' / 'graph.jsonl'}"
    options = ("--corpora", corpora, "--engine", "torch", "--model", model, "--seeds", 0)
    cell = {"corpus": "pair", "documents": 2, "neighbours": 3, "by": graph} | cell
    run_suites(out, "fusion-deviation", *options, **cell)


@pytest.fixture(scope="module")
def measured(corpora: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    run(corpora, model, out)
    return out


@pytest.fixture(scope="module")
def found(measured: Path) -> dict[str, dict[str, Any]]:
    return {line["policy"]: line for line in result_lines(measured, "fusion-deviation")}


class TestDeviation:
    def test_later_layers_of_later_documents_deviate(self, found: dict[str, Any]) -> None:
        assert set(found) == {"alone", "preprocessed"}
        assert all(len(line["rows"]["deviation"]) == 3 for line in found.values())
        first, second, third = found["alone"]["facts"]["layers"]
        assert first < ROUNDING < min(second, third)
        first, second = found["alone"]["facts"]["places"]
        assert max(first) < ROUNDING < min(second)

    def test_a_document_preprocessed_after_the_one_before_it_does_not_deviate(self, found: dict[str, Any]) -> None:
        assert max(found["preprocessed"]["rows"]["deviation"]) < ROUNDING < min(found["alone"]["rows"]["deviation"])
        assert max(found["preprocessed"]["facts"]["layers"]) < ROUNDING

    def test_selections_choose_their_share_where_kv_deviates_or_by_the_question(self, found: dict[str, Any]) -> None:
        selected = found["alone"]["facts"]["chosen"]
        for chosen in selected.values():
            shares = [share for row in chosen for share in row]
            assert 0.1 < sum(shares) / len(shares) < 0.2
            assert max(shares) <= 1
        first, second = selected["deviation"]
        assert not any(first) and sum(second) > 0
        first, second = selected["query"]
        assert any(first) and any(second)


class TestReport:
    def test_has_the_figures_and_their_pictures(self, measured: Path, found: dict[str, Any]) -> None:
        part = make_part(load_suites()["fusion-deviation"], read_results(measured))
        [table] = part.tables
        assert [row[0].text for row in table.rows] == ["alone", "preprocessed"]
        assert table.rows[0][1].text == f"{100 * found['alone']['facts']['layers'][1]:.2f}"
        assert "3 prompts × seeds 0 of 2 documents" in table.note
        assert "removes 100.0 %" in table.note or "removes 99.9 %" in table.note
        assert "100.0 % have one of their 3 most similar ones among the others retrieved" in table.note
        pictures = part.pictures()
        assert [picture.title for picture in pictures] == [
            "Deviation by layer",
            "Deviation by document",
            "Deviation by place in the document",
            "Critical tokens by document",
            "Critical tokens by place in the document",
        ]
        assert all("<svg" in picture.svg for picture in pictures)


class TestNotMeasured:
    @pytest.mark.parametrize(
        ("cell", "reason"),
        [
            ({"documents": 3}, "no question of pair has 3 documents: give fewer"),
            ({"corpus": "absent"}, "there is no corpus absent"),
            ({"by": "graph:nowhere.jsonl"}, "nowhere.jsonl"),
        ],
    )
    def test_it_is_said_why(self, corpora: Path, model: Path, tmp_path: Path, cell: Any, reason: str) -> None:
        run(corpora, model, tmp_path, **cell)
        missing = result_lines(tmp_path, "unavailable")
        assert {line["policy"] for line in missing} == {"alone", "preprocessed"}
        assert all(reason in line["reason"] for line in missing)

    def test_a_model_of_one_layer_never_deviates(self, corpora: Path, model_folder: Path, tmp_path: Path) -> None:
        run(corpora, model_folder, tmp_path)
        assert "has one layer" in result_lines(tmp_path, "unavailable")[0]["reason"]

    def test_an_unknown_choice_of_neighbours_is_refused(self, corpora: Path, model: Path, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match="did you mean 'graph'"):
            run(corpora, model, tmp_path, by="grap")
