"""Suite quality-positions: answers of a small trained model by the place of what they need."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import pytest
from support.suites import run_suites

pytest.importorskip("torch")
pytest.importorskip("scipy")

from ragorder.benchmarks.fusion.quality_positions.experiment import (
    QualityPositions,
    make_part,
)
from ragorder.benchmarks.fusion.quality_positions.measuring import Answers, Stream, Task, draw_stream, order_stream
from ragorder.benchmarks.fusion.toy.task import VALUES, ChainModel
from ragorder.benchmarks.fusion.toy.weights import SHIPPED, checkpoint
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.reading import read_results
from ragorder.eval.running.suite import load_suites, read_suite

TASKS: tuple[Task, ...] = get_args(Task)


@pytest.fixture(scope="module", params=TASKS)
def stream(request: pytest.FixtureRequest) -> Stream:
    return draw_stream(60, request.param, 8, seed=3)


@pytest.fixture(scope="module")
def look_ups() -> Stream:
    return draw_stream(200, "look-up", 8, seed=4)


class TestTheStream:
    def test_a_question_is_answered_by_its_documents_and_by_no_fewer(self, stream: Stream) -> None:
        for asked in stream.requests:
            assert len(set(asked.documents)) == 8 and set(asked.gold) <= set(asked.documents)
            # Lines begin anywhere, so every pair of neighbours is looked at: heads are drawn once in a corpus.
            texts = [stream.tokens[asked.corpus, number].tolist() for number in asked.gold]
            token = asked.name
            for text in texts:
                token = text[text.index(token) + 1]
            assert token == asked.value and token in VALUES

    @pytest.mark.parametrize("task", TASKS)
    def test_retrieval_ranks_the_two_documents_of_a_chain_as_the_task_says(self, task: Task) -> None:
        for asked in draw_stream(60, task, 8, seed=3).requests:
            ranks = [asked.documents.index(gold) for gold in asked.gold]
            assert len(ranks) == (1 if task == "look-up" else 2)
            if task != "look-up":
                link, definition = ranks
                assert (definition < link) == (task == "definition first")

    def test_requests_share_documents_and_what_they_need_stands_at_any_rank(self, look_ups: Stream) -> None:
        ranks = {asked.documents.index(*asked.gold) for asked in look_ups.requests}
        assert ranks == set(range(8))
        shared: dict[bool, list[int]] = {True: [], False: []}
        for one, other in combinations(look_ups.requests, 2):
            if one.corpus == other.corpus:
                shared[one.name == other.name].append(len({*one.documents} & {*other.documents}))
        # Of eight documents of forty, chance alone would share 1.6.
        assert fmean(shared[True]) > 2 * fmean(shared[False]) > 2 * 1.6

    def test_is_the_same_for_the_same_seed(self) -> None:
        first, again, other = (draw_stream(20, "link first", 8, seed) for seed in (1, 1, 2))
        assert first.requests == again.requests != other.requests
        assert first.tokens.equal(again.tokens)


class TestOrders:
    def orders(self, stream: Stream, policy: str) -> list[tuple[int, ...]]:
        return [each.permutation for each in order_stream(stream, policy, 65_536, 0)]

    @pytest.mark.parametrize("policy", load_suites()["quality-positions"].policies)
    def test_are_permutations_of_what_was_retrieved(self, look_ups: Stream, policy: str) -> None:
        assert all(sorted(each) == list(range(8)) for each in self.orders(look_ups, policy))

    def test_keep_what_the_guards_keep(self, look_ups: Stream) -> None:
        assert {each[:2] for each in self.orders(look_ups, "free+keep_first=2")} == {(0, 1)}
        assert {each[6:] for each in self.orders(look_ups, "free+keep_last=2")} == {(1, 0)}
        near = self.orders(look_ups, "free+max_displacement=2")
        assert max(abs(rank - place) for each in near for place, rank in enumerate(each)) == 2
        for asked, order in zip(look_ups.requests, self.orders(look_ups, "free+keep_groups"), strict=True):
            sources = [document.metadata["source"] for document in look_ups.documents(asked)]
            for source in set(sources):
                own = [rank for rank in order if sources[rank] == source]
                assert own == sorted(own)

    def test_free_moves_more_than_as_ranked_and_finds_more_cached(self, look_ups: Stream) -> None:
        found = {name: order_stream(look_ups, name, 65_536, 0) for name in ("retrieval", "prefix", "free")}
        moved = {
            name: sum(abs(rank - place) for each in orders for place, rank in enumerate(each.permutation))
            for name, orders in found.items()
        }
        cached = {name: sum(each.cached_tokens for each in orders) for name, orders in found.items()}
        assert 0 == moved["retrieval"] < moved["prefix"] < moved["free"]
        assert cached["retrieval"] < cached["prefix"] <= cached["free"]


class TestAnswers:
    @pytest.fixture(scope="class")
    def model(self) -> ChainModel:
        return ChainModel.load(checkpoint(SHIPPED, 0))

    def test_a_link_is_followed_to_what_stands_in_front_of_it_alone(self, model: ChainModel) -> None:
        stream = draw_stream(30, "definition first", 8, seed=5)
        answers, values = Answers(model, stream), [asked.value for asked in stream.requests]
        as_ranked, turned = (answers.to([tuple(order)] * 30) for order in (range(8), reversed(range(8))))
        assert sum(map(int.__eq__, as_ranked, values)) >= 29
        assert sum(map(int.__eq__, turned, values)) <= 5

    def test_a_prompt_is_answered_once(self, model: ChainModel, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = draw_stream(10, "look-up", 8, seed=6)
        answers = Answers(model, stream)
        first = answers.to([tuple(range(8))] * 10)
        assert first == [asked.value for asked in stream.requests]
        monkeypatch.setattr(ChainModel, "logits", lambda *_: pytest.fail("computed again"))
        assert answers.to([tuple(range(8))] * 10) == first


def record(policy: str, right: list[int], place: list[int], **columns: Any) -> Any:
    count = len(right)
    rows = {"right": right, "rank": [0] * count, "place": place, "displacement": [0.5] * count}
    rows |= {"cached_tokens": [30] * count, "prompt_tokens": [120] * count, **columns}
    return QualityPositions.record(suite="mine", cell={"documents": 16}, policy=policy, rows=rows)


class TestTheSuite:
    def test_is_run_and_told(self, tmp_path: Path) -> None:
        run_suites(tmp_path, "quality-positions", "--reduced", "--seeds", "0,7", requests=25)
        results = read_results(tmp_path)
        assert len(results.of(QualityPositions.record, "quality-positions")) == 9
        # No model was trained with this seed.
        assert {each.policy for each in results.unavailable} == {"seed 7"}
        assert all("ragorder eval run toy-training --seeds 7" in each.reason for each in results.unavailable)
        part = make_part(load_suites()["quality-positions"], results)
        assert [table.title.partition(":")[0] for table in part.tables] == [
            *("Right answers", "By place"),
            *("Right answers", "By place", "By what stands in front") * 2,
        ]
        assert len(part.pictures()) == 3

    @pytest.mark.parametrize(("policy", "why"), [("free+state_ranking", "reads documents alone"), ("quick", "unknown")])
    def test_a_policy_that_the_model_cannot_answer_is_refused(self, policy: str, why: str) -> None:
        text = (
            'title = "t"\nsource = "s"\nsays = "s"\nkind = "quality-positions"\n'
            f'policies = ["retrieval", "{policy}"]\nreport = {{ chart = "c" }}\n'
        )
        with pytest.raises(SuiteError, match=why):
            read_suite("mine", text, "mine.toml")
