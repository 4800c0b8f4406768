"""What a repository has beside code: workflows, forms, hooks, subjects of commits, the citation."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def parsed(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text("utf-8"))


class TestWorkflows:
    @pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
    def test_run_targets_of_the_makefile_on_the_lowest_python(self, path: Path) -> None:
        (job,) = parsed(str(path.relative_to(ROOT)))["jobs"].values()
        assert set(job["strategy"]["matrix"]["target"]) <= TARGETS
        assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"
        python = next(step["with"]["python-version"] for step in job["steps"] if "with" in step)
        assert PROJECT["requires-python"] == f">={python}"
        assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]

    def test_hooks_call_the_makefile(self) -> None:
        (repository,) = parsed(".pre-commit-config.yaml")["repos"]
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            command, target = hook["entry"].split()
            assert command == "make" and target in TARGETS


def test_subjects_of_recent_commits_are_short_and_begin_with_a_capital_letter() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs the git repository")
    said = [
        subprocess.run([git, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for command in (["rev-parse", "--is-shallow-repository"], ["log", "--no-merges", "-20", "--format=%s"])
    ]
    if said[0] == ["true"]:
        pytest.skip("a shallow clone may end with a merge that GitHub has named")
    assert said[1]
    assert [subject for subject in said[1] if len(subject) > 72 or not subject[0].isupper()] == []


class TestTheCitation:
    def test_is_of_this_package_and_its_five_papers(self) -> None:
        citation = parsed("CITATION.cff")
        assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])
        assert citation["version"] == PROJECT["version"] and citation["abstract"] == PROJECT["description"]
        assert [each["name"] for each in citation["authors"]] == [each["name"] for each in PROJECT["authors"]]
        papers = {each["title"].partition(":")[0] for each in citation["references"]}
        assert papers == {"RAGCache++", "RAGCache", "From Prefix Cache to Fusion RAG Cache", "HedraRAG", "RAGDoll"}

    def test_no_address_is_invented(self) -> None:
        """Until the repository's is told: those of the papers alone."""
        papers = {each["doi"] for each in parsed("CITATION.cff")["references"] if "doi" in each}
        assert {url.removeprefix("https://doi.org/") for url in PROJECT["urls"].values()} == papers
        assert not re.search(r"https?://", (ROOT / "SECURITY.md").read_text("utf-8"))


def test_the_tests_of_other_versions_exist() -> None:
    """They run in environments of their own, and in no ring."""
    script = (ROOT / "requirements" / "try.sh").read_text("utf-8").replace("\\\n", "")
    names = [name for line in re.findall(r"^    tests (.*?)(?: \$|$)", script, re.MULTILINE) for name in line.split()]
    assert len(names) > 20
    tests = ROOT / "tests"
    assert not [name for name in names if not [*tests.glob(f"*/test_{name}.py"), *tests.glob(f"*/{name}/")]]
