"""Suites as they are declared: their cells, parameters and short forms, and the workloads that they name."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from support.harness import QUALITY, SHORTENED, SUITE, invoke, run, suite, write_corpus
from support.results import result_lines

from ragorder.eval.data.workloads import make_workload
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.session import Outcome
from ragorder.eval.running.specs import Bench
from ragorder.eval.running.suite import GROUPS, choose_suites, load_suites

PAPERS = Path(__file__).resolve().parents[3] / "shared" / "papers"


class TestSuites:
    def test_there_is_one_for_every_table_and_figure(self) -> None:
        names = {
            *(f"table-{number}" for number in range(1, 11)),
            *("figure-2", "figure-3", "pressure", "ragcache-figure-22"),
            *("corpora", "skew", "queue", "guards", "staleness", "position"),
        }
        assert names <= set(load_suites())

    def test_groups_are_those_of_the_papers_and_ours(self) -> None:
        groups = {group: {each.name for each in choose_suites([group])} for group in GROUPS}
        assert groups.pop("all") == set(load_suites()) == set().union(*groups.values())
        assert sum(map(len, groups.values())) == len(load_suites())
        assert {"table-1", "pressure"} <= groups["ragcache++"] and "guards" in groups["ours"]
        assert "doll-live" in groups["ragdoll"]

    def test_those_of_the_paper_bring_its_numbers_and_table_2_has_guarded_orders(self) -> None:
        suites = load_suites()
        assert [each.name for each in suites.values() if each.from_paper and not each.paper] == []
        guarded = {policy for policy in suites["table-2"].policies if "+" in policy}
        assert guarded == {"free+keep_first=2", "free+keep_last=2", "free+state_ranking"}

    @pytest.mark.skipif(not PAPERS.exists(), reason="the paper lies outside the project")
    @pytest.mark.parametrize("name", [each.name for each in load_suites().values() if each.from_paper])
    def test_every_number_of_the_papers_is_in_the_paper(self, name: str) -> None:
        paper = PAPERS / ("ragcache.txt" if name.startswith("ragcache-") else "ragcache_pp.txt")
        known = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", paper.read_text("utf-8"))}
        for row in load_suites()[name].paper:
            numbers = [value for value in row.figures.values() if isinstance(value, int | float)]
            assert numbers
            assert {abs(number) for number in numbers} <= known

    def test_cells_are_the_product_of_what_is_swept_and_of_each_extra(self) -> None:
        text = SUITE + '\n[[extra]]\nworkload = ["geo"]\nbatch = [true]\n'
        assert [cell.fields for cell in suite(text).cells] == [
            {"workload": "paper-shuf", "capacity_tokens": 20_000},
            {"workload": "geo", "capacity_tokens": 20_000},
            {"workload": "geo", "capacity_tokens": 20_000, "batch": True},
        ]

    @pytest.mark.parametrize(
        ("text", "old", "new", "said"),
        [
            (SUITE, "title =", "titel =", "titel: unknown field"),
            (SUITE, 'title = "A suite"', "", "title: Field required"),
            (SUITE, '"free"]', '"atuo"]', "policies: unknown policy 'atuo'"),
            (SUITE, '"free"]', '"retrieval"]', "policies: the same policy twice"),
            (SUITE, 'baseline = "retrieval"', 'baseline = "sorted"', "baseline: 'sorted' is not among the policies"),
            (SUITE, "requests = 30", "requests = 0", "requests: "),
            (SUITE, "= 20_000", '= "5 tokens"', "capacity_tokens: '5 tokens' is no capacity"),
            (SUITE, "capacity_tokens = 20_000", "capacity = 20_000", "capacity: unknown field"),
            (SUITE, "capacity_tokens = 20_000", 'guards = "keep_frist=1"', "unknown guard 'keep_frist=1'"),
            (SUITE, "capacity_tokens = 20_000", 'order = "random"', "order is that of a corpus' questions"),
            (SUITE, "capacity_tokens = 20_000", 'corpus = "pydocs"', "either a workload or a corpus"),
            (SUITE, "capacity_tokens = 20_000", 'workload = "geo"', r"workload: either in \[cell\] or in \[sweep\]"),
            (SUITE, '["paper-shuf", "geo"]', "[]", "sweep: workload has no value"),
            (SUITE, '["paper-shuf", "geo"]', '"geo"', r"sweep\.workload: "),
            (SUITE, 'chart = "strategies"', "", r"report\.chart: Field required"),
            (SUITE, "[report]", "[[paper]]\np50_ms = 1.0\n[report]", r"paper\.0: .*a policy or a label"),
            (SUITE, "[report]", "[report", "line"),
            (QUALITY, "top_k = 5", "topk = 5", r"cell \{.*topk = 5.*\}: topk: unknown field"),
            (QUALITY, "top_k = 5", "top_k = 0", "top_k: Input should be greater than or equal to 1"),
            (QUALITY, "top_k = 5", 'retriever = "colbert"', "retriever: Input should be 'bm25' or 'dense'"),
            (QUALITY, '["hotpotqa"]', '["squad"]', "dataset: Input should be 'hotpotqa', 'musique'"),
            (QUALITY, "keep_first=2", "keep_frist=2", "policies: unknown guard 'keep_frist=2'"),
            (SHORTENED, "requests = 10", "request = 10", r"reduced\.request: unknown field"),
            (SHORTENED, "requests = 10", "requests = 0", r"\[reduced\] requests: "),
            (
                SHORTENED,
                '"retrieval", "greedy"',
                '"greedy"',
                r"\[reduced\] baseline: 'retrieval' is not among the policies",
            ),
            (SHORTENED, "[4_000, 8_000]", '["5 tokens"]', r"\[reduced\]: cell \{"),
        ],
    )
    def test_a_mistake_is_named_with_file_and_field(self, text: str, old: str, new: str, said: str) -> None:
        assert old in text
        with pytest.raises(SuiteError, match=rf"^mine\.toml: (.|\n)*{said}"):
            suite(text.replace(old, new))

    def test_an_unknown_name_is_refused_with_the_known_ones(self) -> None:
        said = r"'tabel-1': did you mean 'table-1'. choose from table-1, .* ragdoll, ours, all"
        with pytest.raises(SuiteError, match=said):
            choose_suites(["tabel-1"])

    def test_one_of_ones_own_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "mine.toml").write_text(SUITE)
        (mine,) = choose_suites([str(tmp_path / "mine.toml")])
        assert (mine.name, mine.from_paper) == ("mine", False)
        with pytest.raises(SuiteError, match=r"nowhere.toml: cannot be read"):
            choose_suites(["nowhere.toml"])


class TestParametersOfACommand:
    def test_replace_the_suites_own(self) -> None:
        changed = suite().with_parameters(["capacity_tokens=10k,unlimited", "workload=zipf10"])
        assert changed.points == [{"workload": "zipf10", "capacity_tokens": tokens} for tokens in (10_000, None)]

    def test_replace_those_of_its_short_form(self) -> None:
        short = suite(SHORTENED).with_parameters(["workload=geo", "capacity_tokens=5%"]).short_form
        assert short is not None and short.points == [{"workload": "geo", "capacity_tokens": "5%"}]

    def test_replace_those_of_further_cells(self) -> None:
        text = 'extra = [{ waiting = [8], workload = ["paper"] }]' + SUITE.replace("capacity_tokens = 20_000\n", "")
        changed = suite(text).with_parameters(["waiting=1", "top_k=2,3"])
        assert changed.points == [
            *({"waiting": 1, "workload": name, "top_k": k} for name in ("paper-shuf", "geo") for k in (2, 3)),
            *({"waiting": 1, "workload": "paper", "top_k": k} for k in (2, 3)),
        ]

    def test_without_a_value_the_default_applies(self) -> None:
        changed = suite().with_parameters(["capacity_tokens=", "workload=geo"])
        assert changed.points == [{"workload": "geo"}]


class TestAShortForm:
    def test_overrides_what_it_names_and_keeps_the_rest(self) -> None:
        whole = suite(SHORTENED)
        short = whole.short_form
        assert (short.policies, short.requests, short.warmup) == (("retrieval", "greedy"), 10, whole.warmup)
        assert short.points == [{"workload": "unique", "capacity_tokens": tokens} for tokens in (4_000, 8_000)]
        assert (short.name, short.report, short.short_form) == (whole.name, whole.report, None)
        assert [each.capacity_tokens for each in whole.cells] == [20_000, 20_000]

    def test_is_run_where_it_is_asked_for_and_the_folder_says_so(self, tmp_path: Path) -> None:
        assert run(tmp_path, suite(SHORTENED), seeds=(0,), reduced=True) == Outcome(runs=4)
        assert {line["cell"]["capacity_tokens"] for line in result_lines(tmp_path, "run")} == {4_000, 8_000}
        assert {len(line["rows"]["cached_tokens"]) for line in result_lines(tmp_path, "run")} == {10}
        assert result_lines(tmp_path, "session")[0]["arguments"]["reduced"] is True

    def test_is_reported_as_missing_where_a_suite_has_none(self, tmp_path: Path) -> None:
        assert run(tmp_path, suite(), seeds=(0,), reduced=True) == Outcome(unavailable=2)
        reasons = {line["reason"] for line in result_lines(tmp_path, "unavailable")}
        assert reasons == {"has no short form: run it without --reduced"}

    def test_every_table_of_the_papers_has_one_that_needs_no_more_than_an_engine(self) -> None:
        paper = [each for each in load_suites().values() if each.from_paper and each.kind == "serve"]
        assert [each.name for each in paper if each.short_form is None] == []


class TestCorporaOfOnesOwn:
    def test_the_suite_corpora_takes_every_folder(self, tmp_path: Path) -> None:
        for name in ("mine", "covidqa"):
            write_corpus(tmp_path / "corpora" / name, top_k=5)
        (tmp_path / "corpora" / "notes").mkdir()
        options = ("--corpora", tmp_path / "corpora", "--limit", "4", "--policy", "retrieval", "--seeds", "0")
        done = invoke("run", "corpora", "-o", tmp_path / "out", *options)
        assert done.exit_code == 0, done.output
        assert {line["cell"]["corpus"] for line in result_lines(tmp_path / "out", "run")} >= {"mine", "covidqa"}

    def test_other_suites_keep_their_own(self) -> None:
        suites = load_suites()
        assert suites["corpora"].with_corpora(["mine", "covidqa"]).sweep["corpus"][-2:] == ("pydocs", "mine")
        assert [name for name, each in suites.items() if each.with_corpora(["mine"]) != each] == ["corpora"]


def overlaps(name: str, requests: int = 400) -> list[int]:
    """How many documents each request shares with the one before."""
    rankings = make_workload(name, 0, requests=requests).rankings[:requests]
    return [len({*one} & {*other}) for one, other in pairwise(rankings)]


class TestZeroOverlap:
    def test_of_the_papers_generator_is_none(self) -> None:
        """Within a burst one document is kept, and the others come from the same ten."""
        shared = overlaps("ov0.0")
        assert sum(count >= 1 for count in shared) == 360
        assert 1.5 < sum(shared) / len(shared) < 3

    @pytest.mark.parametrize("name", ["disjoint", "unique"])
    def test_is_true_of_disjoint_and_unique_requests_drawn_by_their_seed(self, name: str) -> None:
        assert set(overlaps(name)) == {0}
        one, again, other = (make_workload(name, seed).rankings for seed in (1, 1, 2))
        assert one == again != other
        assert all(len(set(ranking)) == 5 for ranking in one)

    @pytest.mark.parametrize("overlap", ["0.0", "0.2", "0.4", "0.6", "0.8"])
    def test_the_papers_sweep_keeps_documents_in_their_places_and_ours_does_not(self, overlap: str) -> None:
        kept = max(1, int(5 * float(overlap)))
        in_place, shuffled = (
            [sum(a == b for a, b in zip(one[:kept], other[:kept], strict=True)) for one, other in pairwise(rankings)]
            for rankings in (make_workload(f"ov{overlap}{end}", 0).rankings[:10] for end in ("-kept", ""))
        )
        assert set(in_place) == {kept}
        assert set(shuffled) != {kept}
        if overlap == "0.6":
            assert make_workload("ov0.6-kept", 0).rankings == make_workload("paper", 0).rankings

    def test_of_consecutive_requests_leaves_later_ones_to_share(self) -> None:
        rankings = make_workload("disjoint", 0).rankings
        assert any({*rankings[0]} & {*later} for later in rankings[1:])

    def test_of_all_requests_leaves_nothing_to_gain(self) -> None:
        (runs,) = run_traces(Bench(workloads=("unique",), policies=("retrieval", "greedy", "free"), limit=200))
        cached = {run.policy_name: set(run.columns().cached_tokens[1:]) for run in runs}
        assert cached == {"retrieval": {64}, "greedy": {64}, "free": {64}}

    def test_a_popularity_exponent_of_one_is_the_workload_of_the_notes(self) -> None:
        assert make_workload("zipf10-1.0", 3).rankings == make_workload("zipf10", 3).rankings
        flat, steep = (make_workload(f"zipf10-{exponent}", 3).rankings for exponent in ("0.4", "1.6"))
        assert len({d for ranking in flat for d in ranking}) > len({d for ranking in steep for d in ranking})
