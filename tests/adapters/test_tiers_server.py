"""Tiers in a real vLLM server: over HTTP, its engine in a process of its own, killed and started again on its disk."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner

pytest.importorskip("vllm")
httpx2 = pytest.importorskip("httpx2")
openai = pytest.importorskip("openai")

from support.chaos import Answer, ask, make_prompts
from support.chaos.asking import DTYPE, body_of

from ragorder.adapters.observing.tier_stats import Hits, TierFigures, TierStats, fetch_hits, fetch_tier_stats
from ragorder.adapters.vllm.server_profile import profile_server
from ragorder.adapters.vllm_tiers import TierSettings
from ragorder.cli.stats import stats
from ragorder.eval.engines.server import VLLMServer
from ragorder.kernels.profile_cache import ProfileCache

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

BLOCK_SIZE = 32
BLOCKS = 32
HOST_CHUNKS = 48
PROMPTS = 10
KNOWN_S = 20.0
"""How long a server may take to publish what it has counted."""

T = TypeVar("T")


@dataclass
class Reply:
    """An answer, and where the server said that the KV of its prompt came from."""

    answer: Answer
    hits: Hits


@dataclass
class Story:
    """What a server answered and published while it was filled, in this order."""

    cold: list[Answer] = field(default_factory=list)
    almost: list[Answer] = field(default_factory=list)
    device_tokens: int = BLOCKS * BLOCK_SIZE
    working_set_tokens: int = 0
    first: list[Reply] = field(default_factory=list)
    from_host: list[Reply] = field(default_factory=list)
    from_disk: list[Reply] = field(default_factory=list)
    stats: TierStats | None = None
    shown: str = ""
    shown_json: dict[str, Any] = field(default_factory=dict)


@dataclass
class Aftermath:
    """What followed: the server killed and started again on its disk."""

    retries: int
    retried: Answer
    hits_after_restart: Hits


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers") / "disk"


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with httpx2.Client(timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def server(vllm_model: Path, disk: Path) -> Iterator[VLLMServer]:
    settings = TierSettings(
        host_bytes=HOST_CHUNKS * BLOCK_SIZE * kv_bytes(vllm_model), disk_path=disk, disk_bytes=1 << 30, profile="auto"
    )
    with VLLMServer(
        vllm_model,
        blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=BLOCKS * BLOCK_SIZE,
        dtype=DTYPE,
        kv_transfer_config=settings.kv_transfer_config(),
        environment={"XDG_CACHE_HOME": str(disk.parent / "cache")},
    ) as server:
        yield server


@pytest.fixture(scope="module")
def story(server: VLLMServer, client: Any) -> Story:
    """All prompts, cold first, and with one block that is another's; then each again; the last one but one once more,
    which the host has; the first ones once more, which only the disk has."""
    story, drawn = Story(), prompts()
    story.working_set_tokens = sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in drawn)
    for number, prompt in enumerate(drawn):
        story.cold.append(ask(client, server.base_url, server.model_name, prompt, salt=f"cold {number}"))
        other = drawn[number - 1][BLOCK_SIZE * 5 : BLOCK_SIZE * 6]
        almost = [*prompt[: BLOCK_SIZE * 5], *other, *prompt[BLOCK_SIZE * 6 :]]
        story.almost.append(ask(client, server.base_url, server.model_name, almost, salt=f"almost {number}"))
    server.reset(host=True)
    story.first = [reply(server, client, prompt) for prompt in drawn]
    story.from_host = [reply(server, client, drawn[-2])]
    story.from_disk = [reply(server, client, prompt) for prompt in drawn[:3]]
    story.stats = fetch_tier_stats(server.base_url)
    story.shown = show(server.base_url)
    story.shown_json = json.loads(show(server.base_url, "--json"))["kv"]
    return story


@pytest.fixture(scope="module")
def aftermath(story: Story, server: VLLMServer) -> Aftermath:
    """A long answer is on its way when the server is killed. The openai client asks again until one is there. Only the
    tests that need it wait for a second start."""
    done: Future[Any] = Future()

    def request() -> None:
        body = body_of(server.model_name, prompts()[0]) | {"max_tokens": 300}
        extra = {name: body.pop(name) for name in ("ignore_eos", "return_tokens_as_token_ids")}
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=60, max_retries=40)
        try:
            with client:
                done.set_result(client.completions.with_raw_response.create(**body, extra_body=extra))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=request, daemon=True).start()
    eventually(lambda: running(server) or done.done(), bool)
    assert not done.done(), f"nothing is on its way that could be lost: {done.result()}"
    server.kill()
    server.start()
    raw = done.result(timeout=240)
    hits = eventually(lambda: fetch_hits(server.base_url), lambda hits: hits.total > 0)
    return Aftermath(raw.retries_taken, Answer.of(raw.parse().model_dump()), hits)


def prompts() -> list[list[int]]:
    return [list(prompt) for prompt in make_prompts(PROMPTS, documents=200, seed=3).prompts]


def reply(server: VLLMServer, client: Any, prompt: list[int]) -> Reply:
    """Ask, and wait until the server has counted it."""
    before = fetch_hits(server.base_url)
    answer = ask(client, server.base_url, server.model_name, prompt)
    counted = before.total + answer.prompt_tokens
    return Reply(answer, eventually(lambda: fetch_hits(server.base_url), lambda hits: hits.total >= counted) - before)


def running(server: VLLMServer) -> bool:
    page = httpx2.get(f"{server.base_url}/metrics").text
    counts = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
    return any(float(line.rpartition(" ")[2]) > 0 for line in counts)


def eventually(read: Callable[[], T], enough: Callable[[T], bool]) -> T:
    deadline = time.monotonic() + KNOWN_S
    while not enough(found := read()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert enough(found), f"the server never came to say so: {found}"
    return found


def show(*arguments: str) -> str:
    done = CliRunner().invoke(stats, [*arguments], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.output


def figures(stats: TierStats | None, tier: str) -> TierFigures:
    assert stats is not None
    return next(each for each in stats.tiers if each.tier == tier)


def kv_bytes(model: Path) -> int:
    """Of a token."""
    from transformers import AutoConfig

    from ragorder.benchmarks.ragcache.tiering.experiment import kv_bytes_per_token

    return kv_bytes_per_token(AutoConfig.from_pretrained(model), 4)


def whole_blocks(answer: Answer) -> int:
    """Of a prompt all but its last token can be had from a cache, in whole blocks."""
    return (answer.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class TestWhatIsEvictedComesBack:
    def test_the_working_set_is_four_times_as_large_as_the_device_and_larger_than_the_host(self, story: Story) -> None:
        assert story.working_set_tokens >= 4 * story.device_tokens
        assert story.working_set_tokens > HOST_CHUNKS * BLOCK_SIZE

    def test_whole_prompts_come_back_from_host_and_disk(self, story: Story) -> None:
        assert [answer.cached_tokens for answer in story.cold] == [0] * PROMPTS
        assert all(reply.hits.host > 0 for reply in story.from_host)
        assert all(reply.hits.disk > 0 for reply in story.from_disk)
        for reply in story.from_host + story.from_disk:
            assert reply.answer.cached_tokens == whole_blocks(reply.answer)

    def test_usage_and_metrics_say_the_same(self, story: Story) -> None:
        for reply in story.first + story.from_host + story.from_disk:
            hits = reply.hits
            assert hits.device + hits.host + hits.disk == reply.answer.cached_tokens
            assert hits.total == reply.answer.prompt_tokens
            assert hits.elsewhere == 0

    def test_answers_are_those_of_a_cold_run(self, story: Story) -> None:
        drawn = list(range(PROMPTS))
        asked = [*drawn, drawn[-2], *drawn[:3]]
        for number, reply in zip(asked, story.first + story.from_host + story.from_disk, strict=True):
            assert reply.answer.agrees(story.cold[number])

    def test_a_single_block_of_another_prompt_would_be_noticed(self, story: Story) -> None:
        assert len(story.almost) == PROMPTS
        assert not any(almost.agrees(cold) for almost, cold in zip(story.almost, story.cold, strict=True))


class TestWhatTheServerSays:
    def test_what_is_where(self, story: Story) -> None:
        host, disk = figures(story.stats, "host"), figures(story.stats, "disk")
        assert 0 < host.chunks <= HOST_CHUNKS
        assert 0 < host.bytes <= host.capacity_bytes
        assert host.evicted > 0
        assert disk.chunks * BLOCK_SIZE >= story.working_set_tokens
        assert 0 < disk.bytes <= disk.capacity_bytes
        assert host.failed_transfers == disk.failed_transfers == sum(disk.refused.values()) == 0

    def test_the_command_shows_tiers_and_hits(self, story: Story) -> None:
        for word in ("device", "host", "disk", "evicted", "refused", "oldest", "computed"):
            assert word in story.shown
        assert story.stats is not None
        assert story.shown_json["hits"] == story.stats.hits.as_json()
        assert [tier["tier"] for tier in story.shown_json["tiers"]] == [tier.tier for tier in story.stats.tiers]

    def test_a_server_without_tiers_is_detected(self, vllm_server: VLLMServer) -> None:
        done = CliRunner().invoke(stats, [vllm_server.base_url])
        assert done.exit_code == 1
        assert "without ragorder's tiers" in done.output
        assert "ragorder tiers config" in done.output


class TestAKillAndARestart:
    def test_a_retried_request_hits_the_killed_servers_disk(self, aftermath: Aftermath, story: Story) -> None:
        assert aftermath.retries > 0
        assert aftermath.hits_after_restart.disk == aftermath.retried.cached_tokens == whole_blocks(aftermath.retried)
        assert aftermath.retried.agrees(story.cold[0])


class TestPrefillTimes:
    def test_are_measured_over_http_and_taken_up_by_the_running_engine(
        self, story: Story, aftermath: Aftermath, server: VLLMServer, client: Any, disk: Path
    ) -> None:
        cache = ProfileCache(disk.parent / "cache" / "ragorder" / "profiles")
        assert profile_used(server) is False
        profile = profile_server(server.base_url, budget_s=2, cache=cache)
        assert profile is not None
        assert (profile.facts["block_size"], profile.cached_tokens[0]) == (BLOCK_SIZE, 0)
        assert list(cache.folder.glob("*.json")) == [cache.path(profile.facts["key"])]

        def used_after_another_request() -> bool | None:
            assert ask(client, server.base_url, server.model_name, prompts()[0]).agrees(story.cold[0])
            return profile_used(server)

        assert eventually(used_after_another_request, bool)


def profile_used(server: VLLMServer) -> bool | None:
    lines = httpx2.get(f"{server.base_url}/metrics").text.splitlines()
    values = [line.rpartition(" ")[2] for line in lines if line.startswith("vllm:ragorder_profile{")]
    return bool(float(values[0])) if values else None
