"""A hybrid model on real vLLM: where its cache can be resumed, and what is predicted of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from ragorder import Document, Orderer
from ragorder.adapters.vllm.connect import hybrid_rules

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SYSTEM, QUESTION = 300, 40
RUN = Path(__file__).parents[1] / "support" / "hybrid_engine.py"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(RUN), str(tmp_path)]
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, text=True) as process,
    ):
        yield process
        process.kill()


def told(engine: subprocess.Popen[str], word: str) -> Any:
    assert engine.stdout is not None
    line = next((each for each in engine.stdout if each.startswith(f"{word} ")), None)
    assert line is not None, Path(str(engine.args[-1]), "log").read_text()[-3000:]  # type: ignore[index]
    return json.loads(line.removeprefix(f"{word} "))


def serve(engine: subprocess.Popen[str], prompts: Sequence[Sequence[int]]) -> Any:
    assert engine.stdin is not None
    json.dump(prompts, engine.stdin)
    engine.stdin.close()
    return told(engine, "FOUND")


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_predictions_are_what_the_engine_reports(engine: subprocess.Popen[str]) -> None:
    block = told(engine, "BLOCK")
    rng = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(tokens)]

    system = text(SYSTEM)
    texts = {f"d{number}": text(rng.randrange(200, 900)) for number in range(12)}
    documents = [Document(name, name, tokens=len(ids)) for name, ids in texts.items()]
    orderer = Orderer.for_rules(
        hybrid_rules(block), prefix_tokens=SYSTEM, suffix_tokens=QUESTION, feedback=False, strict=True
    )
    prompts, predicted = [], []
    for number in range(80):
        asked = rng.sample(documents[: 5 + number // 10], 4)
        ordering = orderer.order(asked)
        ids = [token for document in ordering.documents for token in texts[document.id]]
        prompts.append([*system, *ids, *text(QUESTION)])
        predicted.append(ordering.cached_tokens)
        ordering.confirm()
    found = serve(engine, prompts)
    assert (found["block_size"], found["mode"]) == (block, "align")
    right = sum(one == other for one, other in zip(predicted, found["cached"], strict=True))
    assert right >= 0.97 * len(prompts), list(zip(predicted, found["cached"], strict=True))
    # A cache that resumes at any block would have found more.
    blocks = [
        max((common(ids, other) // block * block for other in prompts[:number]), default=0)
        for number, ids in enumerate(prompts)
    ]
    assert sum(found["cached"]) < 0.9 * sum(blocks)
    assert sum(found["cached"]) > 0.2 * sum(map(len, prompts))
