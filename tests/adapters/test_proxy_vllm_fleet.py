"""`ragorder serve` for real vLLM servers: what two cache together, and what a killed one or a killed log costs."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from support.redis_server import SERVER, RedisServer
from support.replicas import OF_SUBJECT, SUBJECTS, Asked
from support.sent_requests import post
from support.serve_process import ServeProcess, launching
from support.streamed_answer import StreamedAnswer, stream
from support.waiting import eventually

from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.server import VLLMServer

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

TOKENS = 120
BLOCK = 32
COMMAND = (sys.executable, "-c", "from ragorder.cli.serve import serve; serve()", "--port", "0")


@pytest.fixture(scope="module")
def asked(vllm_model: Path) -> Asked:
    """Of documents of about as many tokens each."""
    tokenizer = load_tokenizer(vllm_model)
    documents = make_workload("paper-shuf", 0, requests=1).documents[: SUBJECTS * OF_SUBJECT]
    texts = [tokenizer.decode(tokenizer.encode(each.text)[:TOKENS]) for each in documents]
    return Asked(VLLMServer.model_name, {str(number): text for number, text in enumerate(texts)})


@pytest.fixture
def proxy(vllm_model: Path) -> Iterator[Callable[..., ServeProcess]]:
    with launching(ServeProcess, *COMMAND, "--tokenizer", str(vllm_model), PYTHONPATH="") as launch:

        def make(*servers: VLLMServer, options: tuple[str, ...] = ()) -> ServeProcess:
            return launch(*(word for each in servers for word in ("--upstream", each.base_url)), *options)

        yield make


def test_two_servers_cache_together_what_one_with_the_capacity_of_both_would(
    vllm_model: Path, asked: Asked, proxy: Callable[..., ServeProcess]
) -> None:
    """The goal: 0.95 of one server's cached tokens."""
    # All documents are more than one of the two holds.
    blocks = int(0.86 * SUBJECTS * OF_SUBJECT * TOKENS) // BLOCK

    def cached(*sizes: int) -> int:
        servers = [VLLMServer(vllm_model, blocks=size, block_size=BLOCK) for size in sizes]
        try:
            for server in servers:
                server.start()
            return asked.cached_tokens(proxy(*servers).url)
        finally:
            for server in servers:
                server.stop()

    whole = cached(2 * blocks)
    assert whole > 0
    assert cached(blocks, blocks) >= 0.95 * whole


def test_a_killed_server_loses_no_request_that_had_not_begun_to_answer(
    vllm_model: Path, asked: Asked, proxy: Callable[..., ServeProcess]
) -> None:
    # Room for answers so long that none ends before the kill, on a busy machine either.
    servers = [
        VLLMServer(vllm_model, blocks=256, block_size=BLOCK, max_model_len=4096, max_num_seqs=2) for _ in range(2)
    ]
    try:
        for server in servers:
            server.start()
        asked.check_that_a_killed_engine_loses_only_begun_answers(
            proxy(*servers).url, servers[0].kill, answer_tokens=3500, timeout_s=300
        )
    finally:
        for server in servers:
            server.stop()


@pytest.mark.skipif(SERVER is None, reason="needs valkey-server or redis-server: make installs it")
def test_a_killed_log_of_orders_loses_no_request_and_is_taken_up_again(
    vllm_model: Path, asked: Asked, proxy: Callable[..., ServeProcess], tmp_path: Path
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
            names = rng.sample(list(asked.texts), 3)
            post(urls[0], asked.body(names, f"{next(numbers)}"))
            time.sleep(0.2)
            answer = post(urls[1], asked.body(names[::-1], f"{next(numbers)}"))
            details = answer.json()["usage"]["prompt_tokens_details"] or {}
            predicted = int(answer.headers["x-ragorder-predicted-cached-tokens"])
            return min(predicted, details.get("cached_tokens") or 0) > 2 * TOKENS

        assert eventually(is_told)
        streams = [StreamedAnswer() for _ in range(4)]
        with ThreadPoolExecutor(12) as pool:
            for number, each in enumerate(streams):
                pool.submit(stream, urls[number % 2], asked.body(asked.drawn(rng), f"long {number}", 400), each)
            assert all(each.began.wait(120) for each in streams)
            log.kill()
            assert not is_told()
            sent = [asked.body(asked.drawn(rng), f"lost {number}") for number in range(8)]
            answers = [pool.submit(post, urls[number % 2], each) for number, each in enumerate(sent)]
        assert [(each.status, each.done, each.error, each.broke) for each in streams] == [(200, True, None, False)] * 4
        assert [each.result().status_code for each in answers] == [200] * 8
        log.start()
        assert eventually(is_told)
    finally:
        server.stop()
        log.client.close()
        log.kill()
