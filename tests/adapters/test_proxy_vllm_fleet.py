"""`ragorder serve` for real vLLM servers: what two cache together, and what a killed one or a killed log costs."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from support.redis_server import SERVER, RedisServer
from support.sent_requests import CERTIFICATES, post
from support.serve_process import ServeProcess, launching
from support.streamed_answer import StreamedAnswer, stream
from support.waiting import eventually

from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.server import VLLMServer

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SYSTEM = {"role": "system", "content": "Answer from the documents."}
SUBJECTS, OF_SUBJECT, TOKENS = 8, 5, 120
BLOCK = 32
COMMAND = (sys.executable, "-c", "from ragorder.cli.serve import serve; serve()", "--port", "0")


@pytest.fixture(scope="module")
def texts(vllm_model: Path) -> list[str]:
    """Of about as many tokens each."""
    tokenizer = load_tokenizer(vllm_model)
    documents = make_workload("paper-shuf", 0, requests=1).documents[: SUBJECTS * OF_SUBJECT]
    return [tokenizer.decode(tokenizer.encode(each.text)[:TOKENS]) for each in documents]


@pytest.fixture
def proxy(vllm_model: Path) -> Iterator[Callable[..., ServeProcess]]:
    with launching(ServeProcess, *COMMAND, "--tokenizer", str(vllm_model), PYTHONPATH="") as launch:

        def make(*servers: VLLMServer, options: tuple[str, ...] = ()) -> ServeProcess:
            return launch(*(word for each in servers for word in ("--upstream", each.base_url)), *options)

        yield make


def body(texts: list[str], rng: random.Random, query: str, tokens: int = 1, **fields: Any) -> dict[str, Any]:
    """Three of the five documents on one subject."""
    first = OF_SUBJECT * rng.randrange(SUBJECTS)
    return asked(texts, rng.sample(range(first, first + OF_SUBJECT), 3), query, tokens, **fields)


def asked(texts: list[str], names: list[int], query: str, tokens: int = 1, **fields: Any) -> dict[str, Any]:
    tag = {"documents": [{"id": str(name), "text": texts[name]} for name in names], "query": query}
    options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"model": VLLMServer.model_name, "messages": [SYSTEM], "ragorder": tag, **options, **fields}


def test_two_servers_cache_together_what_one_with_the_capacity_of_both_would(
    vllm_model: Path, texts: list[str], proxy: Callable[..., ServeProcess]
) -> None:
    """The goal: 0.95 of one server's cached tokens."""
    # All documents are more than one of the two holds.
    blocks = int(0.86 * SUBJECTS * OF_SUBJECT * TOKENS) // BLOCK

    def cached(*sizes: int) -> int:
        servers = [VLLMServer(vllm_model, blocks=size, block_size=BLOCK) for size in sizes]
        rng, count = random.Random(0), 0
        try:
            for server in servers:
                server.start()
            url = proxy(*servers).url
            for number in range(80):
                answer = post(url, body(texts, rng, str(number)))
                assert answer.status_code == 200, answer.text
                details = answer.json()["usage"]["prompt_tokens_details"] or {}
                count += details.get("cached_tokens") or 0
        finally:
            for server in servers:
                server.stop()
        return count

    whole = cached(2 * blocks)
    assert whole > 0
    assert cached(blocks, blocks) >= 0.95 * whole


def test_a_killed_server_loses_no_request_that_had_not_begun_to_answer(
    vllm_model: Path, texts: list[str], proxy: Callable[..., ServeProcess]
) -> None:
    """Each computes two requests at a time: the others wait for their first token."""
    # Room for answers so long that none ends before the kill, on a busy machine either.
    servers = [
        VLLMServer(vllm_model, blocks=256, block_size=BLOCK, max_model_len=4096, max_num_seqs=2) for _ in range(2)
    ]
    rng = random.Random(1)
    long, short = [[StreamedAnswer() for _ in range(count)] for count in (4, 8)]
    try:
        for server in servers:
            server.start()
        url = proxy(*servers).url

        def in_flight() -> list[int]:
            with httpx2.Client(trust_env=False, timeout=60, verify=CERTIFICATES) as client:
                return [each["in_flight"] for each in client.get(f"{url}/ragorder/replicas").json()["replicas"]]

        with ThreadPoolExecutor(12) as pool:
            sent = [
                pool.submit(stream, url, body(texts, rng, f"long {number}", 3500), each, 300)
                for number, each in enumerate(long)
            ]
            began = eventually(lambda: all(each.began.is_set() for each in long) or any(map(Future.done, sent)), 120)
            assert began and not any(map(Future.done, sent)), long
            sent += [
                pool.submit(stream, url, body(texts, rng, f"short {number}", 4), each, 300)
                for number, each in enumerate(short)
            ]
            assert eventually(lambda: sum(in_flight()) == 12), [*long, *short]
            assert in_flight()[0] > 2
            servers[0].kill()
        for each in sent:
            each.result()
    finally:
        for server in servers:
            server.stop()
    lost, kept = [[each for each in long if each.replica == replica] for replica in "01"]
    assert lost and kept
    assert all(each.text and each.broke and not each.done for each in lost), lost
    assert [(each.done, each.error, each.broke) for each in kept] == [(True, None, False)] * len(kept)
    assert [(each.status, each.replica, each.done, each.error) for each in short] == [(200, "1", True, None)] * 8


@pytest.mark.skipif(SERVER is None, reason="needs valkey-server or redis-server: make installs it")
def test_a_killed_log_of_orders_loses_no_request_and_is_taken_up_again(
    vllm_model: Path, texts: list[str], proxy: Callable[..., ServeProcess], tmp_path: Path
) -> None:
    pytest.importorskip("redis")
    log, server = RedisServer(tmp_path), VLLMServer(vllm_model, blocks=256, block_size=BLOCK)
    rng = random.Random(2)
    numbers = iter(range(1000))
    try:
        log.start()
        server.start()
        urls = [proxy(server, options=("--shared-orders", log.url)).url for _ in range(2)]

        def is_told() -> bool:
            """Whether a proxy puts documents that only the other has served into the other's order, and finds them."""
            names = rng.sample(range(len(texts)), 3)
            post(urls[0], asked(texts, names, f"{next(numbers)}"))
            time.sleep(0.2)
            answer = post(urls[1], asked(texts, names[::-1], f"{next(numbers)}"))
            details = answer.json()["usage"]["prompt_tokens_details"] or {}
            predicted = int(answer.headers["x-ragorder-predicted-cached-tokens"])
            return min(predicted, details.get("cached_tokens") or 0) > 2 * TOKENS

        assert eventually(is_told)
        streams = [StreamedAnswer() for _ in range(4)]
        with ThreadPoolExecutor(12) as pool:
            for number, each in enumerate(streams):
                pool.submit(stream, urls[number % 2], body(texts, rng, f"long {number}", 400), each)
            assert all(each.began.wait(120) for each in streams)
            log.kill()
            assert not is_told()
            sent = [body(texts, rng, f"lost {number}") for number in range(8)]
            answers = [pool.submit(post, urls[number % 2], each) for number, each in enumerate(sent)]
        assert [(each.status, each.done, each.error, each.broke) for each in streams] == [(200, True, None, False)] * 4
        assert [each.result().status_code for each in answers] == [200] * 8
        log.start()
        assert eventually(is_told)
    finally:
        server.stop()
        log.client.close()
        log.kill()
