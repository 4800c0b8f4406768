"""`Orderer.for_vllm`: what a live server tells of its cache and of its blocks, and what it does not."""

from __future__ import annotations

import logging
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from email.message import Message
from functools import partial
from itertools import chain
from subprocess import CompletedProcess
from typing import Any

import pytest
from support.event_server import BLOCK, TOPIC, Server, follows
from support.http_server import PageServer
from support.inside import set_bounds
from support.rings import grid
from support.waiting import eventually

from ragorder import DegradedWarning, Document, Orderer, PromptBuilder
from ragorder.settings import Settings

Serve = Callable[..., Server]
Publish = Callable[[str | None], str]
Python = Callable[..., "CompletedProcess[str]"]

METRICS = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="4",engine="0",enable_prefix_caching="True",mamba_cache_mode="none",'
    'num_gpu_blocks="101"} 1.0\n'
)
TIERS = (
    'vllm:ragorder_policy{engine="0",policy="forecast"} 1.0\n'
    'vllm:ragorder_capacity_bytes{engine="0",tier="device"} 4000.0\n'
    'vllm:ragorder_capacity_bytes{engine="0",tier="host"} 16000.0\n'
    'vllm:ragorder_capacity_bytes{engine="0",tier="disk"} 1.6e+05\n'
)
SECRET = "sk-0123456789"  # noqa: S105


@pytest.fixture
def pages() -> dict[str, str]:
    """What the server publishes, by path."""
    return {"/metrics": METRICS}


@pytest.fixture
def metrics(pages: dict[str, str]) -> Iterator[str]:
    """The address of a server that publishes its metrics to clients with the key."""

    def page(path: str, headers: Message) -> tuple[int, str]:
        known = path in pages and headers["Authorization"] in (None, f"Bearer {SECRET}")
        return (200, pages[path]) if known else (404, "")

    with PageServer(page) as server:
        yield server.base_url


@pytest.fixture(scope="module")
def builder(tokenizers: dict[str, Any]) -> PromptBuilder:
    return PromptBuilder(tokenizer=tokenizers["chatml"])


DOCUMENTS = [Document(f"d{number}", f"secret {number} of the house, told nobody.") for number in range(12)]
NOWHERE = "http://127.0.0.1:9"


def serve_requests(orderer: Orderer, seed: int = 0) -> list[tuple[list[int], float]]:
    """What an orderer does with a number of requests."""
    chance = random.Random(seed)
    done = []
    for _ in range(40):
        ordering = orderer.order(chance.sample(DOCUMENTS, 5))
        done.append((ordering.permutation, ordering.cached_tokens))
        ordering.confirm()
    assert not orderer.fallbacks
    return done


class TestOrdererForVLLM:
    """What is wrong in every call is an error; what a live server does not tell is done without, and said once."""

    @pytest.fixture(autouse=True)
    def log(self, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
        caplog.set_level(logging.DEBUG, "ragorder")
        return caplog

    @pytest.fixture
    def follow(self, metrics: str, server: Server, builder: PromptBuilder) -> Callable[..., Orderer]:
        """Makes orderers that follow the server's events."""
        endpoints = {"events_endpoint": server.endpoint, "replay_endpoint": server.replay_endpoint}
        return partial(Orderer.for_vllm, metrics, builder=builder, events_topic=TOPIC, **endpoints)

    @pytest.mark.parametrize("url", [NOWHERE, f"http://user:{SECRET}@127.0.0.1:9/v1"])
    def test_no_server_at_the_address_is_an_error_that_names_it(self, url: str) -> None:
        with pytest.raises(RuntimeError, match=r"^http://127\.0\.0\.1:9 cannot be reached .*check host and port"):
            Orderer.for_vllm(url, api_key=SECRET, block_size=BLOCK, capacity_tokens=400)

    @pytest.mark.parametrize("given", [{}, {"block_size": BLOCK, "capacity_tokens": 400}], ids=["asked", "by hand"])
    @pytest.mark.parametrize("is_up", [True, False])
    def test_a_proxy_of_ours_is_recognised(self, given: dict[str, Any], is_up: bool, metrics: str) -> None:
        """It has metrics of its own, and what an application has ordered it would order again."""
        pytest.importorskip("starlette")
        from starlette.responses import PlainTextResponse
        from starlette.routing import Route
        from support.serving_app import serving

        from ragorder.adapters.proxy import make_app

        own = Route("/metrics", lambda request: PlainTextResponse("# HELP ragorder_tree_nodes"))
        with serving() as serve:
            url = serve(make_app(Orderer(), upstream=metrics if is_up else NOWHERE, routes=[own]))
            with pytest.warns(DegradedWarning, match="is ragorder serve, which orders itself: give the address of"):
                orderer = Orderer.for_vllm(url, **given)
        assert len(orderer.degraded) == 1

    def test_a_server_that_is_not_up_yet_is_no_proxy_of_ours(self) -> None:
        with PageServer(lambda *_: (503, b"")) as server, pytest.warns(DegradedWarning, match="HTTP 503"):
            assert len(Orderer.for_vllm(server.base_url).degraded) == 1

    @pytest.mark.parametrize("builder", [None, PromptBuilder()], ids=["no builder", "no tokenizer"])
    def test_an_unusable_endpoint_is_an_error(
        self, metrics: str, server: Server, builder: PromptBuilder | None
    ) -> None:
        threads = threading.active_count()
        with pytest.raises(ValueError, match=r"events_endpoint needs builder=PromptBuilder\(tokenizer=…\)"):
            Orderer.for_vllm(metrics, builder=builder, events_endpoint=server.endpoint)
        assert eventually(lambda: threading.active_count() == threads)

    def test_missing_metrics_are_warned_about_once_and_stay_in_degraded(
        self, metrics: str, builder: PromptBuilder, log: pytest.LogCaptureFixture
    ) -> None:
        with pytest.warns(DegradedWarning, match="/metrics") as warned:
            orderer = Orderer.for_vllm(f"{metrics}/elsewhere", builder=builder, api_key=SECRET)
            assert len(orderer.degraded) == 1
            assert "/metrics" in repr(orderer)
            expected = Orderer(prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
            assert serve_requests(orderer) == serve_requests(expected)
            orderer.close()
            orderer.close()
            assert serve_requests(orderer, 1) == serve_requests(expected, 1)
        assert len(warned) == 1
        assert SECRET not in log.text + str(warned[0].message)
        assert "secret" not in log.text

    def test_sizes_given_by_hand_need_no_warning(self, metrics: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            orderer = Orderer.for_vllm(f"{metrics}/elsewhere", block_size=BLOCK, capacity_tokens=400)
            assert orderer.degraded == ()
            assert Orderer.for_vllm(metrics, api_key=SECRET).degraded == (), "events are asked for, or not"

    @pytest.mark.parametrize(
        ("changed", "found"),
        [
            (("", ""), (1600, 16_000, "forecast")),
            (('policy="forecast"', 'policy="of-tomorrow"'), (0, 0, "pgdsf")),
            (('tier="device"', 'tier="other"'), (0, 0, "pgdsf")),
            (("1.6e+05", "much"), (1600, 0, "forecast")),
        ],
    )
    def test_sizes_of_tiers_are_the_servers(
        self, metrics: str, pages: dict[str, str], changed: tuple[str, str], found: tuple[int, int, str]
    ) -> None:
        """Its 100 blocks of 4 tokens take 4,000 bytes."""
        pages["/metrics"] += TIERS.replace(*changed)
        settings = Orderer.for_vllm(metrics).settings
        assert (settings.host_tokens, settings.disk_tokens, settings.tier_policy) == found
        by_hand = Orderer.for_vllm(metrics, host_tokens=7).settings
        assert (by_hand.host_tokens, by_hand.disk_tokens, by_hand.tier_policy) == (7, 0, "pgdsf")

    @pytest.mark.parametrize(
        ("page", "reason"),
        [
            (METRICS.replace('caching="True"', 'caching="False"'), "prefix cache is off"),
            (METRICS + METRICS.splitlines(keepends=True)[-1].replace('engine="0"', 'engine="1"'), "2 engines"),
        ],
    )
    def test_what_the_server_lacks_is_in_degraded(
        self, metrics: str, pages: dict[str, str], page: str, reason: str
    ) -> None:
        pages["/metrics"] = page
        with pytest.warns(DegradedWarning, match=reason):
            assert reason in "".join(Orderer.for_vllm(metrics).degraded)

    @pytest.mark.filterwarnings("ignore:no KV events")
    @pytest.mark.parametrize("wrong", ["topic", "endpoint"])
    def test_events_that_never_come_are_warned_of_once_the_orderer_is_used(
        self, metrics: str, server: Server, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch, wrong: str
    ) -> None:
        set_bounds(monkeypatch, silence_s=0.3, synchronise_s=0.0)
        endpoint = server.endpoint + "-elsewhere" * (wrong == "endpoint")
        with pytest.warns(DegradedWarning, match="no replay_endpoint"):
            orderer = Orderer.for_vllm(
                metrics, builder=builder, events_endpoint=endpoint, events_topic=TOPIC + "-wrong" * (wrong == "topic")
            )
        with orderer:
            server.store()
            time.sleep(0.5)
            assert len(orderer.degraded) == 1, "an orderer that is not used misses nothing"
            serve_requests(orderer)
            assert eventually(lambda: len(orderer.degraded) == 2)
            assert "no KV events" in orderer.degraded[1]
            assert serve_requests(orderer, 1)

    @pytest.mark.filterwarnings("ignore:no KV events")
    def test_another_topics_events_are_reported_as_a_wrong_topic(
        self, server: Server, follow: Callable[..., Orderer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, silence_s=0.3)
        with follow(events_topic=TOPIC + "-wrong") as orderer:
            server.store()
            assert eventually(lambda: orderer.events.counters.other_topics)
            serve_requests(orderer)
            assert eventually(lambda: bool(orderer.degraded))
            assert "of this topic: correct events_topic" in orderer.degraded[-1]
            assert not orderer.events.counters.garbage

    @pytest.mark.filterwarnings("ignore:no KV events")
    def test_a_server_that_falls_silent_later_is_warned_of_once(
        self, server: Server, follow: Callable[..., Orderer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A server that answers late on a busy machine is not silent.
        set_bounds(monkeypatch, silence_s=2.0, replay_timeout_s=1.0)
        with follow() as orderer:
            server.store()
            serve_requests(orderer)
            assert eventually(lambda: orderer.events.counters.batches == 1)
            time.sleep(0.5)
            assert orderer.degraded == ()
            server.die()
            assert eventually(lambda: bool(orderer.degraded))
            time.sleep(0.5)
            assert len(orderer.degraded) == 1

    def test_an_orderer_finds_what_another_one_had_computed_until_the_engine_forgets_it_and_logs_nothing(
        self, server: Server, follow: Callable[..., Orderer], builder: PromptBuilder, log: pytest.LogCaptureFixture
    ) -> None:
        with follow() as first, follow() as second:
            assert first.events.synchronised
            computed = first.order([DOCUMENTS[number] for number in (3, 1, 2)])
            prompt = builder.build("Who?", computed).token_ids
            assert prompt is not None
            server.store(tokens=prompt)
            assert eventually(lambda: all(follows(each.events, server) for each in (first, second)))
            computed.confirm()
            ids = [*builder.prefix_ids, *chain.from_iterable(builder.document_ids(DOCUMENTS[n]) for n in (3, 1, 2))]
            for orderer in (first, second):
                ordering = orderer.order(DOCUMENTS[:4])
                assert ordering.permutation == [3, 1, 2, 0]
                assert ordering.cached_tokens == len(ids) // BLOCK * BLOCK
                ordering.confirm()
            assert second.order(DOCUMENTS[:4], scope="tenant").permutation == [0, 1, 2, 3]
            server.clear()
            assert eventually(lambda: all(follows(each.events, server) for each in (first, second)))
            assert first.order(DOCUMENTS[:4]).cached_tokens == second.order(DOCUMENTS[:4]).cached_tokens == 0
        for orderer in (first, second):
            assert not orderer.degraded and not orderer.fallbacks
        assert [record for record in log.records if record.name.startswith("ragorder")] == []
        assert "ragorder-kv-events" not in {thread.name for thread in threading.enumerate()}

    def test_blocks_of_all_tiers_are_remembered(self, follow: Callable[..., Orderer]) -> None:
        with follow() as alone, follow(host_tokens=1 << 20) as tiered:
            assert tiered.events.blocks.max_blocks >= 2 * (1 << 20) // BLOCK > alone.events.blocks.max_blocks

    def test_explicit_options_win(self, metrics: str, builder: PromptBuilder) -> None:
        given = {"block_size": 32, "capacity_tokens": 640, "prefix_tokens": 7}
        for name, value in given.items():
            for options in ({name: value}, {"settings": Settings(**{name: value})}):
                settled = Orderer.for_vllm(f"{metrics}/v1", builder=builder, **options).settings
                read = {"block_size": 4, "capacity_tokens": 400, "prefix_tokens": builder.prefix_tokens}
                assert {each: getattr(settled, each) for each in given} == read | {name: value}

    def test_events_that_are_not_there_yet_are_warned_of_once_and_come_later(
        self, metrics: str, serve: Serve, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, synchronise_s=0.2)
        server = serve(start=False)
        endpoints = {"events_endpoint": server.endpoint, "replay_endpoint": server.replay_endpoint}
        with pytest.warns(DegradedWarning, match="no answer from replay_endpoint yet"):
            orderer = Orderer.for_vllm(metrics, builder=builder, events_topic=TOPIC, **endpoints)
        try:
            assert len(orderer.degraded) == 1
            serve_requests(orderer)
            server.start()
            server.store()
            assert eventually(lambda: orderer.events.synchronised and follows(orderer.events, server))
            server.store()
            assert eventually(lambda: follows(orderer.events, server))
            serve_requests(orderer)
            assert len(orderer.degraded) == 1
        finally:
            orderer.close()

    @pytest.mark.parametrize("package", grid(["zmq", "msgspec", "httpx2"], 1))
    def test_a_missing_package_is_named_with_its_extra(self, python: Python, metrics: str, package: str) -> None:
        done = python(
            "-c",
            "from ragorder import Orderer, PromptBuilder\n"
            "builder = PromptBuilder()\n"
            "builder._head_ids = [1]\n"
            f"Orderer.for_vllm('{metrics}', builder=builder, events_endpoint='tcp://127.0.0.1:5557')\n",
            blocked=(package,),
        )
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError") and package in last and "'.[live]'" in last


class TestHybridModels:
    """Recognised by what the server publishes about its Mamba layers."""

    @pytest.fixture
    def publish(self, metrics: str, pages: dict[str, str]) -> Publish:
        """The address of a server that publishes this mode of its Mamba cache."""

        def publish(mode: str | None) -> str:
            told = "" if mode is None else f'mamba_cache_mode="{mode}",'
            pages["/metrics"] = METRICS.replace('mamba_cache_mode="none",', told)
            return metrics

        return publish

    def predictions(self, orderer: Orderer) -> list[int]:
        """Of requests that share one document, and then part."""
        shared, found = Document("a", "a", tokens=4 * BLOCK), []
        for name in "bcd":
            ordering = orderer.order([shared, Document(name, name, tokens=4 * BLOCK)])
            found.append(ordering.cached_tokens)
            ordering.confirm()
        return found

    def test_they_resume_where_requests_have_parted_before(self, publish: Publish) -> None:
        with Orderer.for_vllm(publish("align")) as orderer:
            ordering = orderer.order([Document("a", "a", tokens=64)])
            assert ordering.cloud is not None
            rules = ordering.cloud.model.rules
            assert (rules.resume, rules.interval_tokens) == ("junctions", BLOCK)
            assert orderer.settings.capacity_tokens == 100 * BLOCK
            assert orderer.degraded == ()
        with Orderer.for_vllm(publish("align")) as hybrid, Orderer.for_vllm(publish("none")) as ordinary:
            assert self.predictions(hybrid) == [0, 0, 4 * BLOCK]
            assert self.predictions(ordinary) == [0, 4 * BLOCK, 4 * BLOCK]

    @pytest.mark.parametrize("mode", ["none", "all", None])
    def test_any_other_model_resumes_at_every_block_and_an_unknown_mode_is_logged(
        self, publish: Publish, mode: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "ragorder.vllm"), Orderer.for_vllm(publish(mode)) as orderer:
            assert orderer.order([Document("a", "a", tokens=64)]).cloud is None
            assert orderer.settings.block_size == BLOCK
            assert orderer.degraded == ()
        logged = [each.getMessage() for each in caplog.records if each.name == "ragorder.vllm"]
        assert ["hybrid_rules" in each for each in logged] == [True] * (mode is None)

    def test_their_tiers_are_not_followed_with_a_warning(self, publish: Publish) -> None:
        with (
            pytest.warns(DegradedWarning, match="hybrid model.*host_tokens"),
            Orderer.for_vllm(publish("align"), host_tokens=6400) as orderer,
        ):
            assert orderer.order([Document("a", "a", tokens=64)]).cloud is None
