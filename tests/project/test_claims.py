"""docs/claims.toml: what README and docs/ claim is what the committed results say."""

from __future__ import annotations

import json
import lzma
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from support.claims import CLAIMS, Bound, Claim, bounds, claims, numbers, page, problems, rounds, unproved
from support.doc_tables import Source, declared, doc_tables, every_table, sources, wrong_numbers

ROOT = CLAIMS.parents[1]
EVERY = claims()
READ = sorted({(claim.data, claim.suite) for claim in EVERY})


def text_of(name: str) -> str:
    return ((ROOT if name == "README.md" else ROOT / "docs") / name).read_text("utf-8")


def runs_of(folder: str) -> Iterator[dict[str, Any]]:
    """The runs in a folder of results."""
    with lzma.open(ROOT / "docs" / "results" / folder / "results.jsonl.xz", "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def results_of_the_readme() -> list[str]:
    """Figures of the table, and those with a unit anywhere outside of code."""
    prose = re.sub(r"```.*?```|`[^`]*`", "", text_of("README.md"), flags=re.DOTALL)
    table = prose[prose.index("## Results") : prose.index("| | versions |")]
    rows = [line.split("|")[3:-1] for line in table.splitlines() if line.startswith("|")][2:]
    named = re.findall(r"[−-]?[\d.,]+ (?:%|ms|µs|points|times)(?! interval)", prose)
    return [field for row in rows for field in row] + named


class TestReadme:
    def test_each_number_is_a_claim(self) -> None:
        known = {number for claim in EVERY if "README.md" in claim.pages for number in numbers(claim.words)}
        said = {number for field in results_of_the_readme() for number in numbers(field)}
        assert len(said) > 30
        # A change stands there with its sign, or as "1.74 times sooner".
        assert {number for number in said if number not in known} == set()


class TestPages:
    @pytest.mark.parametrize("claim", EVERY, ids=lambda claim: claim.claim)
    def test_each_claim_stands_where_it_says(self, claim: Claim) -> None:
        for name in claim.pages:
            there = {abs(value) for value, _ in numbers(text_of(name))}
            wanted = numbers(claim.words if name == "results.md" else claim.figure)
            assert {value for value, _ in wanted if abs(value) not in there} == set(), name

    @pytest.mark.parametrize("bound", bounds(), ids=lambda bound: bound.claim)
    def test_each_bound_is_asserted_and_stands_where_it_says(self, bound: Bound) -> None:
        assert unproved(bound) is None
        for name in bound.pages:
            there = {abs(value) for value, _ in numbers(text_of(name))}
            assert {value for value, _ in numbers(bound.figure) if value not in there} == set(), name

    def test_the_page_is_what_the_file_says(self) -> None:
        assert text_of("claims.md") == page(EVERY)

    def test_each_folder_of_results_has_a_claim_or_a_reason(self) -> None:
        folders = {path.parent.name for path in (ROOT / "docs" / "results").glob("*/results.jsonl.xz")}
        claimed = {Path(claim.data).name for claim in EVERY}
        claimed |= {Path(data).name for entry in sources() for data in entry.data}
        assert folders <= claimed, "a table or a claim of docs/claims.toml is read from each"


class TestTables:
    def test_each_table_with_numbers_and_no_other_is_declared_once(self) -> None:
        pairs, wrong = declared(every_table(), sources())
        assert wrong == []
        assert len(pairs) == len(sources()) > 70

    @pytest.mark.parametrize(
        "entry", [each for each in sources() if each.data], ids=lambda entry: f"{entry.page} {entry.heading[:30]}"
    )
    def test_numbers_stand_together_in_the_data(self, entry: Source) -> None:
        (table,) = (table for table, its in declared(every_table(), [entry])[0].items() if its is entry)
        assert wrong_numbers(table, entry) == []

    def test_most_changes_of_a_last_digit_are_found_in_any_table(self) -> None:
        found = []
        for table, entry in declared(every_table(), sources())[0].items():
            for at, row in enumerate(table.rows if entry.data else ()):
                cell = re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), row[1])
                rows = (*table.rows[:at], (row[0], cell, *row[2:]), *table.rows[at + 1 :])
                if cell != row[1] and table.headings[1] not in entry.besides:
                    found.append(wrong_numbers(replace(table, rows=rows), entry) != [])
        assert len(found) > 200
        assert sum(found) / len(found) > 0.75, sum(found) / len(found)

    def test_ranges_of_workflows_are_those_of_the_report(self) -> None:
        """Least and most of 105 quotients of means, which stand in the report one by one."""
        under_load = text_of("results/hedra/report.md").split("\n## Workflows under load")[1].split("\n## ")[0]
        quotients: dict[str, list[float]] = defaultdict(list)
        for table in doc_tables(under_load.replace("\u00a0", " "), "hedra"):
            if table.title.startswith("Mean latency, s:"):
                ms = {name: [numbers(cell)[0][0] for cell in cells] for name, *cells in table.rows}
                for name, means in ms.items():
                    quotients[name] += [mean / ours for mean, ours in zip(means, ms["ours"], strict=True)]
        (table,) = (
            each for each in every_table() if each.page == "workflows.md" and each.headings == ("", "ours", "paper")
        )
        policies = [
            ["whole searches batched (FlashRAG)"],
            ["batches stage by stage (LangChain)"],
            ["Algorithm 2 alone (RAGCache)", "local cache alone (RaLMSpec)"],
            ["whole searches batched, dealt to all cores"],
        ]
        for (_, ours, _), names in zip(table.rows[:4], policies, strict=True):
            found = [value for name in names for value in (min(quotients[name]), max(quotients[name]))]
            found += [median(quotients[names[0]])] * ("median" in ours)
            said = numbers(ours)
            assert len(said) == len(found) and {len(quotients[name]) for name in names} == {105}
            assert all(rounds(value, *each) for value, each in zip(found, said, strict=True)), (ours, found)

    def test_cached_tokens_after_a_failure_are_those_of_the_results(self) -> None:
        """Of the 20 requests after the device has lost its KV, which no report adds up."""
        found = {}
        for run in runs_of("embedded-recovery"):
            if run["type"] == "embedded" and "pgdsf" in run["policy"]:
                after = slice(run["warmup"], run["warmup"] + 20)
                cached = sum(sum(run["rows"][tier][after]) for tier in ("device", "host", "disk"))
                replicas = int(run["policy"].partition("pgdsf, ")[2].split()[0]) if "replicas" in run["policy"] else 0
                found[str(replicas)] = (cached, sum(run["rows"]["prompt_tokens"][after]))
        (table,) = (each for each in every_table() if each.page == "embedded.md" and each.head.startswith("| replicas"))
        assert {number: numbers(cell)[0][0] for number, cell in table.rows} == {
            number: cached for number, (cached, _) in found.items()
        }
        assert {numbers(table.head)[0][0]} == {tokens for _, tokens in found.values()}

    def test_prefill_by_that_of_lru_is_what_the_results_say(self) -> None:
        """Columns of tiers.md whose quotients no report has."""
        means: dict[tuple[str, bool, int, str], list[float]] = defaultdict(list)
        for run in runs_of("tiers-forecast"):
            if run["type"] == "replacement":
                cell = run["cell"]
                trace, follows = cell.get("corpus") or cell["workload"], "follow" in cell
                waiting = cell.get("waiting", 0) if follows else -1
                key = (trace, cell.get("ordered", False), waiting, run["policy"].partition("+")[0])
                means[key].append(fmean(run["rows"]["prefill_ms"][run["warmup"] :]))
        (table,) = (each for each in every_table() if each.page == "tiers.md" and "`forecast`, events" in each.head)
        for trace, *cells in table.rows:
            ms = {key[1:]: fmean(each) for key, each in means.items() if key[0] == trace}
            found = [
                ms[True, -1, "pgdsf"] / ms[True, -1, "lru"],
                ms[True, 32, "lru"] / ms[True, 0, "lru"],
                ms[False, -1, "forecast"] / ms[False, -1, "lru"],
                ms[False, -1, "pgdsf"] / ms[False, -1, "lru"],
            ]
            said = [number for cell in (cells[1], *cells[6:]) for number in numbers(cell)]
            assert [rounds(*each) for each in zip(found, *zip(*said, strict=True), strict=True)] == [True] * 4, trace


@pytest.mark.slow
@pytest.mark.parametrize(("data", "suite"), READ)
def test_the_data_say_the_same(data: str, suite: str) -> None:
    pytest.importorskip("scipy")
    wrong = [problem for claim in EVERY if (claim.data, claim.suite) == (data, suite) for problem in problems(claim)]
    assert wrong == []


@pytest.mark.merge
def test_another_number_is_a_problem() -> None:
    pytest.importorskip("scipy")
    (true,) = (claim for claim in EVERY if claim.figure == "840 → 615 ms")
    assert any("616" in problem for problem in problems(replace(true, figure="840 → 616 ms")))
    assert any("kind is" in problem for problem in problems(replace(true, kind="")))
    (undecided,) = (claim for claim in EVERY if claim.figure == "1.00 times")
    assert any("decide nothing" in problem for problem in problems(replace(undecided, interval="[0.97, 1.02]")))
