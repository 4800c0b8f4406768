"""The profile that a vLLM server with tiers awaits: measured over HTTP by `ragorder serve --tiers`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.far_server import BLOCK, FarServer, TieredServer
from support.inside import never_fill, set_bounds

pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.vllm.cache_config import requests_on
from ragorder.adapters.vllm.server_profile import copy_times, profile_server
from ragorder.adapters.vllm_tiers.awaited_profile import AwaitedProfile, note_profile, prefill_costs
from ragorder.adapters.vllm_tiers.settings import TierSettings
from ragorder.kernels.profile_cache import ProfileCache
from ragorder.trie.profile import LINEAR, PrefillProfile

Serve = Callable[..., Any]
KEY = "0123456789abcdef01234567"
PROFILE = PrefillProfile((0,), (10, 20), ((1.0, 5.0),))
METRIC = 'vllm:ragorder_profile{{engine="0",key="{key}",model_name="far"}} 0.0\n'
COPIES = """
vllm:kv_offload_store_bytes_total{engine="0",model_name="far"} 2e+03
vllm:kv_offload_store_time_total{engine="0",model_name="far"} 4.0
vllm:kv_offload_tiering_write_bytes_total{engine="0",model_name="far",tier="1:DiskTier"} 1000.0
vllm:kv_offload_tiering_write_time_total{engine="0",model_name="far",tier="1:DiskTier"} 5.0
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ProfileCache()


@pytest.fixture
def far() -> Iterator[FarServer]:
    """A server whose tiers await a profile, which its metrics say from the first request on."""
    with FarServer() as server:
        server.models = [{"id": "far", "max_model_len": 513}]
        idle = server.pages["/metrics"]
        server.pages["/metrics"] = idle + METRIC.format(key=KEY)
        yield server


class TestProfileServer:
    def test_measures_once_and_logs_no_content(
        self, far: FarServer, cache: ProfileCache, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        profile = profile_server(far.base_url, budget_s=60)
        assert profile is not None
        assert profile == cache.find(KEY)
        assert profile.new_tokens == (16, 64, 256)
        assert profile.cached_tokens == (0, 64, 256)
        assert (profile.facts["model"], profile.facts["block_size"]) == ("far", BLOCK)
        assert dict(profile.loads) == {} and "cached prefixes are compared in tokens" in caplog.text
        lengths = {len(body["prompt"]) for body in far.bodies}
        # The last one of 400 shows that this server has no tiers to load from.
        assert lengths <= {cached + new for cached in (0, 64, 256) for new in (0, 16, 64, 256)} | {400}
        assert all(body["max_tokens"] == 1 for body in far.bodies)
        sent = len(far.bodies)
        assert profile_server(far.base_url) == profile
        assert len(far.bodies) == sent
        assert json.dumps(far.bodies[-1]["prompt"][:4])[1:-1] not in caplog.text

    def test_waits_for_an_engine_that_has_made_no_step_yet(
        self, far: FarServer, cache: ProfileCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = far.page
        early = ("vllm:ragorder_", "none:")
        monkeypatch.setattr(far, "page", lambda path: page(path) if far.bodies else (page(path) or "").replace(*early))
        assert profile_server(far.base_url, budget_s=1) == cache.find(KEY)

    @pytest.mark.parametrize("key", ["../../etc/passwd", "x" * 24, "0" * 23, None])
    def test_skips_servers_without_a_valid_key(
        self, far: FarServer, cache: ProfileCache, key: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, published_s=0.1)
        far.pages["/metrics"] = "" if key is None else METRIC.format(key=key)
        assert profile_server(far.base_url) is None
        assert len(far.bodies) == 1
        assert not cache.folder.exists()

    def test_does_not_measure_the_load_of_others(self, far: FarServer, cache: ProfileCache) -> None:
        far.pages["/metrics"] += (
            'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
        )
        with pytest.raises(ServerError, match="is busy"):
            profile_server(far.base_url)
        assert cache.find(KEY) is None

    def test_needs_the_count_of_cached_tokens(self, far: FarServer, cache: ProfileCache) -> None:
        far.reports = False
        with pytest.raises(ServerError, match="--enable-prompt-tokens-details"):
            profile_server(far.base_url)

    def test_refuses_a_prefix_that_is_not_cached(self, far: FarServer, cache: ProfileCache) -> None:
        far.forgets = lambda number: True
        with pytest.raises(ServerError, match=r"had 0 of .* tokens cached just after they were sent"):
            profile_server(far.base_url)
        far.forgets = lambda number: number % 7 == 0
        assert profile_server(far.base_url, budget_s=1) is not None


class TestLoads:
    """Load times are part of the profile that tiers await."""

    @pytest.fixture
    def tiers(self) -> Iterator[TieredServer]:
        with TieredServer(400, disk=True, load_s={"host": 1e-4, "disk": 4e-4}) as server:
            server.models = [{"id": "far", "max_model_len": 513}]
            server.pages["/metrics"] += METRIC.format(key=KEY)
            yield server

    def measured(self, tiers: TieredServer, budget_s: float) -> PrefillProfile:
        profile = profile_server(tiers.base_url, budget_s=budget_s)
        assert profile is not None
        return profile

    def test_are_measured_if_the_budget_evicts_a_prompt_from_upper_tiers(
        self, tiers: TieredServer, cache: ProfileCache
    ) -> None:
        profile = self.measured(tiers, 120)
        assert profile == cache.find(KEY)
        assert set(profile.loads) == {"host", "disk"}
        assert profile.facts["load_missing"] == []

    def test_are_those_of_the_copies_so_far_if_it_does_not(
        self, tiers: TieredServer, cache: ProfileCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        never_fill(monkeypatch)
        tiers.pages["/metrics"] += COPIES
        profile = self.measured(tiers, 2)
        # The device's 100 bytes are those of its 1,600 tokens, each copied in 2 ms a byte, and from the disk in 5 more.
        assert profile.loads == pytest.approx({"host": 2e-3 / 16, "disk": 7e-3 / 16})
        assert profile.facts["load_missing"] == ["host", "disk"]

    def test_are_no_less_than_those_of_the_copies(self, tiers: TieredServer, cache: ProfileCache) -> None:
        tiers.pages["/metrics"] += COPIES.replace("4.0\n", "4e9\n")
        assert self.measured(tiers, 120).loads["host"] == pytest.approx(2e6 / 16)

    def test_are_not_invented(self, tiers: TieredServer, cache: ProfileCache, monkeypatch: pytest.MonkeyPatch) -> None:
        never_fill(monkeypatch)
        profile = self.measured(tiers, 2)
        assert (dict(profile.loads), profile.facts["load_missing"]) == ({}, ["host", "disk"])


class TestCopies:
    def test_loads_count_before_stores(self) -> None:
        assert copy_times(COPIES, 10.0) == pytest.approx({"host": 0.02, "disk": 0.07})
        loads = "vllm:kv_offload_load_bytes_total 100.0\nvllm:kv_offload_load_time_total 0.1\n"
        assert copy_times(COPIES + loads, 10.0) == pytest.approx({"host": 0.01, "disk": 0.06})

    def test_engines_and_tiers_are_added_up(self) -> None:
        twice = COPIES + COPIES.replace('engine="0"', 'engine="1"')
        assert copy_times(twice, 10.0) == pytest.approx(copy_times(COPIES, 10.0))

        nothing = "vllm:kv_offload_store_bytes_total 0.0\nvllm:kv_offload_store_time_total 0.0\n"
        assert copy_times("", 10.0) == copy_times(nothing, 10.0) == {}


def test_requests_on_a_server() -> None:
    assert requests_on('vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting 3.0\n') == 5
    assert requests_on("vllm:num_requests_running_total 2.0\n") is None


class TestAwaited:
    def test_costs_the_same_for_each_token_until_it_is_measured(self, tmp_path: Path) -> None:
        now = [0.0]
        cache = ProfileCache(tmp_path)
        awaited = AwaitedProfile(KEY, cache, lambda: now[0])
        assert (awaited.measured, awaited.cost(0, 10)) == (False, LINEAR.cost(0, 10))
        cache.keep(KEY, PROFILE)
        assert awaited.cost(0, 10) == LINEAR.cost(0, 10), "the folder is not read for every request"
        now[0] = 5.0
        assert awaited.cost(0, 10) == PROFILE.cost(0, 10)
        cache.path(KEY).unlink()
        now[0] = 100.0
        assert (awaited.measured, awaited.cost(0, 20)) == (True, PROFILE.cost(0, 20))

    def test_reports_a_damaged_file_once_and_reads_the_next(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ticks = iter(range(0, 1000, 10))
        cache = ProfileCache(tmp_path)
        cache.path(KEY).write_text("{")
        awaited = AwaitedProfile(KEY, cache, lambda: float(next(ticks)))
        for _ in range(3):
            assert awaited.cost(0, 10) == LINEAR.cost(0, 10)
        assert caplog.text.count("the profile is ignored") == 1
        cache.keep(KEY, PROFILE)
        assert awaited.cost(0, 10) == PROFILE.cost(0, 10)

    @pytest.mark.parametrize(
        ("profile", "extra", "is_awaited"),
        [
            ("auto", {"ragorder_profile": KEY}, True),
            ("auto", {}, False),
            *((declined, {"ragorder_profile": KEY}, False) for declined in (None, "none")),
        ],
    )
    def test_is_there_from_the_start_if_it_was_measured_before_unless_declined_or_without_a_key(
        self, cache: ProfileCache, profile: str | None, extra: dict[str, str], is_awaited: bool
    ) -> None:
        cache.keep(KEY, PROFILE)
        costs = prefill_costs(TierSettings(host_bytes=1, profile=profile), extra)
        assert (costs is LINEAR) == (not is_awaited)
        if is_awaited:
            assert isinstance(costs, AwaitedProfile) and costs.measured

    def test_a_file_is_read(self, tmp_path: Path) -> None:
        PROFILE.to_file(tmp_path / "p.json")
        settings = TierSettings(host_bytes=1, profile=tmp_path / "p.json")
        assert prefill_costs(settings, {"ragorder_profile": KEY}) == PROFILE
        with pytest.raises(ValueError, match=r"q\.json: No such file"):
            prefill_costs(TierSettings(host_bytes=1, profile=tmp_path / "q.json"), {})

    def test_has_another_key_for_another_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.adapters.vllm_tiers.awaited_profile.this_machine", lambda: {"device": "a GPU"})
        others = [("model", "other"), ("dtype", "float16"), ("tensor_parallel_size", 2), ("block_size", 32)]
        keys = [key_of(), *(key_of(**{name: value}) for name, value in [*others, ("max_num_batched_tokens", 512)])]
        assert len(set(keys)) == len(keys) == 6
        assert key_of() == keys[0]

    def test_does_not_stop_an_engine_that_has_no_key(self, caplog: pytest.LogCaptureFixture) -> None:
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
        note_profile(config)
        assert config.kv_transfer_config.kv_connector_extra_config == {}
        assert "give --profile FILE" in caplog.text


def key_of(
    *,
    model: str = "m",
    dtype: str = "bfloat16",
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    max_num_batched_tokens: int = 64,
) -> str:
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 2})
    parallel = {"world_size": 1, "tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": 1}
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=model, dtype=dtype, enforce_eager=True, hf_config=hf_config),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(block_size=block_size, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
    )
    note_profile(config)
    return str(config.kv_transfer_config.kv_connector_extra_config["ragorder_profile"])


class TestServe:
    @pytest.fixture
    def serve(self, far: FarServer, run_serve: Serve) -> Serve:
        pytest.importorskip("starlette")
        return partial(run_serve, "--upstream", far.base_url)

    def test_measures_at_the_first_start_with_tiers(self, far: FarServer, cache: ProfileCache, serve: Serve) -> None:
        assert serve().exit_code == serve("--tiers", "--profile", "none").exit_code == 0
        assert far.bodies == []
        first, second = (serve("--tiers") for _ in range(2))
        assert (first.exit_code, second.exit_code) == (0, 0), first.said
        assert f"Profile: measuring prefill times of {far.base_url}" in first.said
        assert str(cache.path(KEY)) in first.said
        assert "Profile:" not in second.said

    def test_orders_in_seconds_by_itself(self, cache: ProfileCache, run_serve: Serve) -> None:
        """With sizes and load times of the server's tiers, and nothing given by hand."""
        pytest.importorskip("starlette")
        with TieredServer(400, disk=False) as tiers:
            policy = 'vllm:ragorder_policy{engine="0",policy="lru"} 1.0\n'
            tiers.pages["/metrics"] += METRIC.format(key=KEY) + policy
            done = run_serve("--upstream", tiers.base_url, "--tiers")
        assert done.exit_code == 0, done.said
        assert f"cached prefixes are compared in seconds, by {cache.path(KEY)}" in done.said
        settings = done.orderer.settings
        assert (settings.profile, settings.host_tokens) == (cache.path(KEY), 400 * BLOCK)
        assert done.orderer.degraded == ()

    def test_starts_without(self, far: FarServer, cache: ProfileCache, serve: Serve) -> None:
        far.reports = False
        done = serve("--tiers", "--profile", "auto")
        assert done.exit_code == 0
        assert "prefill times are not measured, so every token counts the same there" in done.said

    def test_refuses_a_file_without_load_times_or_of_another_kind(self, serve: Serve, tmp_path: Path) -> None:
        PROFILE.to_file(tmp_path / "p.json")
        (tmp_path / "q.json").write_text("{}")
        for name, said in (
            ("p.json", "an option of `ragorder tiers config`"),
            ("p.json", "ragorder profile --loads"),
            ("q.json", "q.json: this is not a prefill profile"),
        ):
            done = serve("--tiers", "--profile", str(tmp_path / name))
            assert (done.exit_code, said in done.said) == (2, True)

    def test_orders_by_a_file_without_measuring(self, far: FarServer, serve: Serve, tmp_path: Path) -> None:
        replace(PROFILE, loads={"host": 1e-6}).to_file(tmp_path / "p.json")
        done = serve("--tiers", "--profile", str(tmp_path / "p.json"))
        assert done.exit_code == 0, done.said
        assert far.bodies == []
