"""The embedded engine measures its prefill times at the first start, and serves afterwards as if it had not."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.inside import cache_of, model_of, profile_in
from support.small_engine import Make

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine import Request, Sampling, TieredEngine
from ragorder.kernels.models import prefill_times
from ragorder.kernels.models.identity import identity
from ragorder.kernels.profile_cache import ProfileCache
from ragorder.kernels.store import StoreRefusedError
from ragorder.trie.profile import LINEAR, PrefillProfile

REQUEST = Request(list(range(100)), (40, 80), Sampling(max_tokens=4, ignore_eos=True), keep_logits=True)


@pytest.fixture(autouse=True)
def profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ProfileCache().folder


@pytest.fixture
def start(make: Make) -> Make:
    return partial(make, device_tokens=512, host_bytes=1 << 20, profile="auto")


def profile_of(engine: TieredEngine) -> PrefillProfile:
    assert profile_in(cache_of(engine)) is engine.profile
    return engine.profile


def test_is_measured_at_the_first_start_alone(
    start: Make, profiles: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ragorder.profile")
    first = profile_of(start())
    assert first.facts["engine"].startswith("ragorder ")
    assert max(first.cached_tokens) + max(first.new_tokens) <= 512
    assert len(first.new_tokens) > 1
    assert all(tokens % 16 == 0 for tokens in first.cached_tokens)
    assert "once for this model and machine (at most 10 s)" in caplog.text
    monkeypatch.setattr(prefill_times, "measure_short_profile", None)
    assert profile_of(start()) == first
    assert [path.suffix for path in sorted(profiles.iterdir())] == [".json", ".lock"]


def test_is_another_one_for_what_changes_the_times(start: Make, profiles: Path) -> None:
    settings: list[dict[str, Any]] = [{}, {"block_size": 32}, {"dtype": "bfloat16"}, {"device_tokens": 256}]
    for number, changed in enumerate(settings, 1):
        start(**changed, profile_budget_s=0.5)
        assert len(list(profiles.glob("*.json"))) == number
    start(host_bytes=0, policy="lru", max_requests=3)
    assert len(list(profiles.glob("*.json"))) == len(settings), "the size of a tier changes no prefill"


def test_leaves_the_cache_empty_and_the_answers_alike(start: Make) -> None:
    plain, measured = start(profile=None), start()
    assert profile_of(plain) is LINEAR
    assert measured.stats() == plain.stats()
    assert cache_of(measured).pool.used_blocks == 0
    for _ in range(2):
        (expected,), (got,) = (engine.generate([REQUEST]) for engine in (plain, measured))
        assert got.token_ids == expected.token_ids
        assert got.cached == expected.cached
        assert torch.equal(got.logits, expected.logits)


def test_the_disk_of_an_engine_without_one_is_its_own(start: Make, tmp_path: Path) -> None:
    shape = {"disk_path": tmp_path / "disk", "disk_bytes": 1 << 24, "host_bytes": 1 << 16}
    for chosen in (None, "auto"):
        engine = start(**shape, profile=chosen)
        assert not engine.stats().cache.disk.refused
        assert engine.stats().cache.disk.capacity_bytes
        first, second = (identity(*model_of(each)) for each in (engine, start(profile=None)))
        assert first == second
        engine.close()


def test_a_file_is_read(start: Make, profiles: Path, tmp_path: Path) -> None:
    written = PrefillProfile((0,), (10, 20), ((1.0, 5.0),))
    written.to_file(tmp_path / "auto.json")
    assert profile_of(start(profile=tmp_path / "auto.json")) == written
    assert not profiles.exists()
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        start(profile=tmp_path / "nowhere.json")


class TestLoads:
    def test_are_those_of_the_tiers(self, start: Make, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        for exists in (False, True):
            options = {"disk_path": folder, "disk_bytes": 1 << 24} if exists else {}
            profile = profile_of(start(**options, profile_budget_s=60))
            assert set(profile.loads) == ({"host", "disk"} if exists else {"host"})
            assert all(load_s > 0 for load_s in profile.loads.values())
        assert not list(tmp_path.glob("**/.ragorder-*")), "what was written to the disk is gone"

    def test_of_a_full_disk_are_left_out(self, start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise StoreRefusedError("full", "no store")

        monkeypatch.setattr("ragorder.kernels.models.prefill_times.ChunkStore", full)
        profile = profile_of(start(disk_path=tmp_path / "disk", disk_bytes=1 << 24, profile_budget_s=60))
        assert set(profile.loads) == {"host"}
        assert len(profile.new_tokens) > 1

    def test_of_another_disk_are_measured_again(self, start: Make, tmp_path: Path, profiles: Path) -> None:
        for name in ("first", "second", "first"):
            start(disk_path=tmp_path / name, disk_bytes=1 << 24, profile_budget_s=0.5).close()
        assert len(list(profiles.glob("*.json"))) == 2


def test_a_start_survives_a_measurement_that_fails(
    start: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(prefill_times, "BlockPool", fail)
    engine = start()
    assert profile_of(engine) is LINEAR
    assert "every token counts the same" in caplog.text
    assert engine.generate([REQUEST])[0].error is None


def test_long_prefills_are_measured_in_the_steps_of_the_engine(start: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: set[int] = set()
    pack = prefill_times.pack

    def counted(pieces: Any, *rest: Any) -> Any:
        lengths.update(len(piece.token_ids) for piece in pieces)
        return pack(pieces, *rest)

    monkeypatch.setattr(prefill_times, "pack", counted)
    profile = profile_of(start(max_batch_tokens=32))
    assert max(lengths) == 32 < max(profile.new_tokens)
