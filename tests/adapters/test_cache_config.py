"""What a vLLM server says of its cache: its /metrics, read in every version, and what is said where they do not say."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from email.message import Message
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faulty_server import BLOCK, gauge, page
from support.http_server import PageServer
from support.rings import length

from ragorder.adapters.vllm.cache_config import CacheConfig, ServerError, read_cache_config

pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")


class Metrics(PageServer):
    """Answers everybody alike, and keeps what was asked for, and with which headers."""

    def __init__(self) -> None:
        super().__init__(self.shown)
        self.status = 200
        self.content: str | bytes = page()
        self.asked: list[tuple[str, Message]] = []

    def shown(self, path: str, headers: Message) -> tuple[int, str | bytes]:
        self.asked.append((path, headers))
        return self.status, self.content


@pytest.fixture
def fake() -> Iterator[Metrics]:
    with Metrics() as server:
        yield server


def sized(num_gpu_blocks: int, *engines: int) -> list[dict[str, Any]]:
    """Labels of engines with so many blocks each."""
    return [
        {"engine": number, "num_gpu_blocks": num_gpu_blocks, "kv_cache_size_tokens": blocks * BLOCK}
        for number, blocks in enumerate(engines)
    ]


ALL = 10_000 * BLOCK
# Labels, and the configuration.
GAUGES: dict[str, tuple[list[dict[str, Any]], CacheConfig]] = {
    "without the null block": (sized(129, 129), CacheConfig(BLOCK, 128 * BLOCK, True, 1)),
    # As vLLM 0.32 says it with --data-parallel-size 2 and 129 blocks in each engine: the sum of both.
    "one engine of two": (sized(258, 129, 129), CacheConfig(BLOCK, 128 * BLOCK, True, 2)),
    "the smallest engine": (sized(140, 90, 50), CacheConfig(BLOCK, 50 * BLOCK, True, 2)),
    "two processes": ([{"concurrency": "2.0"}, {"concurrency": "2.1"}], CacheConfig(BLOCK, ALL, True, 1)),
    "blocks over GPUs": (
        [{"effective_attention_block_size": 64, "num_gpu_blocks": 101, "kv_cache_size_tokens": None}],
        CacheConfig(64, 100 * 64, True, 1),
    ),
    "a block for each kind of layer": ([{"kv_cache_size_tokens": 5000}], CacheConfig(BLOCK, 5000, True, 1)),
    "an older version": (
        [dict.fromkeys(("effective_attention_block_size", "kv_cache_size_tokens", "engine", "hash_block_size"))],
        CacheConfig(BLOCK, ALL, True, 1),
    ),
    "off": ([{"enable_prefix_caching": "False"}], CacheConfig(BLOCK, ALL, False, 1)),
    "undecided": ([{"enable_prefix_caching": "None"}], CacheConfig(BLOCK, ALL, None, 1)),
    "unsaid": ([{"enable_prefix_caching": None}], CacheConfig(BLOCK, ALL, None, 1)),
}


class TestWhatAServerSaysOfItsCache:
    @pytest.mark.parametrize(
        ("end", "path"),
        [*((end, "") for end in ("", "/", "/v1", "/v1/", "?key=1")), ("/llm/v1", "/llm")],
    )
    def test_is_found_however_its_address_is_written(self, fake: Metrics, end: str, path: str) -> None:
        assert read_cache_config(fake.base_url + end) == CacheConfig(BLOCK, 10_000 * BLOCK, True, 1)
        assert [path for path, _ in fake.asked] == [f"{path}/metrics"]

    @pytest.mark.parametrize("name", GAUGES)
    def test_is_read_from_metrics(self, fake: Metrics, name: str) -> None:
        labels, config = GAUGES[name]
        fake.content = page(*(gauge(**each) for each in labels))
        assert read_cache_config(fake.base_url) == config

    def test_is_asked_for_with_the_key_or_the_user_of_the_address(self, fake: Metrics) -> None:
        read_cache_config(fake.base_url.replace("//", "//me:secret@"))
        read_cache_config(fake.base_url, api_key="key\n")
        assert [headers["Authorization"] for _, headers in fake.asked] == ["Basic bWU6c2VjcmV0", "Bearer key"]


class TestAServerThatDoesNotSay:
    def complaint(self, server: Metrics, **options: Any) -> str:
        with pytest.raises(ServerError) as caught:
            read_cache_config(server.base_url.replace("//", "//me:secret@"), **options)
        assert server.base_url in str(caught.value)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_because_it_hangs_or_is_gone(self, fake: Metrics) -> None:
        fake.page = lambda *_: (200, time.sleep(1) or "")
        assert "within 0.2 s" in self.complaint(fake, timeout_s=0.2)
        fake.stop()
        assert "check host and port" in self.complaint(fake)

    @pytest.mark.parametrize(
        ("status", "said"),
        [(401, "RAGORDER_API_KEY"), (403, "RAGORDER_API_KEY"), (404, "capacity_tokens"), (503, "HTTP 503")],
    )
    def test_because_of_a_status(self, fake: Metrics, status: int, said: str) -> None:
        fake.status = status
        assert said in self.complaint(fake)

    @pytest.mark.parametrize(
        ("metrics", "said"),
        [
            (b"python_info 1.0\n", "--disable-log-stats"),
            (b"sglang:num_running_reqs 0.0\n", "SGLang"),
            (b"vllm:num_requests_running 0.0\n", "version"),
            (page(gauge(num_gpu_blocks=1)).encode(), "--kv-cache-memory-bytes"),
            (b"vllm:cache_config_info{block", "capacity_tokens"),
            (b"vllm:cache_config_info{} x\n", "capacity_tokens"),
            (b"\xff\x00", "capacity_tokens"),
        ],
        ids=["no metrics of vLLM", "SGLang", "another version", "no blocks", "cut", "no number", "bytes"],
    )
    def test_because_of_its_metrics(self, fake: Metrics, metrics: bytes, said: str) -> None:
        fake.content = metrics
        assert said in self.complaint(fake)

    @pytest.mark.parametrize("value", ["None", "", "0", "-1", "1e9", "9" * 5000, None])
    @pytest.mark.parametrize("label", ["num_gpu_blocks", "block_size"])
    def test_because_a_size_is_not_set_yet(self, fake: Metrics, label: str, value: str | None) -> None:
        fake.content = page(gauge(**{"effective_attention_block_size": "None", label: value}))
        assert label in self.complaint(fake)

    @pytest.mark.parametrize(
        ("pieces", "timeout_s", "said"),
        [
            ([b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", *[b"#"] * 100], 0.3, "within"),
            ([b"SSH-2.0-OpenSSH\r\n"], 5.0, "no answer in HTTP .*check the port, and http or https"),
        ],
        ids=["never ends", "not HTTP"],
    )
    def test_because_of_what_it_sends(self, pieces: list[bytes], timeout_s: float, said: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def send() -> None:
                client, _ = listener.accept()
                with client, suppress(OSError):
                    for piece in pieces:
                        client.sendall(piece)
                        time.sleep(0.05)

            Thread(target=send, daemon=True).start()
            with pytest.raises(ServerError, match=said):
                read_cache_config(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=timeout_s)

    def test_is_always_an_error_of_the_server(self, fake: Metrics) -> None:
        labels = st.dictionaries(st.sampled_from(["block_size", "num_gpu_blocks", "engine"]), st.text())

        @settings(max_examples=length(50, 10))
        @given(labels, st.text())
        def read(values: dict[str, str], tail: str) -> None:
            fake.content = page(gauge(**values) + tail).encode("utf-8", "replace")
            try:
                assert read_cache_config(fake.base_url).capacity_tokens > 0
            except ServerError as error:
                assert fake.base_url in str(error)

        read()
