"""One proxy for real engines, in processes that are killed: what they have cached together, and what is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from support.replicas import OF_SUBJECT, SUBJECTS, SYSTEM, Asked
from support.serve_process import ServeProcess, launching

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.adapters.proxy import Fleet, ReplicaAddress, make_app
from ragorder.kernels.random_model import make_model

pytestmark = pytest.mark.slow

TEXTS = {
    f"d{number}": f"document {number} is about {number * 7919 % 1000}. " * 8 for number in range(SUBJECTS * OF_SUBJECT)
}
COMMAND = (sys.executable, "-c", "from ragorder.cli import main; main()", "engine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [*TEXTS.values(), SYSTEM["content"], "Question: 0123456789?"]
    folder = tmp_path_factory.mktemp("models") / "fleet"
    return make_model(folder, texts=texts, layers=2, hidden_size=64, vocab_size=600, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def launch(model: Path) -> Iterator[Callable[..., ServeProcess]]:
    """Starts embedded engines with this many tokens of KV, and no other tier."""
    options = ["--model", str(model), "--port", "0", "--profile", "none", "--dtype", "float32", "--policy", "lru"]
    with launching(ServeProcess, *COMMAND, *options, "--host-bytes", "0", OMP_NUM_THREADS="1") as launch:
        yield lambda tokens, *more: launch("--device-tokens", str(tokens), *more)


@pytest.fixture
def front(serve: Callable[[Any], str], tokenizer: Any) -> Callable[..., str]:
    """A proxy that orders for these engines, each with this many tokens of KV."""

    def front(*engines: ServeProcess, tokens: int = 8192) -> str:
        options = {"capacity_tokens": tokens, "block_size": 16}
        fleet = Fleet([ReplicaAddress(each.url, Orderer(**options)) for each in engines], check_s=0.2)
        builder = PromptBuilder("", tokenizer=tokenizer)
        return serve(
            make_app(Orderer(**options), upstream=fleet, builder=builder, tokenizer=tokenizer, send_facts=True)
        )

    return front


@pytest.fixture
def asked(model: Path) -> Asked:
    return Asked(str(model), TEXTS)


def test_two_engines_cache_together_what_one_with_the_capacity_of_both_would(
    launch: Callable[..., ServeProcess], front: Callable[..., str], asked: Asked, tokenizer: Any
) -> None:
    """The goal: 0.95 of one engine's cached tokens."""
    # All documents are more than one of the two engines holds.
    tokens = int(0.86 * sum(len(tokenizer.encode(text)) for text in TEXTS.values()))
    whole = asked.cached_tokens(front(launch(2 * tokens), tokens=2 * tokens))
    assert whole > 0
    assert asked.cached_tokens(front(launch(tokens), launch(tokens), tokens=tokens)) >= 0.95 * whole


def test_a_killed_engine_loses_no_request_that_had_not_begun_to_answer(
    launch: Callable[..., ServeProcess], front: Callable[..., str], asked: Asked
) -> None:
    engines = [launch(8192, "--max-requests", "2") for _ in range(2)]
    lost = asked.check_that_a_killed_engine_loses_only_begun_answers(
        front(*engines), engines[0].popen.kill, answer_tokens=800, timeout_s=60
    )
    assert any(each.error is not None for each in lost)
