"""One proxy for real engines, in processes that are killed: what they have cached together, and what is lost."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from support.sent_requests import get, post
from support.serve_process import ServeProcess, launching
from support.streamed_answer import StreamedAnswer, stream
from support.waiting import eventually

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.adapters.proxy import Fleet, ReplicaAddress, make_app
from ragorder.kernels.random_model import make_model

pytestmark = pytest.mark.slow

SYSTEM = {"role": "system", "content": "Answer from the documents."}
SUBJECTS, OF_SUBJECT = 8, 5
TEXTS = {
    f"d{number}": f"document {number} is about {number * 7919 % 1000}. " * 8 for number in range(SUBJECTS * OF_SUBJECT)
}
LONGEST = 2048
LONG_ANSWER = 800
COMMAND = (sys.executable, "-c", "from ragorder.cli import main; main()", "engine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [*TEXTS.values(), SYSTEM["content"], "Question: 0123456789?"]
    folder = tmp_path_factory.mktemp("models") / "fleet"
    return make_model(folder, texts=texts, layers=2, hidden_size=64, vocab_size=600, max_position_embeddings=LONGEST)


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
def body(model: Path) -> Callable[..., dict[str, Any]]:
    def body(names: Sequence[str], query: str = "?", tokens: int = 1, **fields: Any) -> dict[str, Any]:
        documents = [{"id": name, "text": TEXTS[name]} for name in names]
        tag = {"documents": documents, "query": query}
        options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"model": str(model), "messages": [SYSTEM], "ragorder": tag, **options, **fields}

    return body


def replicas(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(f"{url}/ragorder/replicas").json()["replicas"]
    return found


def drawn(rng: random.Random) -> list[str]:
    """Three of the five documents on one subject."""
    first = OF_SUBJECT * rng.randrange(SUBJECTS)
    return [f"d{number}" for number in rng.sample(range(first, first + OF_SUBJECT), 3)]


def test_two_engines_cache_together_what_one_with_the_capacity_of_both_would(
    launch: Callable[..., ServeProcess], front: Callable[..., str], body: Callable[..., dict[str, Any]], tokenizer: Any
) -> None:
    """The goal: 0.95 of one engine's cached tokens."""
    rng = random.Random(0)
    requests = [drawn(rng) for _ in range(80)]
    # All documents are more than one of the two engines holds.
    tokens = int(0.86 * sum(len(tokenizer.encode(text)) for text in TEXTS.values()))

    def cached(url: str) -> int:
        count = 0
        for number, names in enumerate(requests):
            answer = post(url, body(names, str(number)))
            assert answer.status_code == 200, answer.text
            count += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    whole = cached(front(launch(2 * tokens), tokens=2 * tokens))
    assert whole > 0
    assert cached(front(launch(tokens), launch(tokens), tokens=tokens)) >= 0.95 * whole


def test_a_killed_engine_loses_no_request_that_had_not_begun_to_answer(
    launch: Callable[..., ServeProcess], front: Callable[..., str], body: Callable[..., dict[str, Any]]
) -> None:
    """Each computes two requests at a time: the others wait for their first token."""
    engines = [launch(8192, "--max-requests", "2") for _ in range(2)]
    url = front(*engines)
    rng = random.Random(1)
    long, short = [[StreamedAnswer() for _ in range(count)] for count in (4, 12)]
    with ThreadPoolExecutor(24) as pool:
        for number, each in enumerate(long):
            pool.submit(stream, url, body(drawn(rng), f"long {number}", LONG_ANSWER), each)
        assert all(each.began.wait(60) for each in long)
        for number, each in enumerate(short):
            pool.submit(stream, url, body(drawn(rng), f"short {number}", 4), each)
        whole = [pool.submit(post, url, body(drawn(rng), f"whole {number}", 4)) for number in range(4)]
        assert eventually(lambda: sum(each["in_flight"] for each in replicas(url)) == 20)
        # More than it computes.
        assert replicas(url)[0]["in_flight"] > 2
        engines[0].popen.kill()
    lost = [each for each in long if each.replica == "0"]
    kept = [each for each in long if each.replica == "1"]
    assert lost and kept
    for each in lost:
        # What had come is not sent again, and does not look whole.
        assert each.text and not each.done and each.broke
        assert each.error is None or each.error["code"] == "upstream_unavailable"
    assert any(each.error is not None for each in lost)
    assert [(each.done, each.error, each.broke) for each in kept] == [(True, None, False)] * len(kept)
    assert [(each.status, each.replica, each.done, each.error) for each in short] == [(200, "1", True, None)] * 12
    assert [answer.result().status_code for answer in whole] == [200] * 4
    assert [each["in_flight"] for each in replicas(url)] == [0, 0]
