"""What answers in several orders say together: comparisons, verdicts and their report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.quality import JSON, checks, written

pytest.importorskip("scipy")

from ragorder.eval.report import make_report, read_results
from ragorder.eval.suites.quality.compare import (
    bootstrap_difference,
    compare_orders,
    gold_places,
    judge,
    judge_previous,
    mcnemar_exact,
    summarise,
)
from ragorder.eval.suites.quality.orders import FusedReuse, Order, fused_orders, normalised_scores, place_orders
from ragorder.eval.suites.quality.specs import model_facts


def line(policy: str, em: Sequence[int], f1: Sequence[float] | None = None, **fields: Any) -> JSON:
    count = len(em)
    places = fields.pop("gold_places", [[0]] * count)
    moved = fields.pop("displacement", [0.0 if policy == "retrieval" else 1.0] * count)
    ids = fields.pop("id", [str(number) for number in range(count)])
    rows = {"id": ids, "em": [*em], "f1": [*(em if f1 is None else f1)], "displacement": moved, "gold_places": places}
    model = {"name": "big-7B", "parameters": 7_000_000_000, "random_weights": False}
    key = {"type": "quality", "session": "s", "suite": "quality", "cell": {"dataset": "hotpotqa"}, "seed": 0}
    return key | {"policy": policy, "model": model, "dry_run": False, "rows": rows} | fields


class TestStatistics:
    @pytest.mark.parametrize(
        ("lost", "won", "p"), [(0, 0, 1.0), (1, 0, 1.0), (0, 5, 0.0625), (0, 6, 0.03125), (2, 8, 0.109375), (3, 3, 1.0)]
    )
    def test_mcnemar_is_exact_and_about_the_questions_that_differ(self, lost: int, won: int, p: float) -> None:
        baseline = [1] * lost + [0] * won + [1] * 20 + [0] * 20
        other = [0] * lost + [1] * won + [1] * 20 + [0] * 20
        assert mcnemar_exact(baseline, other) == (lost, won, pytest.approx(p))

    def test_the_interval_is_that_of_the_mean_of_paired_differences(self) -> None:
        baseline = [number / 100 for number in range(100)]
        assert bootstrap_difference(baseline, [value + 0.1 for value in baseline]) == pytest.approx((0.1, 0.1, 0.1))
        differences = [(-1) ** number * 0.2 + 0.05 for number in range(400)]
        mean, low, high = bootstrap_difference([0.0] * 400, differences)
        assert mean == pytest.approx(0.05)
        # The mean's standard error is 0.2 / 20.
        assert (high - low) / 2 == pytest.approx(1.96 * 0.01, rel=0.1)
        assert bootstrap_difference([0.0] * 400, differences) == (mean, low, high)
        assert bootstrap_difference([0.0] * 400, differences, seed=1) != (mean, low, high)
        wider = bootstrap_difference([0.0] * 400, differences, confidence=0.99)
        assert wider[1] < low < high < wider[2]


class TestComparison:
    def test_better_worse_and_no_difference(self) -> None:
        lines = [
            line("retrieval", [0] * 10 + [1] * 10 + [0] * 20),
            line("best", [1] * 10 + [1] * 10 + [0] * 20),
            line("sorted", [0] * 10 + [0] * 10 + [0] * 20),
            line("random", [1] * 2 + [0] * 8 + [0] * 2 + [1] * 8 + [0] * 20),
        ]
        verdicts = {each["policy"]: (each["em_verdict"], each["f1_verdict"]) for each in compare_orders(lines)}
        assert verdicts == {
            "best": ("better", "better"),
            "sorted": ("worse", "worse"),
            "random": ("no difference", "no difference"),
        }

    def test_the_figures_are_percent_of_the_questions_that_both_answered(self) -> None:
        lines = [
            line("retrieval", [1, 0, 0, 1], [1, 0.5, 0, 1], id=["a", "b", "c", "d"]),
            line("free", [1, 1, 1], [1, 1, 1], id=["d", "b", "x"], displacement=[0, 2.0, 1.0]),
        ]
        (compared,) = compare_orders(lines)
        assert (compared["questions"], compared["reordered"]) == (2, 0.6667)
        assert (compared["em_baseline"], compared["em"], compared["em_lost"], compared["em_won"]) == (50, 100, 0, 1)
        assert (compared["f1_baseline"], compared["f1"], compared["f1_difference"]) == (75, 100, 25)
        assert compared["f1_low"] <= 25 <= compared["f1_high"]

    def test_without_the_baseline_or_a_shared_question_there_is_nothing_to_say(self) -> None:
        assert compare_orders([line("free", [1])]) == []
        assert compare_orders([line("retrieval", [1], id=["a"]), line("free", [1], id=["b"])]) == []

    def test_a_question_asked_again_counts_once(self) -> None:
        lines = [
            line("retrieval", [0, 0, 1], id=["a", "a", "b"]),
            line("free", [1, 1, 1], id=["a", "a", "b"], gold_places=[[1], [1], [1]]),
        ]
        (compared,) = compare_orders(lines)
        assert (compared["questions"], compared["em_won"], compared["em_baseline"]) == (2, 1, 50)
        assert gold_places(lines[1])["places"] == [{"place": 1, "gold": 2, "em": 100, "f1": 100}]

    def test_places_of_gold_documents(self) -> None:
        found = gold_places(line("free", [1, 0, 1], [1, 0.5, 1], gold_places=[[0, 2], [2], []]))
        figures = [(0, 1, 100, 100), (2, 2, 50, 75)]
        assert found["places"] == [dict(zip(("place", "gold", "em", "f1"), each, strict=True)) for each in figures]
        assert found["without_gold"] == 1

    def test_a_summary_is_made_for_each_suite_cell_and_seed_of_the_last_line_of_an_order(self) -> None:
        lines = [line("retrieval", [0]), line("free", [0]), line("free", [1]), line("retrieval", [1], seed=1)]
        found = summarise([*lines, {"type": "run"}])
        kinds = ["comparison", "positions", "positions", "verdict", "positions", "verdict"]
        assert [each["name"] for each in found] == [f"quality-{kind}" for kind in kinds]
        assert found[0]["em"] == 100


class TestPlaces:
    def test_are_the_first_to_the_last_and_five_at_most(self) -> None:
        assert place_orders(3) == ("place=1", "place=2", "place=3")
        assert place_orders(10) == ("place=1", "place=3", "place=5", "place=8", "place=10")

    @pytest.mark.parametrize(("first", "last", "best"), [(0, 9, "last"), (9, 0, "first"), (5, 6, "any"), (0, 7, "any")])
    def test_the_end_with_more_right_answers_is_recommended_if_they_differ(
        self, first: int, last: int, best: str
    ) -> None:
        """7 to 0 has a p of .016, which is no difference after four comparisons."""
        right = {1: [1] * first + [0] * last, 5: [0] * first + [1] * last}
        lines = [line(f"place={place}", right.get(place, [0] * (first + last))) for place in range(1, 6)]
        for each in lines:
            each["rows"]["contains"] = each["rows"]["em"]
        (found,) = checks(summarise(lines), "quality-places")
        assert (found["best"], found["comparisons"]) == (best, 4)
        assert f'Settings(best="{best}")' in found["message"]
        assert found["message"].startswith("no difference found") == (best == "any")
        against = {each["baseline"] for each in checks(summarise(lines), "quality-comparison")}
        assert against == {"place=1"}


class TestReport:
    def lines(self) -> list[JSON]:
        lines = [line(policy, [0, 1, 1], seed=0) for policy in ("retrieval", "random", "earned")]
        for place, each in enumerate(lines):
            tokens = {"prompt_tokens": [100] * 3, "cached_tokens": [20 * place] * 3}
            each["rows"] |= {"contains": each["rows"]["em"], "gold_places": [[0], [1], [2]], **tokens}
        return lines

    def test_shows_right_answers_against_cached_tokens_and_by_place(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        lines = self.lines()
        written(tmp_path / "results.jsonl", *lines, *summarise(lines))
        (section,) = make_report(read_results(tmp_path), {}).sections
        front, curve = section.pictures
        assert "retrieval order: 66.7 % right, 0.0 % cached" in front.alt
        assert "ragorder (earned): 66.7 % right, 40.0 % cached" in front.alt
        assert curve.alt == "place 1: 0.0 %, place 2: 100.0 %, place 3: 100.0 %"


class TestJudgingWhatIsKept:
    def file(self, folder: Path, *lines: Any) -> Path:
        return written(folder / "results.jsonl", *lines)

    def test_is_about_the_cells_to_which_something_was_added(self, tmp_path: Path) -> None:
        old = [line("retrieval", [1]), line("free", [1])]
        new = line("sorted", [0])
        done = [line("retrieval", [1], seed=1), line("free", [1], seed=1)]
        path = self.file(tmp_path, *old, *summarise(old), *done, *summarise(done), new)
        lines, found = judge_previous(path, "quality", "now")
        assert lines == [*old, new]
        assert [each["policy"] for each in checks(found, "quality-comparison")] == ["free", "sorted"]
        assert {(each["seed"], each["session"]) for each in found} == {(0, "now")}
        assert judge_previous(self.file(tmp_path, *lines, *found), "quality", "later") == ([], [])

    def test_a_verdict_that_an_interrupt_cut_off_is_made_again(self, tmp_path: Path) -> None:
        lines = [line("retrieval", [1]), line("free", [1])]
        *compared, _ = summarise(lines)
        path = self.file(tmp_path, *lines, *compared)
        with path.open("a") as torn:
            torn.write('{"type":"check","name":"quality-verd')
        assert judge_previous(path, "quality", "now")[0] == lines

    def test_leaves_other_suites_alone(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, line("retrieval", [1], suite="table-2"), {"type": "run", "suite": "quality"})
        assert judge_previous(path, "quality", "now") == ([], [])
        assert len(judge_previous(path, "table-2", "now")[0]) == 1


CAPABLE, NOISE, SMALL = (7_000_000_000, False), (5_000, True), (1_540_000_000, False)
UNKNOWN = (None, False)


class TestVerdict:
    @pytest.mark.parametrize(
        ("model", "right", "measured", "said"),
        [
            (CAPABLE, (1, 0), True, "quality was measured"),
            (NOISE, (1, 1), False, "quality was NOT measured: the model has random weights: its answers are noise"),
            (SMALL, (0, 0), False, "1.5 billion parameters (fewer than 3)"),
            (SMALL, (0, 1), True, "quality was measured"),
            (UNKNOWN, (0, 0), False, "nothing says how large the model is"),
            (CAPABLE, (0, 0), True, "no answer is right in any order: only F1 can tell them apart"),
        ],
    )
    def test_depends_on_the_model_and_on_right_answers(
        self, model: tuple[int | None, bool], right: tuple[int, int], measured: bool, said: str
    ) -> None:
        facts = {"name": "m", "parameters": model[0], "random_weights": model[1]}
        lines = [line(name, [em], model=facts) for name, em in zip(("retrieval", "free"), right, strict=True)]
        verdict = judge(lines)
        assert verdict["measured"] is measured
        assert said in verdict["message"]
        assert verdict["reordered"] == {"retrieval": 0, "free": 1}

    def test_counts_sentences_that_contain_the_answer(self) -> None:
        asked = line("free", [0], model={"name": "m", "parameters": 135_000_000, "random_weights": False})
        asked["rows"]["contains"] = [1]
        assert judge([asked])["measured"] is True

    def test_orders_that_moved_nothing_are_no_comparison(self) -> None:
        verdict = judge([line("retrieval", [1]), line("free", [1], displacement=[0.0])])
        assert verdict["measured"] is True
        assert "no order moved a document" in verdict["message"]


class TestModels:
    def test_made_here_is_random_and_counted(self, model_folder: Path) -> None:
        facts = model_facts("name", model_folder)
        assert (facts.name, facts.random_weights, facts.from_name) == ("name", True, False)
        assert 50_000 < facts.parameters < 500_000

    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("Qwen/Qwen2.5-1.5B-Instruct", 1_500_000_000),
            ("meta-llama/Llama-3.1-8B", 8_000_000_000),
            ("org-7b/gpt-4o", None),
            ("Mixtral-8x7B", None),
            ("llama3:70b", 70_000_000_000),
        ],
    )
    def test_else_the_name_tells_if_it_does(self, name: str, parameters: int | None) -> None:
        assert model_facts(name).parameters == parameters
        assert model_facts("alias", name).parameters == parameters

    def test_unreadable_weights_are_no_evidence(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0oops")
        assert model_facts("m", tmp_path).parameters is None


class TestFusedOrders:
    def test_orders_are_named_by_share_and_selection(self) -> None:
        names = fused_orders(("retrieval", "free+keep_first=2"), [0, 0.05, 0.05], ["query", "deviation"])
        assert names[:3] == ("retrieval+fused=0", "retrieval+fused=0.05:query", "retrieval+fused=0.05:deviation")
        assert len(names) == 6
        order = Order.parse(names[-1])
        assert (order.policy, order.guards) == ("free", {"keep_first": 2})
        assert order.fused == FusedReuse(0.05, "deviation")

    def test_normalised_scores_are_equation_11(self) -> None:
        f1 = {"retrieval": 80.0, "retrieval+fused=0": 20.0, "retrieval+fused=0.05:query": 65.0, "free+fused=0": 5.0}
        assert normalised_scores(f1) == {"retrieval+fused=0": 0, "retrieval+fused=0.05:query": 75}
        assert normalised_scores(f1 | {"retrieval": 20.5}) == {}
