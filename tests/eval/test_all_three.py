"""All three systems together: the questions, the checkpoint, every system on the real engine, and the report."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.eval.experiments.all_three.measuring import serve
from ragorder.eval.experiments.all_three.model import NumberTokenizer, save_model
from ragorder.eval.experiments.all_three.questions import TwoHopQuestions, draw_two_hops, two_hops
from ragorder.eval.experiments.all_three.record import AllThreeCell, AllThreeRecord
from ragorder.eval.experiments.all_three.report import make_part
from ragorder.eval.experiments.all_three.systems import SYSTEMS
from ragorder.eval.experiments.fusion.checkpoints import SHIPPED, checkpoint
from ragorder.eval.experiments.fusion.export import llama, llama_tokens
from ragorder.eval.experiments.fusion.model import ChainModel
from ragorder.eval.experiments.fusion.task import ALIASES, ASK, BOS, VALUES
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite, load_suites

REQUESTS = 6
CELL = AllThreeCell(requests=REQUESTS, idle_layers=1, device_bytes=145 << 20, vectors=2000, clusters=16, nprobe=16)


@pytest.fixture(scope="module")
def questions() -> TwoHopQuestions:
    return draw_two_hops(REQUESTS, seed=0)


@pytest.fixture(scope="module")
def index(questions: TwoHopQuestions) -> Any:
    return questions.index(CELL.vectors, CELL.clusters, CELL.nprobe)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, CELL.idle_layers, seed=0)
    return folder


class TestQuestions:
    def test_need_two_documents_that_two_searches_find(self, questions: TwoHopQuestions, index: Any) -> None:
        for name, value in zip(questions.names, questions.values, strict=True):
            near = index.search(questions.embed(str(name))[None], CELL.top_k)[1][0]
            (alias,) = self._second(questions, near, name, ALIASES)
            found = index.search(questions.embed(f"{name} {alias}")[None], CELL.top_k)[1][0]
            assert self._second(questions, found, name, ALIASES) == [alias]
            assert self._second(questions, found, alias, VALUES) == [value]
            # In one document there is no line for both.
            assert all(
                str(name) not in each.text.split() for each in questions.documents if f"{alias} {value}" in each.text
            )

    def test_are_drawn_again_alike(self, questions: TwoHopQuestions) -> None:
        again, other = draw_two_hops(REQUESTS, seed=0), draw_two_hops(REQUESTS, seed=1)
        assert again.names == questions.names
        assert [each.text for each in again.documents] == [each.text for each in questions.documents]
        assert [each.text for each in other.documents] != [each.text for each in questions.documents]

    def test_what_is_no_name_has_a_vector_too(self, questions: TwoHopQuestions) -> None:
        for text in ("", "word", "3", "99999"):
            assert np.linalg.norm(questions.embed(text)) == pytest.approx(1.0, abs=1e-5)

    def test_other_vectors_are_never_found(self, questions: TwoHopQuestions, index: Any) -> None:
        assert index.ntotal == CELL.vectors
        index.nprobe = CELL.clusters
        found = index.search(np.stack([questions.embed(str(name)) for name in questions.names]), 24)[1]
        index.nprobe = CELL.nprobe
        assert found.max() < len(questions.documents)

    def _second(self, questions: TwoHopQuestions, numbers: Any, first: int, among: range) -> list[int]:
        """What follows a word in the lines that it begins."""
        texts = [list(map(int, questions.documents[number].text.split())) for number in numbers]
        pairs = [pair for tokens in texts for pair in pairwise(tokens)]
        return [second for word, second in pairs if word == first and second in among]


class TestTheModel:
    def test_is_the_trained_one(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        expected = llama(ChainModel.load(checkpoint(SHIPPED, 2, 0)), CELL.idle_layers).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)

    def test_its_answers_are_read_as_token_numbers(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        assert AutoTokenizer.from_pretrained(folder).decode([VALUES.start]) == str(VALUES.start)

    def test_prompts_in_segments_are_those_of_the_export(self, questions: TwoHopQuestions) -> None:
        segments = [str(BOS), *(each.text for each in questions.documents[:3]), f"{ASK} {questions.names[0]}"]
        encoded = [token for text in segments for token in NumberTokenizer().encode(text)]
        assert encoded == llama_tokens([int(word) for text in segments for word in text.split()])


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_answers(name: str, questions: TwoHopQuestions, index: Any, folder: Path) -> None:
    found = asyncio.run(serve(SYSTEMS[name], CELL, folder, questions, index, [0.0] * REQUESTS))
    rows, facts = found["rows"], found["facts"]
    assert len(rows["latency_s"]) == len(rows["right"]) == REQUESTS
    assert min(rows["latency_s"]) > 0
    # Two generations each, on eight documents.
    assert facts["prompt_tokens"] >= 2 * REQUESTS * CELL.top_k * 18
    system = SYSTEMS[name]
    assert (facts["copied_tokens"] > 0) == system.copies
    # Each step reads a layer at least, of 6.5 MB.
    assert facts["streamed_bytes"] >= 6e6 * facts["steps"] * system.streamed
    assert system.streamed or not facts["streamed_bytes"]
    assert 0 < facts["computed_tokens"] < facts["prompt_tokens"]
    if system.copies:
        # By chance one of 32.
        assert sum(rows["right"]) >= REQUESTS // 2


def test_the_graph_spells_the_alias_out_before_it_answers() -> None:
    graph = two_hops(4)
    text = graph.to_mermaid()
    assert [text.index(name) for name in ("link", "alias", "definition", "answer")] == sorted(
        text.index(name) for name in ("link", "alias", "definition", "answer")
    )
    assert graph.name == "two_hops"


def test_the_suite_switches_each_off_in_turn() -> None:
    suite = load_suites()["all-three"]
    assert tuple(suite.policies) == tuple(SYSTEMS)
    assert suite.short_form is not None
    assert [cell.requests for cell in suite.short_form.cells] == [6]


def test_the_report_has_what_each_costs() -> None:
    facts = {"prompt_tokens": 1000, "computed_tokens": 250, "steps": 10, "streamed_bytes": 0}
    lines = [
        AllThreeRecord(
            suite="mine",
            cell={},
            policy=policy,
            rows={"latency_s": [1.0, 2.0], "right": [1.0, 0.0]},
            facts=facts | {"streamed_bytes": streamed},
        )
        for policy, streamed in (("all three", 2_000_000), ("without streaming", 0))
    ]
    (table,) = make_part(Suite.unlisted("mine"), Results(Path(), records=lines)).tables
    assert [[entry.text for entry in row] for row in table.rows] == [
        ["all three", "1.500", "50.0", "25.0", "10", "2", "500"],
        ["without streaming", "1.500", "50.0", "25.0", "10", "0", "–"],
    ]
