"""The short profile of a first start: what is measured within its budget, and the cache that spares the second one."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import lock_profile

from ragorder.common.files import cache_folder
from ragorder.kernels.profile_cache import ProfileCache, profile_key
from ragorder.kernels.short_profile import LONGEST_TOKENS, measure_short_loads, measure_short_profile
from ragorder.trie.profile import PrefillProfile


class FakeEngine:
    """Its prefills take overhead + new x token + new x (cached + new / 2) x attention, on a clock of its own."""

    def __init__(self, overhead_s: float = 0.01, token_s: float = 1e-4, attention_s: float = 1e-8) -> None:
        self.now = 0.0
        self.cells: list[tuple[int, int]] = []
        self._costs = overhead_s, token_s, attention_s

    def time_s(self, cached: int, new: int) -> float:
        overhead, token, attention = self._costs
        return overhead + new * token + new * (cached + new / 2) * attention

    def prefill_s(self, cached: int, new: int) -> float:
        self.cells.append((cached, new))
        seconds = self.time_s(cached, new)
        self.now += seconds
        return seconds

    def profile(self, **options: Any) -> PrefillProfile:
        options = {"longest_tokens": LONGEST_TOKENS, "block_size": 16} | options
        return measure_short_profile(self.prefill_s, clock=lambda: self.now, **options)


class TestShortProfile:
    @given(
        overhead=st.floats(1e-6, 0.1),
        token=st.floats(1e-6, 1e-2),
        attention=st.floats(0, 1e-6),
        longest=st.integers(64, 100_000),
        budget=st.floats(1, 60),
    )
    def test_keeps_to_its_budget(
        self, overhead: float, token: float, attention: float, longest: int, budget: float
    ) -> None:
        engine = FakeEngine(overhead, token, attention)
        engine.profile(longest_tokens=longest, budget_s=budget)
        assert engine.now <= max(budget, engine.time_s(0, 16) * 2) + 1e-9
        assert all(cached + new <= min(longest, LONGEST_TOKENS) for cached, new in engine.cells)
        assert all(cached % 16 == 0 for cached, _ in engine.cells)

    def test_of_a_fast_engine_has_every_length_up_to_half_a_prompt_and_five_repeats(self) -> None:
        engine = FakeEngine()
        profile = engine.profile(longest_tokens=4096, facts={"engine": "fake"})
        assert profile.new_tokens == (16, 64, 256, 1024, 2048)
        assert profile.cached_tokens == (0, 512, 2048)
        assert (profile.facts["engine"], profile.facts["repeats"]) == ("fake", 5)
        for cached in (0, 512, 2048):
            for new in profile.new_tokens:
                assert profile(cached, new) == pytest.approx(engine.time_s(cached, new))

    def test_of_a_slow_engine_is_the_shortest_prefill_alone(self) -> None:
        engine = FakeEngine(overhead_s=30.0)
        profile = engine.profile()
        assert engine.cells == [(0, 16), (0, 16)]
        assert (profile.cached_tokens, profile.new_tokens) == ((0,), (16,))

    def test_takes_the_median_and_does_not_count_what_is_set_up_once(self) -> None:
        engine = FakeEngine(attention_s=0.0)
        seen: dict[tuple[int, int], int] = {}

        def prefill_s(cached: int, new: int) -> float:
            seen[cached, new] = seen.get((cached, new), 0) + 1
            # The first of each length, and another one.
            return engine.prefill_s(cached, new) + (5.0 if seen[cached, new] in (1, 3) else 0.0)

        profile = measure_short_profile(prefill_s, longest_tokens=512, block_size=16, clock=lambda: engine.now)
        for cached in profile.cached_tokens:
            for new in profile.new_tokens:
                assert profile(cached, new) == pytest.approx(engine.time_s(cached, new))


class TestShortLoads:
    @staticmethod
    def measured(times_s: dict[str, list[float]], budget_s: float = 100.0) -> PrefillProfile:
        now = [0.0]
        left = {tier: iter(times) for tier, times in times_s.items()}

        def load_s(tier: str) -> float:
            seconds = next(left[tier])
            if seconds < 0:
                raise OSError("no disk")
            now[0] += seconds
            return seconds

        loads = {tier: partial(load_s, tier) for tier in times_s}
        profile = measure_short_loads(PROFILE, loads, 100, budget_s=budget_s, clock=lambda: now[0])
        assert now[0] <= budget_s + max(times[0] for times in times_s.values())
        return profile

    def test_are_medians_without_the_first_one(self) -> None:
        profile = self.measured({"host": [9.0, 1.0, 2.0, 3.0, 4.0, 50.0], "disk": [5.0] * 6})
        assert profile.loads == {"host": 0.03, "disk": 0.05}
        assert profile.facts["load_tokens"] == 100
        assert profile.facts["load_samples_s_per_token"]["host"] == [0.01, 0.02, 0.03, 0.04, 0.5]
        assert (profile.seconds, profile.facts["engine"]) == (PROFILE.seconds, "test")

    def test_keep_to_their_budget(self) -> None:
        assert self.measured({"host": [1.0] * 6, "disk": [40.0] * 6}, budget_s=50.0).loads == {"host": 0.01}

    def test_a_tier_that_fails_is_left_out(self) -> None:
        assert self.measured({"disk": [-1.0], "host": [1.0] * 6}).loads == {"host": 0.01}
        assert self.measured({"disk": [1.0, 1.0, -1.0], "host": [1.0] * 6}).loads == {"host": 0.01}

    def test_a_disk_that_was_not_measured_costs_what_the_host_does(self) -> None:
        profile = self.measured({"host": [1.0] * 6})
        assert profile.with_loads(0, 1, 0, 100) == profile.with_loads(0, 1, 100, 0) == profile(0, 1) + 1.0


IDENTITY = {"engine": "test", "model": "m", "device": "a CPU", "threads": 2}
KEY = profile_key(IDENTITY)
PROFILE = PrefillProfile((0, 16), (1, 2), ((1.0, 2.0), (1.5, 2.5)), {"engine": "test"})


def unexpected() -> PrefillProfile:
    raise AssertionError("measured again")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def _measured_by_process(folder: Path, log: Path) -> PrefillProfile:
    def measure() -> PrefillProfile:
        with log.open("a") as file:
            file.write("measured\n")
        time.sleep(0.5)
        return PROFILE

    return ProfileCache(folder).find_or_measure(KEY, measure)


class TestCache:
    @pytest.mark.parametrize(("spread", "warned"), [(0.1, False), (0.4, True)])
    def test_warns_of_the_times_of_a_busy_machine(
        self, tmp_path: Path, spread: float, warned: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        facts = {"spread_share": {"median": spread, "largest": spread}}
        ProfileCache(tmp_path).keep(KEY, PrefillProfile((0,), (1, 2), ((1.0, 2.0),), facts))
        assert any("differ by 40%, as on a busy machine" in said for said in warnings(caplog)) == warned

    def test_names_the_file_of_a_profile_that_it_keeps(self, tmp_path: Path) -> None:
        cache = ProfileCache(tmp_path)
        kept = cache.keep(KEY, PROFILE)
        assert cache.file_of(kept) == cache.path(KEY)
        assert cache.file_of(PROFILE) is None
        cache.path(KEY).unlink()
        assert cache.file_of(kept) is None

    def test_does_not_take_another_keys_file(self, tmp_path: Path) -> None:
        cache, other = ProfileCache(tmp_path), profile_key({})
        cache.keep(KEY, PROFILE)
        cache.path(KEY).rename(cache.path(other))
        assert cache.find(other) is None

    @pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'{"format": "ragorder-prefill-profile"}'])
    def test_measures_again_after_damage(self, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
        cache = ProfileCache(tmp_path)
        cache.keep(KEY, PROFILE)
        cache.path(KEY).write_bytes(damage)
        assert cache.find_or_measure(KEY, lambda: PROFILE) == PROFILE
        assert any("the profile is ignored" in said for said in warnings(caplog))
        assert cache.find_or_measure(KEY, unexpected) == PROFILE

    def test_does_without_a_folder(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("no folder")
        cache = ProfileCache(tmp_path / "file")
        for _ in range(2):
            assert cache.find_or_measure(KEY, lambda: PROFILE) == PROFILE
        assert len([said for said in warnings(caplog) if "the profile cannot be stored" in said]) == 2

    def test_does_without_a_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def nowhere() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", nowhere)
        assert ProfileCache().find(KEY) is None
        assert ProfileCache().find_or_measure(KEY, lambda: PROFILE) == PROFILE

    def test_leaves_nothing_of_a_write_that_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        cache = ProfileCache(tmp_path)
        assert cache.keep(KEY, PROFILE) == PROFILE
        assert list(tmp_path.iterdir()) == []
        assert "No space left on device" in warnings(caplog)[0]

    def test_processes_that_start_together_measure_once(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        with ProcessPoolExecutor(3, mp_context=get_context("fork")) as processes:
            running = [processes.submit(_measured_by_process, tmp_path / "profiles", log) for _ in range(3)]
            assert [each.result() for each in running] == [PROFILE] * 3
        assert log.read_text() == "measured\n"

    def test_does_not_wait_for_a_process_that_hangs(self, tmp_path: Path) -> None:
        cache = ProfileCache(tmp_path)
        with lock_profile(cache, KEY):
            assert cache.find_or_measure(KEY, lambda: PROFILE, patience_s=0.1) == PROFILE

    def test_is_in_the_users_cache_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert ProfileCache().folder == cache_folder() / "profiles" == tmp_path / "ragorder" / "profiles"
