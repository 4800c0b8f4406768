"""docs/claims.toml: what README and docs/ claim is what the committed results say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.claims import CLAIMS, Bound, Claim, bounds, claims, numbers, page, problems, unproved

ROOT = CLAIMS.parents[1]
EVERY = claims()
READ = sorted({(claim.data, claim.suite, claim.slow) for claim in EVERY})


def text_of(name: str) -> str:
    return ((ROOT if name == "README.md" else ROOT / "docs") / name).read_text("utf-8")


def results_of_the_readme() -> list[str]:
    """Figures of the table, and those with a unit anywhere outside of code."""
    prose = re.sub(r"```.*?```|`[^`]*`", "", text_of("README.md"), flags=re.DOTALL)
    table = prose[prose.index("## Results") : prose.index("## Further")]
    rows = [line.split("|")[2:-1] for line in table.splitlines() if line.startswith("|")][2:]
    named = re.findall(r"[−-]?[\d.,]+ (?:%|ms|µs|points|times)(?! interval)", prose)
    return [field for row in rows for field in row] + named


class TestReadme:
    def test_each_number_is_a_claim(self) -> None:
        known = {number for claim in EVERY if "README.md" in claim.pages for number in numbers(claim.words)}
        said = {number for field in results_of_the_readme() for number in numbers(field)}
        assert len(said) > 30
        # A change stands there with its sign, or as "1.74 times sooner".
        assert {number for number in said if number not in known} == set()

    def test_numbers_are_read_with_their_signs(self) -> None:
        assert numbers("−28 % [−41, +3], 1,304 ms, p50, ov0.8") == [(-28, 0), (-41, 0), (3, 0), (1304, 0)]


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

    def test_a_bound_that_no_test_asserts_is_a_problem(self) -> None:
        true = bounds()[0]
        assert "there is no" in str(unproved(replace(true, test="tests/project/test_claims.py::test_nothing")))
        assert "does not assert" in str(unproved(replace(true, asserts=f"{true.asserts}9")))
        assert "is not in" in str(unproved(replace(true, figure="at least 12.5 %")))

    def test_the_page_is_what_the_file_says(self) -> None:
        assert text_of("claims.md") == page(EVERY)

    def test_each_folder_of_results_has_a_claim_or_a_reason(self) -> None:
        folders = {path.parent.name for path in (ROOT / "docs" / "results").glob("*/results.jsonl.xz")}
        claimed = {Path(claim.data).name for claim in EVERY}
        assert folders <= claimed, "a figure of these results belongs into docs/claims.toml"


@pytest.mark.merge
@pytest.mark.parametrize(
    ("data", "suite"),
    [pytest.param(data, suite, marks=pytest.mark.slow if slow else ()) for data, suite, slow in READ],
)
def test_the_data_say_the_same(data: str, suite: str) -> None:
    pytest.importorskip("scipy")
    wrong = [problem for claim in EVERY if (claim.data, claim.suite) == (data, suite) for problem in problems(claim)]
    assert wrong == []


@pytest.mark.merge
def test_another_number_is_a_problem() -> None:
    pytest.importorskip("scipy")
    (true,) = (claim for claim in EVERY if claim.figure == "492 → 354 ms")
    wrong = Claim(true.claim, "492 → 355 ms", true.pages, true.data, true.command, suite=true.suite, table=true.table,
                  entries=true.entries)  # fmt: skip
    assert any("355" in problem for problem in problems(wrong))
    assert any("decide nothing" in problem for problem in problems(wrong))
